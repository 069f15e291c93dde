"""Words and places that the sentences of several rules share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

from gaverify.records.audit import UpdateComparison
from gaverify.records.events import Backward, Event
from gaverify.records.experiment import ControlRun
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Location
from gaverify.records.ranks import RankFacts
from gaverify.records.stages import Stage
from gaverify.records.windows import Window
from gaverify.rules.rule import word_control
from gaverify.thresholds import COINCIDENCE, FIT_EXACT, NEGLIGIBLE, NO_WEIGHT
from gaverify.tracebacks import display_path

_SHOWN = 6  # windows whose counts are listed
_COUNTED = 8  # windows that documents list
_DENOMINATOR = 10_000  # of fractions that people recognise: shares of samples and of tokens


def module_name(path: str | None, kind: str = "") -> str:
    """Returns a module path in backticks, with its class."""
    return f"`{path or '(root)'}`" + (f" ({kind})" if kind else "")


def join_texts(texts: Sequence[str], most: int = 3) -> str:
    """Returns the first few texts and how many more there are."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def quote_names(names: Iterable[str]) -> str:
    """Returns the first few names in backticks, and how many more there are."""
    return join_texts([f"`{name}`" for name in names])


def word_trial(run: ControlRun, behind: str = "") -> str:
    """Says how a remedy that was run came out; `behind`: with what beside it."""
    if run.rounding and not run.holds:
        return "tested, equivalent on this batch but not on another one: find what these numbers are computed from"
    return f"tested{behind}, equivalent" if run.rounding else f"tested, leaves {run.left:.0e}"


def coupling_seen(facts: Facts, *, in_model: bool) -> tuple[Evidence, ...]:
    """Whether the model lets samples meet, by the gradient of one sample's outputs with respect to the others.

    Args:
        facts: What was measured.
        in_model: Whether the finding says that they meet in the model, not in the loss.
    """
    probe = facts.forward.coupling
    if probe is None:
        return ()
    values = {"sample": probe.sample, "others": probe.other_samples, "strength": probe.strength}
    # gradients of exactly zero still allow samples to interact through choices
    if probe.other_samples == 0:
        text = "the model's output for a sample has exactly zero gradient with respect to all other samples"
        if in_model:
            text += ": samples interact through choices (sorting, a threshold, a branch), which have no gradient"
        return (Evidence("coupling", "samples", text, values),)
    where = f"among the first {probe.batch} samples, " if probe.batch < facts.batch_size else ""
    text = (
        f"{where}the model's output for sample {probe.sample} depends on {probe.other_samples} of {probe.batch - 1} "
        f"other samples: its gradient with respect to one of them is up to {probe.strength:.1e} times that with "
        "respect to its own input"
    )
    return (Evidence("coupling", "samples", text, values),)


def harm(facts: Facts) -> tuple[Evidence, ...]:
    """How large the divergence is against the sampling noise of the gradient, with a word."""
    fit = facts.window.fit
    total = facts.compared.total
    # the variation from batch to batch is known only where micro-batches were fitted
    if fit is None or not fit.noise > 0 or not total < float("inf"):
        return ()
    ratio = total / fit.noise
    word = "negligible" if ratio < NEGLIGIBLE else "medium" if ratio < 1.0 else "high"
    text = f"{word}: the difference is {ratio:.2g} times the normal variation of the gradient from batch to batch"
    text += f" (estimated from {fit.samples} samples)" if fit.samples else ""
    return (Evidence("harm", "harm", text, {"ratio": ratio, "noise": fit.noise, "difference": total}),)


def line_of(file: str | None, line: int | None) -> Location | None:
    """Returns file and line as people write them; None where the file is not known."""
    return None if file is None else Location(file=display_path(file), line=line)


def place(event: Event | None) -> Location | None:
    """Returns file and line of an event as people write them."""
    return None if event is None else line_of(*event.place)


def first_place(events: Iterable[Event]) -> Location | None:
    """Returns the place of the first event whose line is known."""
    return place(next((event for event in events if event.file is not None), None))


def backward_place(facts: Facts, number: int | None = None) -> Location | None:
    """Returns the line of a window's last backward pass, or of the loss that a library differentiates. None in a run.

    Args:
        facts: What was measured.
        number: The update; None: the one that was compared.
    """
    if facts.loop is not None and facts.loop.controls.loss_line is not None:
        return line_of(*facts.loop.controls.loss_line)
    number = facts.compared.update if number is None else number
    window = facts.loop.window_of(number) if facts.loop is not None and number is not None else None
    return first_place(reversed(window.of(Backward))) if window is not None else None


def counts(windows: Sequence[Window]) -> str:
    """Returns backward : step : zero_grad of the windows in words, runs of equal ones together."""
    parts: list[tuple[str, int, int]] = []
    for window in windows:
        text = f"{len(window.of(Backward))} : {len(window.steps)} : {window.zero_grads}"
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1], window.number)
        else:
            parts.append((text, window.number, window.number))
    named = [f"{text} in {updates(range(first, last + 1))}" for text, first, last in parts[:_SHOWN]]
    return f"backward : step : zero_grad = {', '.join(named)}" + (", …" if len(parts) > _SHOWN else "")


def count_calls(windows: Sequence[Window], label: str = "measured") -> Evidence:
    """Returns the evidence of what was called in the first windows."""
    # documents of long runs would list thousands
    first_windows = windows[:_COUNTED]
    calls = [[len(window.of(Backward)), len(window.steps), window.zero_grads] for window in first_windows]
    values = {"counts": calls, "updates": [window.number for window in first_windows]}
    return Evidence("events", label, counts(first_windows), values)


def updates(numbers: Iterable[int]) -> str:
    """Returns `update 2`, `updates 1 to 3`, `updates 1, 4`."""
    ordered = sorted(set(numbers))
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"updates {ordered[0]} to {ordered[-1]}"
    return ("update " if len(ordered) == 1 else "updates ") + ", ".join(map(str, ordered))


def passes(count: int) -> str:
    """Returns `1 backward pass`, `3 backward passes`."""
    return f"{count} backward {'pass' if count == 1 else 'passes'}"


def times(count: int) -> str:
    """Returns `once`, `4 times`."""
    return "once" if count == 1 else f"{count} times"


def weights_text(weights: Sequence[float], *, each: bool = True) -> str:
    """Returns weights with four digits in a row; `each`: equal ones once."""
    if each and len(weights) > 1 and len({f"{weight:.4g}" for weight in weights}) == 1:
        return f"{weights[0]:.4g} each"
    shown_weights = [f"{weight:.4g}" for weight in weights[:12]]
    return ", ".join(shown_weights) + (", …" if len(weights) > 12 else "")


def exact(weights: Sequence[float], tolerance: float = FIT_EXACT) -> str:
    """Returns weights so that who copies them leaves no difference, all in one way: `0.25`, `5/47`, else more digits.

    Args:
        weights: At least one.
        tolerance: How far they were measured apart from what they stand for, relative; digits below it mean nothing.
    """
    most = max(1, int(min(_DENOMINATOR, math.sqrt(COINCIDENCE / tolerance))))
    fractions = [str(Fraction(weight).limit_denominator(most)) for weight in weights]
    ways = [[f"{weight:.{digits}g}" for weight in weights] for digits in range(1, 18)]
    # 1.3333 leaves 2.5e-5 of a gradient that 4/3 repairs: fractions come before decimals that go on, after 1.125
    ending = [texts for texts, longer in pairwise(ways[3:7]) if texts == longer]
    for texts in (*ways[:3], *ending, fractions, *ways[3:]):
        pairs = zip(texts, weights, strict=True)
        if all(abs(float(Fraction(text)) - weight) <= tolerance * abs(weight) for text, weight in pairs):
            return ", ".join(texts)
    return ", ".join(map(repr, weights))


def share_texts(amounts: Sequence[float]) -> str:
    """Returns `5 of 47, 12 of 47`: what each micro-batch counts of the whole window."""
    shown_amounts = [f"{amount:g} of {sum(amounts):g}" for amount in amounts[:12]]
    return ", ".join(shown_amounts) + (", …" if len(amounts) > 12 else "")


def largest(facts: Facts) -> str:
    """Returns the largest relative difference, with the parameter that shows it."""
    update = facts.loop.divergent if facts.loop is not None else None
    return difference(update) if update is not None else facts.compared.largest


def difference(update: UpdateComparison) -> str:
    """Returns the largest difference of an update, and the ratio of the norms."""
    row = update.largest
    if math.isinf(update.relative_difference):
        return "every gradient of the full-batch run is zero"
    if row is None:
        return "no finite difference"
    text = f"relative difference {row.relative_difference:.1e} in `{row.name}`"
    text = f"in the weight change, a {text}" if update.decided is Stage.CHANGE else text
    text = f"with losses too small to be clipped: {text}" if update.decided is Stage.UNCLIPPED else text
    if math.isfinite(update.relative_difference):
        text += f"; over all parameters {update.relative_difference:.1e}"
    return text + (f", norm ratio {update.norm_ratio:.3g}" if math.isfinite(update.norm_ratio) else "")


def show_distinct(*sides: Sequence[float]) -> list[str]:
    """Returns each side's numbers in words, with as many digits as tell the sides apart."""
    texts = ([", ".join(f"{value:.{digits}g}" for value in side) for side in sides] for digits in (4, 6, 9, 17))
    return next(
        filter(lambda found: len(set(found)) == len(found), texts), [", ".join(map(str, side)) for side in sides]
    )


def shares(weights: Sequence[float]) -> str:
    """Returns fitted weights as words: `0.534, 0.466`; one that is only the rounding of its fit is `0`."""
    # a fit never gives exactly zero
    noise = NO_WEIGHT * max(map(abs, weights), default=0.0)
    return ", ".join("0" if abs(weight) <= noise else f"{weight:.3g}" for weight in weights)


def beside_one_process(ranks: RankFacts) -> str:
    """Says how far the gradient of the ranks is from that of one process with the same micro-batches."""
    far = f"{ranks.from_one_process:.1e}"
    return f"relative difference {far} between {ranks.ranks} ranks and one process that runs the same micro-batches"


def rank_trial(ranks: RankFacts, what: str) -> tuple[Evidence, ...]:
    """Says how the ranks came out when they were run once more with `what`."""
    difference_left = ranks.weights_control
    if difference_left != difference_left:  # NaN: the control could not be run
        text = "no control run was possible: suspected, not proven"
        return (Evidence("rank-weights", "control", text, {}),)
    return (
        word_control(
            "rank-weights", f"with {what} the difference", difference_left, ranks.is_rounding(difference_left)
        ),
    )
