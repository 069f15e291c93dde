"""Parts that all rules share: a code, a name and a judgement, the parts of a finding, words for places and controls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import wraps
from itertools import pairwise
from typing import Any, Generic, ParamSpec

from gaverify.records.audit import Stage, UpdateComparison
from gaverify.records.comparison import Comparison
from gaverify.records.events import Backward, Event
from gaverify.records.experiment import (
    MOVES_ROWS,
    Cause,
    ControlKind,
    ControlRun,
    FirstDifference,
    Operation,
    Suspect,
)
from gaverify.records.findings import ALSO, Evidence, Finding, Location, Severity
from gaverify.records.numbers import count_text
from gaverify.records.ranks import RankFacts
from gaverify.records.windows import Window
from gaverify.thresholds import COINCIDENCE, COMPUTED_FLOAT32, FIT_EXACT, FIT_FLOAT64, NEGLIGIBLE, NO_WEIGHT, SMALL_PART
from gaverify.tracebacks import display_path

Asked = ParamSpec("Asked")


@dataclass(frozen=True)
class Rule(Generic[Asked]):
    """A code, its name, and the judgement that yields its findings; the words about it stand in `pages/CODE.md`."""

    code: str
    name: str
    judgement: Callable[Asked, Iterable[Finding]]

    def judge(self, *comparison: Asked.args, **named: Asked.kwargs) -> Iterator[Finding]:
        """Yields the findings, which bear the rule's code and name."""
        for finding in self.judgement(*comparison, **named):
            yield replace(finding, code=self.code, name=self.name)


def rule(code: str) -> Callable[[Callable[Asked, Iterable[Finding]]], Rule[Asked]]:
    """Makes a rule of a judgement; it is named as the function is."""
    return lambda judgement: Rule(code, judgement.__name__.replace("_", "-"), judgement)


def rule_of_ranks(code: str) -> Callable[[Callable[[Comparison, RankFacts], Iterable[Finding]]], Rule[[Comparison]]]:
    """The same for a judgement about several ranks: of one process it finds nothing."""

    def make_rule(judgement: Callable[[Comparison, RankFacts], Iterable[Finding]]) -> Rule[[Comparison]]:
        @wraps(judgement)
        def judge(comparison: Comparison) -> Iterable[Finding]:
            return () if comparison.ranks is None else judgement(comparison, comparison.ranks)

        return rule(code)(judge)

    return make_rule


def finding_of(
    summary: str,
    *evidence: Evidence,
    remedy: str,
    proven: bool,
    location: Location | None = None,
    severity: Severity = "fault",
    together: Iterable[Location | None] = (),
) -> Finding:
    """Returns a finding; it is `proven` only where a control run, or the numbers alone, leave no doubt.

    The rule that yields it gives it its code and name. It holds of all places of `together`, `location`
    among them: its first evidence hands the others on, for who accepts some of them.
    """
    other_places = [place for place in dict.fromkeys(together) if place is not None and place != location]
    if other_places and evidence:
        also = [{"module": place.module, "file": place.file, "line": place.line} for place in other_places]
        evidence = (replace(evidence[0], values={**evidence[0].values, ALSO: also}), *evidence[1:])
    return Finding("", "", severity, summary, location, evidence, remedy, proven)


def measured_evidence(source: str, statement: str, /, **values: Any) -> Evidence:
    """Returns evidence that was measured, under the name of what measured it, with the numbers behind the sentence."""
    return Evidence(source, "measured", statement, values)


def control_evidence(source: str, statement: str, /, **values: Any) -> Evidence:
    """Returns the evidence of a control run."""
    return Evidence(source, "control", statement, values)


def word_control(
    source: str, what: str, left: float, proven: bool, otherwise: str = "another cause remains", **values: Any
) -> Evidence:
    """Returns the evidence of a control run that says which difference it leaves, and what that means.

    Args:
        source: The probe that made the control run.
        what: The state in which the difference was measured.
        left: The relative difference.
        proven: Whether it is rounding.
        otherwise: The meaning of a difference that is more than rounding; "": none.
        values: Numbers behind the sentence, beside `left`.
    """
    meaning = "proven" if proven else otherwise
    return control_evidence(source, f"{what} is {left:.0e}" + (f": {meaning}" if meaning else ""), **values, left=left)


# Words and places that the sentences of several rules share.


_SHOWN = 6  # windows whose counts are listed
_COUNTED = 8  # windows that documents list
_DENOMINATOR = 10_000  # of fractions that people recognise: shares of samples and of tokens


def module_name(path: str | None, kind: str = "") -> str:
    """Returns a module path in backticks, with its class."""
    return str(Location(module=path or "", kind=kind or None))


def join_texts(texts: Sequence[str], most: int = 3) -> str:
    """Returns the first few texts and how many more there are."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def quote_names(names: Iterable[str]) -> str:
    """Returns the first few names in backticks, and how many more there are."""
    return join_texts([f"`{name}`" for name in names])


RAN = "gaverify ran it:"
RAN_EQUIVALENT = f"; {RAN} equivalent"
"""The end of a repair that was run and gave the full batch's gradient."""


def word_trial(run: ControlRun, behind: str = "") -> str:
    """Says how a remedy that was run came out; `behind`: with what beside it."""
    if run.rounding and not run.holds:
        return f"{RAN} equivalent on this batch, not on another one. Find what these numbers are computed from"
    return f"gaverify ran it{behind}: equivalent" if run.rounding else f"{RAN} a difference of {run.left:.0e} is left"


def show_harm(comparison: Comparison) -> tuple[Evidence, ...]:
    """How large the divergence is against the sampling noise of the gradient, with a word."""
    fit = comparison.window.fit
    total = comparison.compared.total
    # the variation from batch to batch is known only where micro-batches were fitted
    if fit is None or not fit.noise > 0 or not total < float("inf"):
        return ()
    ratio = total / fit.noise
    word = "negligible" if ratio < NEGLIGIBLE else "medium" if ratio < 1.0 else "high"
    text = f"{word}: the difference is {ratio:.2g} times the normal variation of the gradient from batch to batch"
    text += (
        f" (estimated from {count_text(fit.samples, 'sample') if fit.samples else 'the micro-batches'} of this batch)"
    )
    return (Evidence("harm", "harm", text, {"ratio": ratio, "noise": fit.noise, "difference": total}),)


def line_of(file: str | None, line: int | None) -> Location | None:
    """Returns file and line as people write them; None where the file is not known."""
    return None if file is None else Location(file=display_path(file), line=line)


def place_of(event: Event | None) -> Location | None:
    """Returns file and line of an event as people write them."""
    return None if event is None else line_of(*event.place)


def first_place(events: Iterable[Event]) -> Location | None:
    """Returns the place of the first event whose line is known."""
    return place_of(next((event for event in events if event.file is not None), None))


def backward_place(comparison: Comparison, number: int | None = None) -> Location | None:
    """Returns the line of a window's last backward pass, or of the loss that a library differentiates. None in a run.

    Args:
        comparison: The comparison.
        number: The update; None: the one that was compared.
    """
    if comparison.record.controls.loss_line is not None:
        return line_of(*comparison.record.controls.loss_line)
    window = comparison.calls.window_of(comparison.compared.update if number is None else number)
    return first_place(reversed(window.of(Backward))) if window is not None else None


def word_counts(windows: Sequence[Window]) -> str:
    """Returns backward : step : zero_grad of the windows in words, runs of equal ones together."""
    parts: list[tuple[str, int, int]] = []
    for window in windows:
        text = f"{len(window.of(Backward))} : {len(window.steps)} : {window.zero_grads}"
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1], window.number)
        else:
            parts.append((text, window.number, window.number))
    named = [f"{text} in {word_updates(range(first, last + 1))}" for text, first, last in parts[:_SHOWN]]
    return f"backward : step : zero_grad = {', '.join(named)}" + (", …" if len(parts) > _SHOWN else "")


def count_calls(windows: Sequence[Window], label: str = "measured") -> Evidence:
    """Returns the evidence of what was called in the first windows."""
    # documents of long runs would list thousands
    first_windows = windows[:_COUNTED]
    calls = [[len(window.of(Backward)), len(window.steps), window.zero_grads] for window in first_windows]
    values = {"counts": calls, "updates": [window.number for window in first_windows]}
    return Evidence("events", label, word_counts(first_windows), values)


def word_updates(numbers: Iterable[int]) -> str:
    """Returns `update 2`, `updates 1 to 3`, `updates 1, 4`."""
    ordered = sorted(set(numbers))
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"updates {ordered[0]} to {ordered[-1]}"
    return ("update " if len(ordered) == 1 else "updates ") + ", ".join(map(str, ordered))


def word_passes(count: int) -> str:
    """Returns `1 backward pass`, `3 backward passes`."""
    return f"{count} backward {'pass' if count == 1 else 'passes'}"


def word_times(count: int) -> str:
    """Returns `once`, `4 times`."""
    return "once" if count == 1 else f"{count} times"


def weights_text(weights: Sequence[float], *, each: bool = True) -> str:
    """Returns weights with four digits in a row; `each`: equal ones once."""
    if each and len(weights) > 1 and len({f"{weight:.4g}" for weight in weights}) == 1:
        return f"{weights[0]:.4g} each"
    shown_weights = [f"{weight:.4g}" for weight in weights[:12]]
    return ", ".join(shown_weights) + (", …" if len(weights) > 12 else "")


def write_exactly(weights: Sequence[float], tolerance: float = FIT_EXACT) -> str:
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


def word_share_of_each(amounts: Sequence[float]) -> str:
    """Returns `5 of 47, 12 of 47`: what each micro-batch counts of the whole window."""
    shown_amounts = [f"{amount:g} of {sum(amounts):g}" for amount in amounts[:12]]
    return ", ".join(shown_amounts) + (", …" if len(amounts) > 12 else "")


def word_largest(comparison: Comparison) -> str:
    """Returns the largest relative difference, with the parameter that shows it."""
    update = comparison.record.divergent
    return word_difference(update) if update is not None else comparison.compared.largest


def word_difference(update: UpdateComparison) -> str:
    """Returns the largest difference of an update, and the ratio of the norms."""
    row = update.largest
    if math.isinf(update.relative_difference):
        return "every gradient of the full-batch run is zero"
    if row is None:
        return "no finite difference"
    text = f"relative difference {row.relative_difference:.1e} in `{row.name}`"
    text = f"with losses too small to be clipped: {text}" if update.decided is Stage.UNCLIPPED else text
    if math.isfinite(update.relative_difference):
        text += f"; over all parameters {update.relative_difference:.1e}"
    return text + (f", norm ratio {update.norm_ratio:.3g}" if math.isfinite(update.norm_ratio) else "")


def word_assignments(lines: Sequence[Operation]) -> str:
    """Returns where a number, or what it may be computed from, is assigned; empty where that is not known."""
    texts = [f"{line.file}:{line.line}" for line in lines]
    return f"it, or what it is computed from, changes at {join_texts(texts, 4)}" if texts else ""


def show_distinct(*sides: Sequence[float]) -> list[str]:
    """Returns each side's numbers in words, with as many digits as tell the sides apart."""
    texts = ([", ".join(f"{value:.{digits}g}" for value in side) for side in sides] for digits in (4, 6, 9, 17))
    return next(
        filter(lambda found: len(set(found)) == len(found), texts), [", ".join(map(str, side)) for side in sides]
    )


def word_shares(weights: Sequence[float]) -> str:
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


# Suspected operations and the control runs that cleared or proved them, in words.


_INEXACT = {
    ControlKind.RESULT_PINNED: "it fixes values, and gradients can flow around them",
    ControlKind.CACHED_GRADIENTS: "modules that the loss itself calls and trains still run per micro-batch",
    ControlKind.DECISIONS: "it fixes decisions, but not the values behind them",
    ControlKind.DRAWS_PINNED: "it inserts typical values, which later code may treat differently",
}
"""Why a control may leave something although nothing else is at fault."""


def show_first_operation(comparison: Comparison, cause: Cause) -> Evidence:
    """Returns the evidence of the trace: the difference, the operation, how many samples."""
    suspect = cause.suspect
    where = f"first operation that differs: {suspect.operation}"
    if suspect.is_branch_on_shape:
        where = f"not all forwards run {suspect.operation}"
    # a reduction alone moves nothing between samples: the difference shows where its result is applied
    if suspect.source is not None:
        where = f"`{suspect.source.name}`{_at(suspect.source)} reduces over the batch, and `{suspect.operation.name}`"
        where += f"{_at(suspect.operation)} applies the result to each sample"
    # only traces that compare row by row know how many samples differ
    if suspect.kind in ("rows", "random") and suspect.samples:
        where += f", for {suspect.samples} of {comparison.batch_size} samples"
    culprit = suspect.culprit
    line = f": `{culprit.source}`" if culprit.source else ""
    if culprit.caller:
        line += f" ({culprit.caller})"
    return measured_evidence(
        "operations",
        f"{comparison.compared.largest}; {where}{line}",
        operation=suspect.operation.name,
        difference=suspect.difference,
        samples=suspect.samples,
        source=culprit.source,
    )


def _at(operation: Operation) -> str:
    return f" at {operation.file}:{operation.line}" if operation.file is not None else ""


def show_control(comparison: Comparison, cause: Cause) -> Evidence:
    """Returns the evidence of a cause's control run."""
    run = cause.control
    if run is None:
        why = cause.failure or "it cannot be kept fixed or replaced from outside"
        return control_evidence("control", f"no control run was possible ({why}): suspected, not proven")
    text = word_difference_left(run)
    if not _is_told_from_weights(comparison, run):
        text = text.removesuffix(": proven")
        text += ": suspected, because it repairs wrong loss weights as well, and none could be fitted"
    if not run.rounding:
        remainder = "the other causes listed explain the rest" if comparison.cleared else explain_rest(comparison, run)
        # with all causes removed, what this one leaves can only come from the weights
        weighs = comparison.cleared and cause.explained > 1 - FIT_FLOAT64
        text += (
            ": this and other micro-batch weights together explain all of it"
            if weighs
            else f": {_word_share(cause.explained)}{remainder}"
        )
    if cause.difference_alone > 0 and has_several_causes(comparison):
        text += f". With the other causes removed, it alone makes a difference of {cause.difference_alone:.0e}: proven"
    repairs = [{"what": tried.what, "left": tried.left, "rounding": tried.rounding} for tried in cause.remedies]
    more = {"repairs": repairs} if repairs else {}
    return control_evidence(
        "control", text, left=run.left, explained=cause.explained, alone=cause.difference_alone, **more
    )


def _word_share(share: float) -> str:
    """How much of the difference went away."""
    # 99.9% would hide how much is left
    most = f"all but {1 - share:.1g} of it" if share > 1 - SMALL_PART else f"{share:.0%}"
    return f"this explains {most}, and " if share > 0 else ""


def word_difference_left(run: ControlRun, article: str = "") -> str:
    """Says what was neutralised and what difference that left; `proven` where none is left."""
    # the full batch stays as it is where only the micro-batches are larger
    where = "" if run.kind is ControlKind.LARGER_MICRO_BATCHES else " in both runs"
    text = f"with {article}{run.what}{where} the difference is {run.left:.0e}"
    if run.proves:
        return f"{text}: proven"
    return f"{text}, which shows nothing, because {explain_no_power(run)}: suspected" if run.rounding else text


def explain_no_power(run: ControlRun) -> str:
    """Says why a control that leaves nothing shows nothing."""
    if run.cut_off:
        return f"this control cannot see {quote_names(run.cut_off)}, where anything may be wrong"
    return "what it keeps constant was the same before"


def explain_rest(comparison: Comparison, run: ControlRun) -> str:
    """Says what a control leaves: another cause where one was seen that a control could remove, else why it may not."""
    # a term with a wrong factor is another cause, whatever the control of this one leaves
    fits = [term.fit for term in comparison.record.controls.terms]
    is_term_wrong = any(fit.factor_residual < SMALL_PART < abs(fit.factor - 1) for fit in fits)
    if has_several_causes(comparison) or comparison.forward.ruled_out or is_term_wrong or run.kind not in _INEXACT:
        return "another cause remains"
    return f"the control is not exact, because {_INEXACT[run.kind]}"


def find_constant_remedy(cause: Cause) -> str:
    """The repair "hold it constant", where it was run and gave the full batch's gradient; empty where not."""
    # constant in both runs is the proof; constant in the accumulated run alone is the repair, which may lose a gradient
    run = next((run for run in cause.remedies if run.kind is ControlKind.FULL_BATCH_VALUE), None)
    if run is None or not run.repairs:
        return ""
    return f"compute it once over the full batch and use this constant in every micro-batch{RAN_EQUIVALENT}"


def find_pairing_remedy(suspect: Suspect) -> str:
    """The repair of partners (mixup): operations that only move rows; empty for others, as for a choice of rows."""
    moves_rows = suspect.kind != "control-flow" and suspect.culprit.name.partition(".")[0] in MOVES_ROWS
    if not (suspect.pairs or moves_rows):
        return ""
    return (
        "mix before the batch is split: pair the samples of the full batch, so that partners and their targets share a "
        "micro-batch"
    )


def group_causes(comparison: Comparison) -> list[list[Cause]]:
    """Returns the causes of the forward, those with one origin together: the partners of samples and their targets."""
    groups: list[list[Cause]] = []
    for cause in comparison.forward.causes:
        partners = [group for group in groups if _have_one_origin(group[0].suspect, cause.suspect)]
        if partners:
            partners[0].append(cause)
        else:
            groups.append([cause])
    return groups


def _have_one_origin(first: Suspect, second: Suspect) -> bool:
    """Whether two operations read the partners that samples get, and one rule tells of both."""
    are_partners = first.pairs and second.pairs and first.in_model == second.in_model
    return are_partners and not (first.statistics or second.statistics)


def number_remedy(comparison: Comparison, remedy: str, cause: Cause | None = None) -> str:
    """A remedy with its number, where operations have several, or one and the weights: they are made one by one.

    Args:
        comparison: The comparison.
        remedy: In words.
        cause: Whose it is; None: that of the weights, which come last where they do not explain nearly everything.
    """
    causes = [group[0] for group in group_causes(comparison)]
    # the larger share of the difference is repaired first, so that each step shows an effect
    weights = (None,) * comparison.window.has_wrong_weights
    order = (*weights, *causes) if comparison.weights_first else (*causes, *weights)
    # an order is told only where all of them together left nothing; weights of a script are tried alone
    if len(order) < 2 or cause not in order or not comparison.cleared:
        return remedy
    return f"fix {order.index(cause) + 1} of {len(order)}, in this order: {remedy}"


def word_earlier_fixes(before: Sequence[Cause]) -> str:
    """Says with which earlier repairs a repair was tested, or with which values kept constant; empty of one alone."""
    if not before:
        return ""
    # freezing a layer is a repair itself, while constant values are a control that nobody can train with
    applied = all(cause.control is not None and cause.control.kind is ControlKind.EVALUATION_MODE for cause in before)
    return " together with the fixes before it" if applied else " with the earlier causes kept constant"


def word_other_fixes(comparison: Comparison) -> str:
    """Says with which repairs weights were tested: those of the forward, else fixed state; empty alone."""
    moving = comparison.state is not None and bool(comparison.state.blamed)
    return ("" if comparison.weights_first else word_earlier_fixes(comparison.forward.causes)) or (
        " with the state kept fixed" if moving else ""
    )


def _is_told_from_weights(comparison: Comparison, run: ControlRun) -> bool:
    """Whether wrong loss weights would not do as well as a control.

    Cached gradients compute the loss once for all samples, with which wrong weights disappear, too. Weights that were
    fitted and leave a difference rule them out; those of a model with fewer numbers than micro-batches always fit.
    """
    fit = comparison.window.fit
    return run.kind is not ControlKind.CACHED_GRADIENTS or (fit is not None and not fit.vacuous)


def has_several_causes(comparison: Comparison) -> bool:
    """Whether more than one cause was found."""
    state = comparison.state is not None and bool(comparison.state.blamed)
    weights = comparison.window.has_wrong_weights
    return len(comparison.forward.causes) + state + weights + (comparison.draws.difference_alone > 0) > 1


def is_proven(comparison: Comparison, cause: Cause) -> bool:
    """Whether the difference falls to rounding without the suspect, or without it and the causes named beside it."""
    # its own control decides first; next to other causes it has to explain a share when all of them are removed
    if cause.control is None or not _is_told_from_weights(comparison, cause.control):
        return False
    if cause.control.rounding:
        return cause.control.proves
    return comparison.cleared and (cause.difference_alone > 0 or cause.explained > SMALL_PART)


# Where two traced runs differ first.


def trace_evidence(first: FirstDifference) -> Evidence:
    """Returns how large the first difference is, in which micro-batches, and what the line reads."""
    texts = []
    if first.micro_batches:
        numbers = join_texts([str(at + 1) for at in first.micro_batches], 8)
        texts.append(f"{'micro-batch' if len(first.micro_batches) == 1 else 'micro-batches'} {numbers} differ")
    if first.samples:
        texts.append(f"{count_text(first.samples, 'sample')} by up to {first.difference:.1e}")
    if first.ratios and not math.isnan(first.difference):
        alike = max(first.ratios) - min(first.ratios) <= COMPUTED_FLOAT32 * max(first.ratios)
        ratios = ", ".join(f"{ratio:.3g}" for ratio in first.ratios[:8])
        meaning = " (one factor)" if alike and first.ratios[0] != 1 else ""
        texts.append(f"norms of the micro-batches' rows over the full batch's: {ratios}{meaning}")
    if first.number is not None:
        name = f"`{first.number.name}`" if first.number.name else "a number"
        micro_batches = weights_text(first.number.micro_batches)
        texts.append(f"{name} is {first.number.full:.4g} in the full batch and {micro_batches} in the micro-batches")
    texts += [text for text in [word_assignments(first.assigned)] if text]
    if first.reader is not None:
        texts.append(f"{f'`{first.name}`' if first.name else 'it'} is read at {first.reader.file}:{first.reader.line}")
    if first.operation.caller:
        texts.append(f"`{first.operation.name}` runs at {first.operation.caller}")
    for source in first.sources[:_MOST_SOURCES]:
        texts.append(f"it reads `{source.source}` ({source.file}:{source.line}), which all samples of a batch share")
    statement = "; ".join(texts) or "what this line reads agrees"
    return measured_evidence("trace", statement, ratios=list(first.ratios), samples=first.samples)


_MOST_SOURCES = 3  # that are written out
