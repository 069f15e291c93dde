"""Trainers over two ranks, as their users start them: right ones are quiet, ranks that train alone are found."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from audits import Audited, audit

pytestmark = [pytest.mark.hf, pytest.mark.slow]


def cut(
    script: str, launcher: str, accumulated: str = "", full: str = "", common: str = "", updates: int = 2
) -> Audited:
    """Audits 8 samples in one process against 2 micro-batches of 2 on each of two ranks."""
    options = ("--launcher", launcher, "--updates", str(updates))
    return audit(script, f"--batch-size 8 {full}", f"--batch-size 2 --accum 2 {accumulated}", common, options)


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_transformers_under_torchrun() -> None:
    """Padded text, dropout and clipping: the tokens of all ranks are counted from transformers 4.46 on."""
    needs("transformers")
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("the Trainer of then averaged over each rank's tokens")
    result = cut("hf_trainer.py", "torchrun --standalone --nproc-per-node 2", common="--dropout 0.1")
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)
    assert result.update(1)["relative_difference"] < 1e-6


ACCELERATE = "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"


def test_accelerate_under_its_launcher() -> None:
    needs("accelerate")
    result = cut("accelerate_loop.py", ACCELERATE, updates=1)
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


def test_accelerate_advances_its_scheduler_once_per_process() -> None:
    needs("accelerate")
    assert cut("accelerate_loop.py", ACCELERATE).faults == {"GAV609"}


@pytest.mark.parametrize(("common", "faults"), [("", set()), ("--never", {"GAV701"})], ids=["right", "never"])
def test_lightning_that_starts_its_ranks_itself(common: str, faults: set[str]) -> None:
    needs("lightning")
    result = cut("lightning_trainer.py", "python", "--devices 2", "--devices 1", common)
    assert (result.code, result.faults) == (int(bool(faults)), faults), str(result)
    assert all(finding["proven"] for finding in result.document["findings"])


def test_lightning_whose_ranks_nobody_asked_for_is_told() -> None:
    """Seen from rank 0 alone two ranks that train alone look right: no verdict without the option."""
    needs("lightning")
    result = audit(
        "lightning_trainer.py", "--batch-size 8 --devices 2", "--batch-size 2 --accum 4 --devices 2", "--never"
    )
    assert (result.code, result.outcome) == (3, "inconclusive"), str(result)
    assert "--launcher" in result.document["reason"]
