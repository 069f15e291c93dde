"""Scripts around trainers, unchanged, and the callbacks on them: Hugging Face's `Trainer`, Accelerate, Lightning.

They need packages that gaverify does not, so they carry a marker; what is expected depends on the version that is
installed, because the trainer of 2024 averaged token means over micro-batches and its successors do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from audits import SCRIPTS, Audited, audit, marked

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
            assert "transformers 4.46 or newer" in result.text("GAV202"), str(result)

    @pytest.mark.parametrize("common", ["", "--dropout 0.1 --checkpoint", "--dropout 0.1 --bf16"])
    def test_clipping_by_default_hides_nothing(self, common: str, repaired: bool) -> None:
        result = audit("hf_trainer.py", FULL, ACCUMULATED, f"--max-steps 4 {common}")
        assert result.code == (0 if repaired else 1), str(result)
        assert result.faults == (set() if repaired else {"GAV202"}), str(result)
        assert common or result.update(1)["data"]["differing"] == 0

    def test_sentences_of_one_length(self) -> None:
        """Equal token counts: the old trainer is right as well."""
        installed("transformers")
        result = audit("hf_trainer.py", FULL, ACCUMULATED, "--max-steps 4 --equal --max-grad-norm 0")
        assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)

    def test_padded_text_in_a_model_that_ignores_the_count(self, repaired: bool) -> None:
        if not repaired:
            pytest.skip("a Trainer that hands no count on")
        result = audit("hf_trainer.py", FULL, ACCUMULATED, "--max-steps 2 --max-grad-norm 0 --model ignores-the-count")
        assert (result.code, result.faults) == (1, {"GAV201", "GAV202"}), str(result)
        for code in ("GAV201", "GAV202"):
            assert "divide by `num_items_in_batch`" in result.text(code), str(result)

    def test_a_model_that_ignores_the_count(self, repaired: bool) -> None:
        """B06: the trainer leaves the division to the model as soon as that accepts the token count."""
        common = "--max-steps 4 --equal --max-grad-norm 0 --model ignores-the-count"
        result = audit("hf_trainer.py", FULL, ACCUMULATED, common)
        if repaired:
            assert (result.code, result.faults) == (1, {"GAV201"}), str(result)
            assert result.update(1)["norm_ratio"] == pytest.approx(4, rel=1e-3)
            assert "divide by `num_items_in_batch`" in result.text("GAV201"), str(result)
        else:
            assert (result.code, result.faults) == (0, set()), str(result)


@pytest.mark.parametrize(
    ("package", "script", "common", "mark"),
    [
        ("accelerate", "accelerate_loop.py", "", ""),
        ("accelerate", "accelerate_loop.py", "--divide --clip 100", "divide"),
        ("lightning", "fabric_loop.py", "", ""),
        ("lightning", "fabric_loop.py", "--forget", "forget"),
        ("lightning", "lightning_trainer.py", "", ""),
        ("lightning", "lightning_trainer.py", "--divide", ""),
    ],
)
def test_a_wrong_scale_is_found_and_a_right_one_is_not(package: str, script: str, common: str, mark: str) -> None:
    installed(package)
    result = audit(script, common=common)
    assert (result.code, result.faults) == ((1, {"GAV201"}) if common else (0, set())), str(result)
    assert not mark or result.line("GAV201") == marked(script, mark)
    # Lightning's Fabric leaves the division to the script.
    assert "divide" not in common or "already: remove" in result.text("GAV201"), str(result)
    assert script != "lightning_trainer.py" or result.update(1)["window"]["steps"] == 4


def test_accelerates_short_last_window_is_divided_by_k() -> None:
    installed("accelerate")
    result = audit("accelerate_loop.py", common="--samples 24 --clip 100")
    assert result.code == 1, str(result)
    assert "GAV605" in result.faults, str(result)
    assert result.faults <= {"GAV605", "GAV201"}, str(result)


def test_the_short_last_window_of_lightnings_trainer() -> None:
    installed("lightning")
    result = audit("lightning_trainer.py", common="--samples 24")
    assert result.code == 1, str(result)
    assert "GAV605" in result.faults, str(result)


def cut(
    script: str, launcher: str, accumulated: str = "", full: str = "", common: str = "", updates: int = 2
) -> Audited:
    """Audits 8 samples in one process against 2 micro-batches of 2 on each of two ranks."""
    options = ("--launcher", launcher, "--updates", str(updates))
    return audit(script, f"--batch-size 8 {full}", f"--batch-size 2 --accum 2 {accumulated}", common, options)


def test_transformers_under_torchrun() -> None:
    """Padded text, dropout and clipping: the tokens of all ranks are counted from transformers 4.46 on."""
    if installed("transformers") < (5,):
        pytest.skip("the Trainer of then averaged over each rank's tokens")
    result = cut("hf_trainer.py", "torchrun --standalone --nproc-per-node 2", common="--dropout 0.1")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    assert result.update(1)["relative_difference"] < 1e-6


ACCELERATE = "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"


def test_accelerate_under_its_launcher() -> None:
    installed("accelerate")
    result = cut("accelerate_loop.py", ACCELERATE, updates=1)
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


def test_accelerate_advances_its_scheduler_once_per_process() -> None:
    installed("accelerate")
    assert cut("accelerate_loop.py", ACCELERATE).faults == {"GAV609"}


@pytest.mark.parametrize(("common", "faults"), [("", set()), ("--never", {"GAV701"})], ids=["right", "never"])
def test_lightning_that_starts_its_ranks_itself(common: str, faults: set[str]) -> None:
    installed("lightning")
    result = cut("lightning_trainer.py", "python", "--devices 2", "--devices 1", common)
    assert (result.code, result.faults) == (int(bool(faults)), faults), str(result)
    assert all(finding["proven"] for finding in result.document["findings"])


def test_lightning_whose_ranks_nobody_asked_for_is_told() -> None:
    """Seen from rank 0 alone two ranks that train alone look right: no verdict without the option."""
    installed("lightning")
    result = audit(
        "lightning_trainer.py", "--batch-size 8 --devices 2", "--batch-size 2 --accum 4 --devices 2", "--never"
    )
    assert (result.code, result.outcome) == (3, "inconclusive"), str(result)
    assert "--launcher" in result.document["reason"]


HUGGING_FACE = """
import sys, tempfile, torch
sys.argv = ["x"]
from hf_trainer import *
from gaverify.callbacks import DivergentTraining, TrainerCallback

def train(kind, callbacks):
    set_seed(0)
    config = GPT2Config(vocab_size=len(WORDS) + 2, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                        eos_token_id=0, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    model = kind(config)
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, use_cpu=True,
            report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True, learning_rate=1e-3)
        Trainer(model, training, train_dataset=Rows(), data_collator=collate_rows, callbacks=callbacks).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

right, wrong = TrainerCallback(), TrainerCallback()
assert torch.equal(train(GPT2LMHeadModel, [right]), train(GPT2LMHeadModel, []))
print("right", right.gate.verdict.outcome.value)
try:
    train(IgnoresTheCount, [wrong])
except DivergentTraining as error:
    codes = sorted({f.code for f in error.verdict.findings if f.severity == "fault"})
    print("wrong", error.verdict.outcome.value, *codes)
known = [{"code": f.code, "location": "*", "reason": "known", "suspected": True} for f in wrong.gate.verdict.findings]
train(IgnoresTheCount, [TrainerCallback(known)])
train(IgnoresTheCount, [TrainerCallback(stop=False)])
print("accepted")
"""

LIGHTNING = """
import sys, torch
sys.argv = ["x"]
from lightning_trainer import *
from gaverify.callbacks import DivergentTraining, LightningCallback

class Divides(Classifier):
    def training_step(self, batch, index):
        return super().training_step(batch, index) / self.trainer.accumulate_grad_batches

class Normalises(Classifier):
    def __init__(self, divide_by):
        super().__init__(divide_by)
        self.network = network(batchnorm=True)

def train(kind, callbacks):
    args = options("x").parse_args(["--batch-size", "4", "--accum", "4"])
    lightning.seed_everything(0, verbose=False)
    model = kind(1)
    lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, max_steps=2, accumulate_grad_batches=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=callbacks,
    ).fit(model, loader_for(args))
    return torch.cat([p.detach().flatten() for p in model.parameters()])

right = LightningCallback()
assert torch.equal(train(Classifier, [right]), train(Classifier, []))
print("right", right.gate.verdict.outcome.value)
for kind in (Divides, Normalises):
    try:
        train(kind, [LightningCallback()])
    except DivergentTraining as error:
        codes = sorted({f.code for f in error.verdict.findings if f.severity == "fault"})
        print(kind.__name__, error.verdict.outcome.value, *codes)
"""


def run(text: str, folder: Path) -> list[str]:
    script = folder / "script.py"
    script.write_text(text)
    code = f"import sys, runpy; sys.path.insert(0, {str(SCRIPTS)!r}); runpy.run_path({str(script)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was verified in" in done.stderr  # what it cost
    return done.stdout.splitlines()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_trainer(tmp_path: Path) -> None:
    lines = run(HUGGING_FACE, tmp_path)
    words = ("hf_trainer.py", "--batch-size 8 --accum 1", "--batch-size 2 --accum 4")
    right = audit(*words, "--max-steps 2 --max-grad-norm 0")
    wrong = audit(*words, "--max-steps 2 --max-grad-norm 0 --model ignores-the-count")
    assert f"right {right.outcome}" in lines
    # The callback fits one weight per micro-batch; an audit compares the loop's total with the full run's as well.
    assert f"wrong {wrong.outcome} GAV202" in lines and set(wrong.faults) == {"GAV201", "GAV202"}
    assert (right.outcome, wrong.outcome) == ("equivalent", "divergent") and "accepted" in lines


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning(tmp_path: Path) -> None:
    lines = run(LIGHTNING, tmp_path)
    right = audit("lightning_trainer.py", "--batch-size 16 --accum 1", "--batch-size 4 --accum 4")
    wrong = audit("lightning_trainer.py", "--batch-size 16 --accum 1", "--batch-size 4 --accum 4", "--divide")
    assert f"right {right.outcome}" in lines and right.outcome == "equivalent"
    assert f"Divides {wrong.outcome} {' '.join(sorted(wrong.faults))}" in lines
    assert "Normalises divergent GAV101" in lines
