"""Training scripts, unchanged, and what an audit answers of each: a row per script, its fault and line, or quiet."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from audits import SCRIPTS, Audited, audit, events_of, folder, marked
from kept import ADVICE, kept_audit, report_again, unpack, write_archive

UPDATES_3, UPDATES_4, ONE, TAIL = ("--updates", "3"), ("--updates", "4"), ("--updates", "1"), ("--tail",)


class Row(NamedTuple):
    """A script with its options, and what must come out.

    Args:
        script: A file of `tests/scripts`, or a module of `tests/scripts/project`.
        common: Arguments of both runs.
        faults: All codes, the first with the line `mark`, `proven` where asked for.
        words: Of the first finding, or of the whole answer where there is no fault.
        notes: All codes of notes, where they matter.
        quick: It is audited by default; other rows are slow.
        kept: Its runs are kept, and compared by default; see `kept`.
        method: How the audit was decided, or how its first update was.
        clips: Whether update 1 was clipped in the full-batch run and in the other, of those that clip.
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
    kept: bool = False
    notes: str | None = None
    method: str = ""
    clips: tuple[bool, ...] | None = None


def looped(script: str, loop: str, fault: str = "", common: str = "", **changes: Any) -> Row:
    """A loop of a script; a fault lies at the line that is marked with the loop's name."""
    return Row(script, f"--loop {loop} {common}".strip(), fault, **{"mark": loop if fault else "", **changes})


def styled(style: str, faults: str = "", mark: str = "", words: str = "", **changes: Any) -> Row:
    """A loop of `loops_unannounced.py`."""
    return Row("loops_unannounced.py", f"--style {style}", faults, mark, words, **LESS, **changes)


def skipping(common: str, faults: str = "", mark: str = "", words: str = "", **changes: Any) -> Row:
    """A run of `loops_skipping.py`."""
    return Row("loops_skipping.py", common, faults, mark, words, **changes)


def tabled(rows: list[Row]) -> pytest.MarkDecorator:
    """A test per row, slow but for the quick ones."""

    def case(row: Row) -> Any:
        marks = () if row.quick else pytest.mark.slow
        return pytest.param(row, id=f"{row.script} {row.common} {row.faults}", marks=marks)

    return pytest.mark.parametrize("row", [case(row) for row in rows])


DIGITS = {"full": "--batch-size 128 --accum 1", "accumulated": "--batch-size 32 --accum 4"}
SLICES = {"full": "--batch-size 8", "accumulated": "--batch-size 2 --accum 4"}
LESS = {"full": "--batch-size 8 --accum 1", "accumulated": "--batch-size 2 --accum 4"}
HALF = {"full": "--batch-size 16 --accum 1", "accumulated": "--batch-size 8 --accum 2"}
RAGGED = {"full": "--micro 16", "accumulated": "--micro 6"}
ANOTHER = {"full": "--batch-size 8 --accum 1 --generated 1", "accumulated": "--batch-size 2 --accum 4 --generated 8"}
CLIPPING, DRAWING, UNUSUAL = "loops_clipping.py", "train_drawing.py", "loops_unusual.py"
STATE, CARRIED = "loops_state.py", "loops_carried.py"
SCALE, STEPS, EXTRAS = "loops_scale.py", "loops_steps.py", "loops_extras.py"
RARE, WORDS, COUPLED = "loops_rare.py", "train_language_model.py", "loops_coupled.py"
HANDED, HIDDEN, DIFFERING = "loops_handed.py", "loops_hidden.py", "loops_differing.py"
UNCOMPARED = "its inputs may differ before it: padded to other lengths or without rows, they cannot be compared"
BACKWARD, MAIN = "loops_backward.py", "loops_main_gradients.py"
DRAWN = "diffusion mixed crops one_by_one ahead shuffled augmented stream sharded bucketed"
DIFFERENT = (
    "cooled widened focused alternating branched switched centred limited averaged hooked clamped banked hardest"
)
JOINED = "because that one is skipped and the step with it"
TIMES_4 = "the gradient of update 1 is 4 times the full batch's (= K)"
CACHED = "two-pass gradient caching (`gaverify.remedies.CachedGradients`); gaverify ran it"
ONCE = "compute it once over the full batch and use this constant in every micro-batch; gaverify ran it: equivalent"
SMALL = "with losses too small to be clipped"
ADDED = "add to the existing gradients"
COUNTED = "sum the losses (`reduction='sum'`) and divide by the total over all micro-batches"
MULTIPLIED = "; in update 1 that means: multiply the losses by"
TOTAL = f"{COUNTED} (the count, or the sum of class weights)"
INSTEAD_OF_SAMPLES = f"{TOTAL}, in place of their shares of samples n_k/N{MULTIPLIED}"
USUAL = "--shuffle --workers 2 --dropout 0.2"
CLIPS = (
    ("--clip 0.1", (True, True)),
    ("--clip 1", (False, True)),
    ("--clip 100", (False, False)),
    ("--change by_value --clip 0.02", (True, True)),
    ("--aliases --clip 0.1", (True, True)),  # kernels that write past lazy clones
)
STYLES = ("plain", "own", "assigned", "compiled")
KINDS, RULES = ("bfloat16", "float16", "autocast"), ("adam", "signs", "lion", "norms")
HALVES = "--fault statistics --samples 128"
IN_FLOAT32: dict[str, Any] = {
    "full": "--batch-size 64 --accum 1",
    "accumulated": "--batch-size 32 --accum 2",
    "mark": "",
    "proven": True,
    "method": "float32-runs",
}
STEPS_4 = ("--steps", "4")
SHORT = {"options": ("--updates", "0"), "accumulated": "--batch-size 7 --accum 4"}

ROWS = [
    # plain loops: the scale of the loss
    looped(SCALE, "division_forgotten", "GAV201", words=TIMES_4),  # B02
    looped(SCALE, "divided_twice", "GAV201"),  # B05
    looped(SCALE, "divided_by_constant", "GAV201", words="both runs divide each loss by 16, so that the full batch's"),
    looped(SCALE, "penalty_undivided", "GAV201"),
    looped(SCALE, "penalty_later", "GAV201"),
    looped(SCALE, "penalty_divided"),
    looped(SCALE, "scaled_after_backward", "GAV201"),  # L19
    looped(SCALE, "short_window", "GAV605", "--samples 24", kept=True),  # B04
    looped(SCALE, "ragged_batches", "GAV202", quick=True, words="by 1.125, 1.125, 0.75", **RAGGED),  # B13: 6, 6, 4
    looped(SCALE, "marked_means", "GAV202", kept=True, proven=True, words=INSTEAD_OF_SAMPLES, **RAGGED),
    looped(SCALE, "marked_means", "GAV202", "--by columns", proven=True, words=COUNTED, **RAGGED),
    looped(SCALE, "marked_means", "GAV403", "--by average", mark="", proven=True, words="changes `average`", **RAGGED),
    looped(SCALE, "marked_means", common="--by marked", **RAGGED),
    looped(SCALE, "matched_targets", "GAV202"),  # B11
    looped(SCALE, "class_weights", "GAV202", kept=True, proven=True, words=f"{TOTAL}{MULTIPLIED}"),
    looped(SCALE, "empty_micro_batch", "GAV203"),
    # the valid tokens of two sentences each, times K: 14, 12, 12 and 15 of 53
    looped(WORDS, "mean_of_means", "GAV202", "--dropout 0.1", words="by 56/53, 48/53, 48/53, 60/53", **LESS),  # B01
    looped(WORDS, "count_ignored", "GAV201", "--equal", **LESS),  # B06
    looped(WORDS, "tokens_of_another_window", "GAV201", words="no constant repairs", quick=True, **ANOTHER),  # B09
    looped(WORDS, "length_of_a_row", "GAV201", "--equal", **LESS),  # B14
    looped(WORDS, "tokens_of_the_window", common="--dropout 0.1", **LESS),  # N20
    looped(WORDS, "padding_counted", **LESS),
    # plain loops: where the step and the clearing of gradients stand
    looped(STEPS, "cleared_inside", "GAV603", kept=True),  # L01
    looped(RARE, "cleared_in_a_closure", "GAV603"),
    looped(STEPS, "cleared_at_epoch", "GAV604", "--samples 24"),  # L02
    looped(STEPS, "leaks_into_next_epoch", "GAV602", "--samples 24"),  # L03
    looped(STEPS, "step_outside_the_if", "GAV601", kept=True),  # L06
    looped(STEPS, "backward_at_the_boundary", "GAV203", mark="", words="3 of 4 do not reach"),
    looped(STEPS, "skipping", "GAV203", "--skipped 1"),
    looped(EXTRAS, "schedule_per_micro_batch", "GAV607", kept=True),  # row 9
    looped(EXTRAS, "clip_by_hand_per_micro_batch", "GAV606", "--clip 0.05"),
    looped(EXTRAS, "average_per_micro_batch", notes="GAV402"),  # L10: the gradients agree
    looped(EXTRAS, "average_per_update", notes=""),
    # plain loops that are right: N07, N08, N09, N18, N19, N27, N26, and the twins of B04, row 9 and L08
    *(looped(SCALE, loop) for loop in ("gradients_divided", "losses_summed", "cleared_at_start")),
    *(looped(SCALE, loop) for loop in ("logged_loss_off", "constant_divisor", "cleared_by_hand")),
    looped(SCALE, "other_order", common="--dropout 0.2"),
    looped(SCALE, "short_window_divided", common="--samples 24"),
    looped(SCALE, "usual", common=USUAL, quick=True),
    looped(SCALE, "weighted_by_samples", **RAGGED),
    *(looped(EXTRAS, loop) for loop in ("clip_per_update", "schedule_per_update", "scaler_per_update")),
    *(looped(RARE, loop) for loop in ("distributed", "sums_of_its_own", "sharpness_aware", "line_search")),
    *(looped(RARE, loop) for loop in ("compiled", "overflowing", "gradient_penalty", "clamped")),
    # an update that both runs skip loses the same samples in both; one that the accumulated run alone skips does not
    *(
        looped(RARE, "skipped_update", common=f"--skip {why}", kept=why == "norm")
        for why in ("norm", "finite", "zeroed")
    ),
    looped(RARE, "skipped_update", "GAV604", "--skip accumulated", kept=True, proven=True),
    looped(RARE, "skipped_update", common="--skip kept --samples 32", kept=True),
    looped(RARE, "skipped_update", "GAV604", "--skip kept_accumulated --samples 32", mark="", kept=True),
    looped(
        RARE, "skipped_micro_batch", "GAV203", mark="", kept=True, proven=True, words="divided by all 4 micro-batches"
    ),
    looped(RARE, "skipped_micro_batch", "GAV203", "--skip unequal", mark="", proven=True, words="by all 4"),
    # those that have targets are counted right, and averaged equally
    looped(RARE, "skipped_micro_batch", "GAV202", "--skip divided", mark="", kept=True),
    looped(RARE, "skipped_micro_batch", common="--skip window", kept=True),
    # a `continue` that skips the step as well joins two windows; a micro-batch may be skipped before its forward
    skipping("--bad 3 --end skipped", "GAV602", "forward", JOINED, kept=True, proven=True),
    skipping("--bad 3 --divide window", kept=True),
    skipping("--bad 2 --why empty", "GAV203", "forward", "4 samples of update 1 have no", quick=True, proven=True),
    skipping("--bad 2 --why empty --divide window"),
    skipping("--bad 2 --why infinite", "GAV502", options=STEPS_4),  # the step waits for all four micro-batches
    skipping("--bad 2,7 --end skipped --why empty", "GAV602 GAV203", "step", JOINED, options=UPDATES_3, proven=True),
    skipping("--bad 7 --equal --end skipped", "GAV602", "forward", JOINED, proven=True),
    # what divides by nothing counts as often as there are micro-batches left, which is not K
    skipping("--bad 2 --equal --divide nothing", "GAV201", "backward", "by the 3 micro-batches"),
    skipping("--bad 2 --divide nothing", "GAV201 GAV202", "backward", "by the 3 micro-batches that are used"),
    # sums that a script keeps itself: what the optimizer sees is controlled
    looped(RARE, "sums_of_its_own", "GAV201", "--skip division", mark="", kept=True, proven=True, words="(= K)"),
    looped(RARE, "functional", kept=True),
    looped(RARE, "dropout_in_the_loss", common="--dropout 0.3", notes="GAV301"),
    # A01, D01: the gradients differ, the running statistics drift, and no line of the loop is blamed
    looped(SCALE, "usual", "GAV101", "--batchnorm", mark="", notes="GAV402"),
    # clipping: whichever run is clipped, the sum before it is judged; the twin divides
    *(Row(CLIPPING, f"{how} --undivided", "GAV201", "loss", TIMES_4, clips=clips) for how, clips in CLIPS),
    *(Row(CLIPPING, how) for how, _ in CLIPS),
    # a control with losses too small to be clipped tells dividing from clipping
    Row(CLIPPING, "--change by_hand --clip 0.1 --undivided", "GAV201", words=TIMES_4, method="unclipped", quick=True),
    Row(CLIPPING, "--change by_hand --clip 1 --undivided", "GAV201", words=TIMES_4, method="unclipped"),
    looped(EXTRAS, "clip_per_micro_batch", "GAV606", "--clip 0.05", proven=True, words=SMALL, kept=True),
    looped(EXTRAS, "clip_per_micro_batch", "GAV606 GAV202", "--clip 0.05 --ignored 3", proven=True, words=SMALL),
    # what else changes gradients between the last backward pass and the step
    Row(
        CLIPPING, "--change by_norm_then_divided --undivided --clip 0.1", "GAV606", "by_norm_then_divided", proven=True
    ),
    Row(CLIPPING, "--change divided_then_by_norm --undivided --clip 0.1"),
    Row(CLIPPING, "--change by_hand --clip 0.1"),
    Row(CLIPPING, "--change divided_then_by_hand --clip 0.1 --undivided"),
    Row(CLIPPING, "--change centralised"),
    Row(CLIPPING, "--change centralised --undivided", "GAV201", kept=True),
    # S12: where the weights change alike there is no fault; Adam hides a factor and takes nothing out
    Row(CLIPPING, "--change nothing --undivided --optimizer dividing", words="the step undoes this factor"),
    Row(CLIPPING, "--change nothing --undivided --optimizer lower_rate", words="the step undoes this factor"),
    Row(CLIPPING, "--change nothing --optimizer dividing", "GAV609"),
    Row(CLIPPING, "--change nothing --undivided --optimizer Adam", "GAV201"),
    # S02: what a step is made with, at the same update
    looped(UNUSUAL, "rates", "GAV609", "--counter micro_batches --what lr", quick=True),
    looped(UNUSUAL, "rates", "GAV609", "--counter micro_batches --what momentum"),
    looped(UNUSUAL, "rates"),
    # GAV202 where no loss of torch's counts the targets: 16, 12, 14 and 16 of 58 tokens
    looped(UNUSUAL, "tokens", "GAV202", words="the numbers that the losses are divided by"),
    looped(UNUSUAL, "tokens", common="--by window"),
    # S11: several optimizers have windows of their own
    *(Row("loops_partners.py", f"--loop {loop}", options=UPDATES_4) for loop in ("interleaved", "shifted", "against")),
    Row("loops_partners.py", "--loop interleaved --undivided", "GAV201", options=UPDATES_4),
    Row(
        "loops_partners.py",
        "--loop step_together --undivided",
        "GAV201",
        "step_together",
        words="multiply each micro-batch's loss by 0.25",
        proven=True,
        quick=True,
    ),
    Row("loops_partners.py", "--loop step_together"),
    # networks that take turns: each optimizer has its own window, and a turn is an update
    Row("loops_partners.py", "--loop turns_of_updates", options=UPDATES_4),
    Row("loops_partners.py", "--loop turns_after_the_critic", options=UPDATES_4),
    Row("train_gan.py", options=UPDATES_4),
    Row("train_gan.py", "--divide discriminator", "GAV201", "generator", options=UPDATES_4),
    # row 8 of the reference systems; row 10 is in test_audit_frameworks
    Row("digits.py", "--divide window", **DIGITS),
    # other ways to write a script
    Row("training.train", full="--batch-size 16"),
    Row("train_click.py", "--no-divide --workers 1", "GAV201", "divide"),
    Row("loops_steps.py", "--loop step_in_a_hook", "GAV601", "step_in_a_hook", proven=True),
    Row("loops_steps.py", "--loop head_never_steps", "GAV502", kept=True),
    # a cached gradient is right where samples act on each other
    Row("loops_coupled.py", "--loop cached"),
    Row("loops_coupled.py", "--loop penalised"),
    # a backward that depends on the batch, where the losses add up; the twins treat rows alike, or weigh wrongly
    looped(
        BACKWARD,
        "importance",
        "GAV104",
        proven=True,
        quick=True,
        options=ONE,
        words="the gradient from the loss replaced",
    ),
    looped(BACKWARD, "importance", common="--backward rows", kept=True, options=ONE),
    looped(BACKWARD, "importance", "GAV104", "--late --scaler", proven=True, options=ONE),
    looped(
        BACKWARD,
        "by_rows",
        "GAV104",
        mark="",
        proven=True,
        options=ONE,
        words="the gradient from `3` replaced",
        kept=True,
    ),
    looped(BACKWARD, "by_rows", common="--backward rows", options=ONE),
    looped(BACKWARD, "importance_of_rows", "GAV202", mark="", proven=True, options=ONE),
    # gradients that are moved out of `.grad` inside the backward pass, or after it, and put back before the step
    looped(MAIN, "hooked", kept=True, options=ONE),
    looped(MAIN, "hooked", "GAV202", "--rising", mark="", quick=True, proven=True, words="by 1.6, 1.2", options=ONE),
    looped(MAIN, "hooked", common="--through node --clip 0.01", options=ONE),
    looped(MAIN, "hooked", "GAV201", "--through node --undivided", mark="", proven=True, words="(= K)", options=ONE),
    looped(MAIN, "taken", common="--clip 0.01", options=ONE),
    # what a script makes of each micro-batch's gradient is not linear, or is, or is made of their sum
    looped(MAIN, "taken", "GAV606", "--when pass --transform clip", mark="", proven=True, options=ONE, kept=True),
    looped(MAIN, "hooked", "GAV606", "--when pass", mark="", proven=True, words="0.weight", options=ONE),
    looped(MAIN, "taken", common="--when pass --transform centralise", options=ONE),
    looped(MAIN, "taken", common="--when window", kept=True, options=ONE),
    looped(MAIN, "taken", "GAV201", "--undivided --clip 0.01", mark="", proven=True, words="(= K)", options=ONE),
    # single parameters: a factor of one alone (S06), terms that cancel (S13), float32 master copies
    looped(UNUSUAL, "two_towers", "GAV201", mark="cached", words="`logit_scale`"),
    looped(UNUSUAL, "two_towers", common="--scale once"),
    looped(UNUSUAL, "cancelling", options=UPDATES_4),
    looped(UNUSUAL, "cancelling", "GAV201", "--undivided", options=UPDATES_4),
    # pairs: the last bias has no gradient, in the full batch exactly (seed 7) or but for rounding
    looped(UNUSUAL, "ranked", options=UPDATES_4),
    looped(UNUSUAL, "ranked", common="--seed 7", options=UPDATES_4),
    looped(UNUSUAL, "ranked", common="--all --seed 3", options=UPDATES_4),
    looped(UNUSUAL, "ranked", "GAV201", "--undivided", mark="", options=UPDATES_4),
    looped(UNUSUAL, "ranked", "GAV201", "--running", mark="", words="4 other parameters agree", options=UPDATES_4),
    looped(UNUSUAL, "sliced", options=UPDATES_3),
    looped(UNUSUAL, "sliced", "GAV202", "--running", proven=True, options=UPDATES_3),
    looped(UNUSUAL, "masters"),
    looped(UNUSUAL, "masters", "GAV201", "--undivided"),
    looped(UNUSUAL, "wrapped", "GAV202", "--running", words="repeats the earlier micro-batches", options=ONE),
    # S15: what a loop draws and its loaders give is dealt to the accumulated run; a planted factor is still found
    *(Row(DRAWING, f"--loop {loop}") for loop in DRAWN.split()),
    Row(DRAWING, "--loop diffusion --undivided", "GAV201", "backward", kept=True),
    Row(DRAWING, "--loop shuffled --undivided", "GAV201", "backward"),
    Row(DRAWING, "--loop shuffled --workers 2"),
    Row(DRAWING, "--loop masked", words="cut from the full-batch run's batches, with their padding", kept=True),
    Row(DRAWING, "--loop masked --undivided", "GAV201", "backward"),
    # an epoch's short last window, which the first updates of a run never reach
    looped(UNUSUAL, "epochs", common="--end misscaled", words="no epoch ended: `--tail`"),
    looped(UNUSUAL, "epochs", "GAV605", "--end misscaled", mark="", options=TAIL),
    looped(UNUSUAL, "epochs", "GAV604", "--end lost", mark="", options=TAIL, kept=True),
    looped(UNUSUAL, "epochs", "GAV103", "--end coupled", mark="", options=TAIL),
    looped(UNUSUAL, "epochs", common="--end right", words="last window has 2 of 4 micro-batches", options=TAIL),
    Row("loops_scale.py", "--loop usual", "GAV602", options=TAIL),
    Row("train_resuming.py", words="could not shorten an epoch", options=TAIL),
    # samples that act on each other: the operation or the loss is named and proven
    looped(COUPLED, "compared", "GAV103", mark="contrastive", proven=True, words=CACHED),
    looped(COUPLED, "scored", "GAV103", mark="contrastive", proven=True, words=CACHED),
    looped(COUPLED, "advantages", "GAV103", proven=True, words=ONCE),
    looped(COUPLED, "against_reference", "GAV103", proven=True, words=CACHED),
    looped(COUPLED, "criterion", "GAV103", mark="made", proven=True, words=CACHED),
    looped(COUPLED, "attention", "GAV102", proven=True, kept=True),
    looped(COUPLED, "chained", "GAV101", proven=True),
    looped(COUPLED, "routed", "GAV103", proven=True, words=CACHED),  # it hands the term out to nobody
    # values beside the outputs that belong to other samples, or are another number in each micro-batch; and right ones
    looped(HANDED, "advantages", "GAV610", "--wrong", proven=True, words="the values of other samples"),
    looped(HANDED, "targets", "GAV610", "--wrong", proven=True, words="the loss reads `target`"),
    looped(HANDED, "positions", "GAV610", "--wrong", proven=True, words="the loss reads `given`"),
    looped(HANDED, "temperature", "GAV610", "--wrong", proven=True, words="use the same value", kept=True),
    looped(HANDED, "masked", "GAV610", "--wrong", proven=True, words="the loss reads `kept`"),
    looped(HANDED, "baseline", "GAV610", "--wrong", proven=True, words="where `mean` is 0.5 in the full batch"),
    looped(HANDED, "whitened", "GAV103", "--wrong", proven=True, words=ONCE),
    looped(HANDED, "levelled", "GAV401", "--wrong", proven=True, kept=True),
    *(looped(HANDED, loop) for loop in ("advantages", "targets", "positions", "temperature", "masked", "baseline")),
    looped(COUPLED, "counted", "GAV103 GAV201", mark="routed", proven=True),
    # an innocent module, whose control would hide what is wrong in its own weight, or before rows that are padded
    looped(HIDDEN, "hooked", "GAV104", mark="normalising", proven=True),
    looped(HIDDEN, "centred_before", "GAV102", mark="padded", words=UNCOMPARED),
    looped(HIDDEN, "longest", "GAV102", mark="padded", words=UNCOMPARED),
    looped(HIDDEN, "centred", "GAV102", mark="reporting", proven=True, kept=True),
    looped(HIDDEN, "centred_inside", "GAV102", mark="padded", proven=True),
    *(looped(HIDDEN, loop) for loop in ("plain", "padded")),
    # what both runs, traced call by call, first compute otherwise, proven by the full batch's value there; and twins
    looped(DIFFERING, "cooled", "GAV610", "--wrong", proven=True, words="`warmth` is 1.5", kept=True),
    looped(DIFFERING, "widened", "GAV403", "--wrong", proven=True, words="changes `settings.slope`", kept=True),
    looped(DIFFERING, "focused", "GAV403", "--wrong", proven=True, words="changes `self.average`"),
    looped(DIFFERING, "alternating", "GAV403", "--wrong", proven=True),
    # a number mixes no samples, and has no rows
    looped(DIFFERING, "counted", "GAV610", "--wrong", proven=True, words="use the same value"),
    looped(DIFFERING, "branched", "GAV103", "--wrong", proven=True, quick=True, words="takes a branch"),
    looped(DIFFERING, "switched", "GAV102", "--wrong", proven=True, words="takes a branch"),
    looped(DIFFERING, "centred", "GAV103", "--wrong", proven=True),
    looped(DIFFERING, "hooked", "GAV104", "--wrong", proven=True),
    looped(DIFFERING, "limited", "GAV606", "--wrong", proven=True),
    *(looped(DIFFERING, loop) for loop in (*DIFFERENT.split(), "mined", "queued", "whitened")),
    # state that a forward moves and the next one reads; beside it values that nothing reads, and updates of its own
    Row(STATE, "--kind centre", "GAV401", "centre", "buffer `Centred.centre`,", proven=True, notes="", kept=True),
    Row(STATE, "--kind centre", "GAV401", "centre", "repairs one update, and leaves a difference in the", kept=True),
    Row(STATE, "--kind once", kept=True),
    Row(STATE, "--kind unread", kept=True, notes=""),
    Row(
        STATE,
        "--kind rounds",
        "GAV403",
        "rounds",
        "changes `Centred.rounds`, which is no parameter or buffer",
        proven=True,
    ),
    Row(STATE, "--kind codebook", "GAV401", "codebook", "buffer `2.codes`, which", proven=True, notes="GAV402"),
    # state that the script makes after its step, of the whole window or of its last micro-batch
    looped(CARRIED, "routed", "GAV401", "--last", quick=True, proven=True, words="buffer `bias`", options=UPDATES_3),
    looped(CARRIED, "routed", kept=True, options=UPDATES_3),
    looped(
        CARRIED,
        "plain",
        "GAV403",
        "--last",
        mark="routed",
        proven=True,
        words="of `bias`",
        options=UPDATES_3,
        kept=True,
    ),
    looped(CARRIED, "plain", options=UPDATES_3),
    looped(CARRIED, "before", "GAV401", "--last", mark="routed", proven=True, options=UPDATES_3),
    looped(CARRIED, "before", options=UPDATES_3),
    looped(CARRIED, "taught", "GAV401", "--last", proven=True, words="Sequential.0.weight", options=UPDATES_3),
    looped(CARRIED, "taught", options=UPDATES_3),
    looped(CARRIED, "queued", "GAV401", "--last", proven=True, words="buffer `queue`", options=UPDATES_3),
    looped(CARRIED, "queued", options=UPDATES_3),
    looped(CARRIED, "cooled", "GAV403", "--last", proven=True, words="`temperature`", options=UPDATES_3),
    looped(CARRIED, "cooled", options=UPDATES_3),
    looped(CARRIED, "hidden", options=UPDATES_3),
    looped(CARRIED, "mixed", "GAV102", proven=True, options=UPDATES_3),
    looped(CARRIED, "normalised", notes="GAV402", options=UPDATES_3),
    Row(STATE, "--kind centre --undivided", "GAV401 GAV201", "centre", proven=True),
    Row(STATE, "--kind codebook --batchnorm", "GAV401 GAV101", "codebook", proven=True),
    # what a hook adds is the next gradient less the last, which other weights of micro-batches seem to mend
    looped(UNUSUAL, "masters", common="--hook added"),
    looped(UNUSUAL, "masters", "GAV603", "--hook set", mark="set", words=ADDED, proven=True),
    # the step of an optimizer inside another is a part of that one
    looped(UNUSUAL, "wrapped", words="updates 1 to 4: 4 of 4 gradients agree", options=UPDATES_4),
    looped(UNUSUAL, "wrapped", "GAV201", "--undivided", words="(= K)", options=UPDATES_4),
    # a frozen bfloat16 teacher of a float32 student: of each full batch's 15 points 7 and 8 fall to its micro-batches
    looped(UNUSUAL, "distilled", "GAV202", method="noise-floor", **HALF),
    looped(UNUSUAL, "distilled", common="--by window", method="noise-floor", **HALF),
    looped(UNUSUAL, "distilled", common="--all", method="noise-floor", **HALF),
    # boxes that count their images
    *(Row("detection.py", form, notes="GAV301", **SLICES) for form in ("", "--table")),
    Row("detection.py", "--table --forgotten", "GAV201", "forgotten", notes="GAV301", **SLICES),
    looped(UNUSUAL, "checkpointed", notes="GAV301"),
    Row("digits.py", "", "GAV201", "scale", TIMES_4, **DIGITS),
    Row("digits.py", "--divide constant", "GAV605", words="update 2 sums 2 backward passes", **DIGITS),
    # below float32 no moved weights could tell a fault from rounding
    looped(UNUSUAL, "low", "GAV201", "--precision bfloat16 --fault undivided --clip 0.1"),
    looped(UNUSUAL, "low", "GAV101", "--fault statistics", mark=""),
    # what rounding would hide is looked for in float32
    *(
        looped(UNUSUAL, "low", "GAV101", f"--precision {kind} {HALVES}", **IN_FLOAT32)
        for kind in ("bfloat16", "autocast")
    ),
    *(looped(UNUSUAL, "low", common=f"--precision {kind}", method="weights") for kind in KINDS),
    *(looped(UNUSUAL, "low", common=f"--precision {kind} --clip 0.1", method="weights") for kind in KINDS),
    looped(UNUSUAL, "low", "GAV202", "--precision bfloat16 --fault means --clip 0.1", words=COUNTED, kept=True),
    looped(UNUSUAL, "low", "GAV202", "--precision autocast --fault means --clip 0.1", words=COUNTED),
    # scripts without a backward pass or an optimizer of torch's
    *(
        styled(f"{style} --undivided", "GAV201", style, TIMES_4, quick=style == "own", kept=style == "plain")
        for style in STYLES
    ),
    # of these nothing is seen but what the step uses
    *(styled(f"{style} --undivided", "GAV201", words=TIMES_4) for style in ("functional", "captured")),
    *(styled(f"{style} --every", "GAV601", proven=True) for style in ("plain", "own")),
    # a step that hides the gradients' size hides no missing division
    *(styled(f"own --rule {rule}") for rule in RULES),
    *(styled(f"own --rule {rule} --undivided", "GAV201", "own", TIMES_4) for rule in RULES),
    styled("own --rule adam --clip 0.5 --undivided", "GAV201"),
    styled("own --late step", words="the step undoes this factor"),
    styled("own --late edit", words="4 of 4 gradients agree"),
    styled("own --late edit --rule adam", words="4 of 4 gradients agree"),
    styled("each --late edit --rule adam", words="4 of 4 gradients agree", kept=True),
    styled("each --rule adam --undivided", "GAV201", "each", TIMES_4),
    styled("own --rule adam --clip 0.5", words="4 of 4 gradients agree"),
    styled("own --rule adam --middle batch-norm", "GAV101", proven=True, kept=True),
    styled(
        "own --middle batch-norm --undivided",
        "GAV201 GAV101",
        words="4 times the full batch's (= K)",
        proven=True,
    ),
    styled("own --rate-by-k", "GAV609"),
]


KEPT = [row for row in ROWS if row.kept]


@tabled(ROWS)
def test_a_script_gets_its_answer(row: Row) -> None:
    with folder(SCRIPTS / "project"):
        check_answer(row, audit(row.script, row.full, row.accumulated, row.common, row.options))


@tabled([row._replace(quick=True) for row in KEPT])
def test_kept_runs_get_the_same_answer(row: Row) -> None:
    try:
        check_answer(row, kept_audit(row))
    except AssertionError as error:
        error.add_note(ADVICE)
        raise


@pytest.mark.slow
def test_runs_are_kept_anew(tmp_path: Path) -> None:
    """On any machine what is kept answers as what was kept."""
    rows = KEPT[:2]
    write_archive(rows, tmp_path / "kept.tar.xz")
    with tarfile.open(tmp_path / "kept.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for row in rows:
        check_answer(row, report_again(unpack(row, tmp_path)))


def check_answer(row: Row, result: Audited) -> None:
    """Holds what an audit answered against a row."""
    faults = row.faults.split()
    assert (result.code, result.faults) == (int(bool(faults)), set(faults)), str(result)
    assert result.outcome == ("divergent" if faults else "equivalent"), str(result)
    assert not row.mark or result.line(faults[0]) == marked(row.script, row.mark), str(result)
    assert not row.proven or all(result.finding(fault)["proven"] for fault in faults), str(result)
    assert row.words in (result.text(faults[0]) if faults else str(result)), str(result)
    assert row.notes is None or result.notes == set(row.notes.split()), str(result)
    update = result.document["updates"][0]
    assert row.method in ("", result.document["method"], update["decided"]), str(result)
    if row.clips is not None:
        assert (
            tuple(side[0]["active"] for side in (update["step"]["clips_full"], update["step"]["clips"]) if side)
            == row.clips
        )


def test_findings_name_files_from_the_working_folder_and_the_repairs_of_a_run() -> None:
    with folder(SCRIPTS):
        result = audit(SCRIPTS / STATE, common="--kind codebook --batchnorm")
    assert result.faults == {"GAV401", "GAV101"}, str(result)
    assert str(SCRIPTS) not in json.dumps(result.document["findings"])
    remedy = result.finding("GAV101")["remedy"]
    assert "keep it in evaluation mode (`.eval()` on the layer" in remedy, remedy
    assert "replace it by GroupNorm, which changes the model (gaverify did not run it" in remedy, remedy


@pytest.mark.parametrize(
    ("script", "common", "words"),
    [
        (
            "loops_skipping.py",
            "--bad 2 --end moved",
            "micro-batch 3 of update 1 has no backward pass, and samples of the next",
        ),
        ("loops_skipping.py", "--bad 2 --why unfed --equal", "update 1 leaves out 4 of the full batch's 16 samples"),
        # networks that take turns by micro-batches, where one is given a part of its turn
        ("loops_partners.py", "--loop turns_of_micro_batches", "update 1 leaves out 12 of the full batch's 16 samples"),
        ("loops_partners.py", "--loop last_micro_batch_after_the_critic", "update 3 leaves out 12 of the full batch's"),
    ],
)
def test_micro_batches_that_are_skipped_leave_the_question_open(script: str, common: str, words: str) -> None:
    """The runs were fed other samples: that the loop skips some is the reason, and no step is called early."""
    result = audit(script, common=common, options=UPDATES_4 if "loop" in common else ())
    assert (result.code, result.faults) == (3, {"GAV203"}), str(result)
    assert words in result.text("GAV203") and not result.finding("GAV203")["proven"]
    assert "the loop skips a micro-batch" in result.document["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ("clamped", "a backward pass first differs in this code"),
        ("banked", "the two runs first compute other values for the same samples here"),
        ("mined", "a number is 8 in the full batch and 2 each in the micro-batches"),
    ],
)
def test_what_nothing_proves_is_told_by_the_line_where_the_runs_differ_first(loop: str, words: str) -> None:
    result = audit(DIFFERING, common=f"--loop {loop} --wrong")
    assert (result.code, result.line("GAV000")) == (1, marked(DIFFERING, loop)), str(result)
    assert words in result.text("GAV000")
    assert not any(finding["proven"] for finding in result.document["findings"]), str(result)


def test_a_step_that_hides_the_size_of_gradients_may_divide_them() -> None:
    """The same weights come of a division inside an Adam of the script's own, and of one that is missing."""
    for common in ("--late step", "--undivided"):
        result = audit("loops_unannounced.py", LESS["full"], LESS["accumulated"], f"--style own --rule adam {common}")
        assert (result.code, result.faults, result.notes) == (1, {"GAV201"}, set()), str(result)
        assert not result.finding("GAV201")["proven"] and "a division inside that step" in result.text("GAV201")


def test_a_division_on_the_line_that_moves_a_weight_makes_no_proof() -> None:
    """`.grad` is as it was before that line; beside it, the means of different numbers of targets are a fault."""
    result = audit("loops_unannounced.py", LESS["full"], LESS["accumulated"], "--style inline")
    assert (result.code, result.faults) == (1, {"GAV201", "GAV202"}), str(result)
    assert not any(finding["proven"] for finding in result.document["findings"]), str(result)
    assert "unless the step itself divides by" in result.text("GAV201")
    assert "may divide as well: suspected" in result.text("GAV202")


EVENTS = [
    skipping("--bad 3 --end skipped --samples 96", "GAV602", "forward", JOINED, options=UPDATES_3, quick=True),
    looped(STEPS, "cleared_at_epoch", "GAV604", "--samples 24", quick=True),  # L02
    looped(STEPS, "too_early", "GAV601", "--samples 36", quick=True),
    looped(STEPS, "never_cleared", "GAV602"),  # L03
    looped(STEPS, "all_but_the_boundary", "GAV601", options=STEPS_4),  # L05
    looped(EXTRAS, "scaler_per_micro_batch", "GAV608"),  # L08
    looped(STEPS, "decay_by_hand", "GAV601"),  # L11
    looped(STEPS, "step_in_a_hook", "GAV601", options=STEPS_4),  # L12
    looped(SCALE, "usual", quick=True),
    # an epoch's short last window: calls alone tell a division that stays the same, and not a short window's scale
    looped(UNUSUAL, "epochs", "GAV605", "--end misscaled", mark="", **SHORT),
    looped(UNUSUAL, "epochs", common="--end right", words="backward passes where others have 4", **SHORT),
]


@tabled(EVENTS)
def test_the_calls_of_one_run_tell_where_the_loop_is_wrong(row: Row) -> None:
    """Nothing is compared, so that a right loop is not called equivalent."""
    result = events_of(row.script, f"{row.common} {row.accumulated}", row.options)
    assert (result.code, result.faults) == (int(bool(row.faults)), {*row.faults.split()}), str(result)
    assert not row.mark or result.line(row.faults) == marked(row.script, row.mark), str(result)
    assert row.words in str(result)
