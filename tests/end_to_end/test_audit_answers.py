"""Training scripts, unchanged, and what an audit answers of each: a row per script, its fault and line, or quiet."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from audits import SCRIPTS, audit, folder, marked

UPDATES_4, ONE, TAIL = ("--updates", "4"), ("--updates", "1"), ("--tail",)


class Row(NamedTuple):
    """A script with its options, and what must come out.

    Args:
        script: A file of `tests/scripts`, or a module of `tests/scripts/project`.
        common: Arguments of both runs.
        faults: All codes, the first with the line `mark`, `proven` where asked for.
        words: Of the answer's reason where there is no fault, else of the first finding.
    """

    script: str
    common: str = ""
    faults: str = ""
    mark: str = ""
    words: str = ""
    options: tuple[str, ...] = ()
    full: str = "--batch-size 16 --accum 1"
    accumulated: str = "--batch-size 4 --accum 4"
    proven: bool = False
    quick: bool = False


DIGITS = {"full": "--batch-size 128 --accum 1", "accumulated": "--batch-size 32 --accum 4"}
SLICES = {"full": "--batch-size 8", "accumulated": "--batch-size 2 --accum 4"}
CLIPPING, DRAWING, STAGES, LOW = "loops_clipping.py", "train_drawing.py", "loops_rates.py", "train_low_precision.py"
DRAWN = "diffusion mixed crops one_by_one ahead shuffled augmented stream sharded bucketed"

ROWS = [
    # what else changes gradients between the last backward pass and the step
    Row(
        CLIPPING, "--change by_norm_then_divided --undivided --clip 0.1", "GAV606", "by_norm_then_divided", proven=True
    ),
    Row(CLIPPING, "--change divided_then_by_norm --undivided --clip 0.1"),
    Row(CLIPPING, "--change by_hand --clip 0.1"),
    Row(CLIPPING, "--change divided_then_by_hand --clip 0.1 --undivided"),
    Row(CLIPPING, "--change centralised"),
    Row(CLIPPING, "--change centralised --undivided", "GAV201"),
    # S12: where the weights change alike there is no fault; Adam hides a factor and takes nothing out
    Row(CLIPPING, "--change nothing --undivided --optimizer dividing", words="takes the factor out"),
    Row(CLIPPING, "--change nothing --undivided --optimizer lower_rate", words="takes the factor out"),
    Row(CLIPPING, "--change nothing --optimizer dividing", "GAV609"),
    Row(CLIPPING, "--change nothing --undivided --optimizer Adam", "GAV201"),
    # S02: what a step is made with, at the same update
    Row(STAGES, "--counter micro_batches --what lr", "GAV609", "setting", quick=True),
    Row(STAGES, "--counter micro_batches --what momentum", "GAV609", "setting"),
    Row(STAGES, "--counter updates"),
    Row("loops_extras.py", "--loop average_decay_by_micro_batch", "GAV609", "average_decay_by_micro_batch"),
    Row("loops_extras.py", "--loop average_decay_by_update"),
    # GAV202 where no loss of torch's counts the targets: 16, 12, 14 and 16 of 58 tokens
    Row("loops_tokens.py", "", "GAV202", "tokens", "0.2759, 0.2069, 0.2414, 0.2759"),
    Row("loops_tokens.py", "", "GAV202", "tokens", "what each micro-batch's loss is divided by"),
    Row("loops_tokens.py", "--by window"),
    # S11: several optimizers have windows of their own
    *(Row("loops_partners.py", f"--loop {loop}", options=UPDATES_4) for loop in ("interleaved", "shifted", "against")),
    Row("loops_partners.py", "--loop interleaved --undivided", "GAV201", options=UPDATES_4),
    Row("train_gan.py", options=UPDATES_4),
    Row("train_gan.py", "--divide discriminator", "GAV201", "generator", options=UPDATES_4),
    # rows 4 and 8 of the reference systems; rows 3 and 9 are in test_audit_loops, row 10 is in test_audit_frameworks
    Row("digits.py", "--divide window", **DIGITS),
    # other ways to write a script
    Row("training.train", full="--batch-size 16"),
    Row("train_click.py", "--no-divide --workers 1", "GAV201", "divide"),
    Row("loops_steps.py", "--loop step_in_a_hook", "GAV601", "step_in_a_hook", proven=True),
    Row("loops_steps.py", "--loop head_never_steps", "GAV502"),
    # a cached gradient is right where samples act on each other
    Row("loops_coupled.py", "--loop cached"),
    # single parameters: a factor of one alone (S06), terms that cancel (S13), float32 master copies
    Row("train_two_towers.py", "", "GAV201", "cached", "`logit_scale`"),
    Row("train_two_towers.py", "--scale once"),
    Row("train_cancelling.py", "--samples 64", options=UPDATES_4),
    Row("train_cancelling.py", "--undivided", "GAV201", "loss", options=UPDATES_4),
    Row("master_weights.py", "--loop right"),
    Row("master_weights.py", "--loop forgotten", "GAV201", "loss"),
    Row("loops_wrapped.py", "--loss running", "GAV202", words="repeats the micro-batches before it", options=ONE),
    # S15: what a loop draws and its loaders give is dealt to the accumulated run; a planted factor is still found
    *(Row(DRAWING, f"--loop {loop}") for loop in DRAWN.split()),
    Row(DRAWING, "--loop diffusion --undivided", "GAV201", "backward"),
    Row(DRAWING, "--loop ahead --undivided", "GAV201"),
    Row(DRAWING, "--loop shuffled --undivided", "GAV201", "backward"),
    Row(DRAWING, "--loop shuffled --workers 2"),
    Row(DRAWING, "--loop augmented --workers 2"),
    Row(DRAWING, "--loop masked", words="rows of the full batch's batches, and padded like those"),
    Row(DRAWING, "--loop masked --undivided", "GAV201", "backward"),
    Row("train_slices.py", "--undivided", "GAV201", **SLICES),
    # an epoch's short last window, which the first updates of a run never reach
    Row("train_epochs.py", "--end misscaled", words="no epoch's end was reached"),
    Row("train_epochs.py", "--end misscaled", "GAV605", options=TAIL),
    Row("train_epochs.py", "--end lost", "GAV604", options=TAIL),
    Row("train_epochs.py", "--end coupled", "GAV103", options=TAIL),
    Row("train_epochs.py", "--end right", words="last window has 2 of 4 micro-batches", options=TAIL),
    Row("loops_right.py", "--loop usual", "GAV602", options=TAIL),
    Row("train_resuming.py", words="could not shorten an epoch", options=TAIL),
    # below float32 no moved weights could tell a fault from rounding
    Row(LOW, "--precision bfloat16 --fault undivided --clip 0.1", "GAV201"),
    Row(LOW, "--precision float16 --fault undivided --clip 0.1", "GAV201"),
    Row(LOW, "--fault statistics", "GAV101"),
]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.script} {row.common} {row.faults}", marks=() if row.quick else pytest.mark.slow)
        for row in ROWS
    ],
)
def test_a_script_gets_its_answer(row: Row) -> None:
    with folder(SCRIPTS / "project"):
        result = audit(row.script, row.full, row.accumulated, row.common, row.options)
    faults = row.faults.split()
    assert (result.code, result.faults) == (int(bool(faults)), set(faults)), str(result)
    assert result.outcome == ("divergent" if faults else "equivalent"), str(result)
    assert not row.mark or result.line(faults[0]) == marked(row.script, row.mark), str(result)
    assert not row.proven or result.finding(faults[0])["proven"], str(result)
    assert row.words in (result.text(faults[0]) if faults else result.document["reason"]), str(result)
