"""Scripts around trainers, unchanged: Hugging Face's `Trainer`, Accelerate, Lightning.

They need packages that gaverify does not, so they carry a marker; what is expected depends on the version that is
installed, because the trainer of 2024 averaged token means over micro-batches and its successors do not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from audits import audit, marked

pytestmark = [pytest.mark.hf, pytest.mark.slow]

FULL, ACCUMULATED = "--batch-size 8 --accum 1", "--batch-size 2 --accum 4"


def installed(package: str) -> tuple[int, ...]:
    """Returns the first two numbers of a package's version; skips the test where it is missing."""
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def repaired() -> bool:
    """Whether the Trainer divides by the valid tokens of the whole window (transformers 4.46)."""
    return installed("transformers") >= (4, 46)


class TestTrainer:
    """Row 10: the trainer fault of 2024, and its repair."""

    def test_padded_text(self, repaired: bool) -> None:
        result = audit("hf_trainer.py", FULL, ACCUMULATED, "--max-steps 4 --max-grad-norm 0")
        if repaired:
            assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
            assert result.update(1)["relative_difference"] < 1e-6
        else:
            assert (result.code, result.faults) == (1, {"GAV202"}), str(result)
            assert result.update(1)["relative_difference"] > 0.1
            assert result.update(1)["norm_ratio"] > 1.05

    def test_clipping_by_default_hides_nothing(self, repaired: bool) -> None:
        result = audit("hf_trainer.py", FULL, ACCUMULATED, "--max-steps 4")
        assert result.code == (0 if repaired else 1), str(result)
        assert result.update(1)["data"]["differing"] == 0
        assert result.faults == (set() if repaired else {"GAV202"}), str(result)

    def test_dropout_and_checkpointing_as_they_are(self, repaired: bool) -> None:
        result = audit("hf_trainer.py", FULL, ACCUMULATED, "--max-steps 4 --dropout 0.1 --checkpoint")
        assert result.code == (0 if repaired else 1), str(result)
        assert result.faults == (set() if repaired else {"GAV202"}), str(result)

    def test_autocast_to_bfloat16_hides_nothing(self, repaired: bool) -> None:
        result = audit("hf_trainer.py", FULL, ACCUMULATED, "--max-steps 4 --dropout 0.1 --bf16")
        assert result.code == (0 if repaired else 1), str(result)
        assert result.faults == (set() if repaired else {"GAV202"}), str(result)

    def test_sentences_of_one_length(self) -> None:
        """Equal token counts: the old trainer is right as well."""
        installed("transformers")
        result = audit("hf_trainer.py", FULL, ACCUMULATED, "--max-steps 4 --equal --max-grad-norm 0")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)

    def test_a_model_that_ignores_the_count(self, repaired: bool) -> None:
        """B06: the trainer leaves the division to the model as soon as that accepts the token count."""
        common = "--max-steps 4 --equal --max-grad-norm 0 --model ignores-the-count"
        result = audit("hf_trainer.py", FULL, ACCUMULATED, common)
        if repaired:
            assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
            assert result.update(1)["norm_ratio"] == pytest.approx(4, rel=1e-3)
        else:
            assert (result.code, result.faults) == (0, set()), str(result)


class TestAccelerate:
    def test_accumulate(self) -> None:
        installed("accelerate")
        result = audit("accelerate_loop.py")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)

    def test_divided_by_the_script_as_well(self) -> None:
        installed("accelerate")
        result = audit("accelerate_loop.py", common="--divide --clip 100")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
        assert result.line("GAV201") == marked("accelerate_loop.py", "divide")

    def test_its_short_last_window_is_divided_by_k(self) -> None:
        installed("accelerate")
        result = audit("accelerate_loop.py", common="--samples 24 --clip 100")
        assert result.code == 1, str(result)
        assert "GAV605" in result.faults, str(result)
        assert result.faults <= {"GAV605", "GAV201"}, str(result)


class TestLightning:
    @pytest.mark.parametrize("common", ["", "--forget"])
    def test_fabric(self, common: str) -> None:
        installed("lightning")
        result = audit("fabric_loop.py", common=common)
        assert (result.code, result.faults) == ((1, {"GAV201"}) if common else (0, set())), str(result)
        assert not common or result.line("GAV201") == marked("fabric_loop.py", "forget")

    @pytest.mark.parametrize("common", ["", "--divide"])
    def test_trainer(self, common: str) -> None:
        installed("lightning")
        result = audit("lightning_trainer.py", common=common)
        assert (result.code, result.faults) == ((1, {"GAV201"}) if common else (0, set())), str(result)
        assert result.update(1)["backwards"] == 4

    def test_the_trainers_short_last_window(self) -> None:
        installed("lightning")
        result = audit("lightning_trainer.py", common="--samples 24")
        assert result.code == 1, str(result)
        assert "GAV605" in result.faults, str(result)
