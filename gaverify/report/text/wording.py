"""The sentences and numbers that every report shares: a verdict in words, the method in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from gaverify.amounts import bytes_text, count_text, seconds_text
from gaverify.records.comparison import Method, Outcome, ParameterComparison, badness, hidden_share
from gaverify.records.profile import LABELS, Row
from gaverify.records.ranks import RankFacts
from gaverify.records.verdict import Verdict
from gaverify.thresholds import TENTH

METHODS: Mapping[str, str] = {
    Method.WORKING_PRECISION: "in working precision",
    Method.FLOAT64_CONTROL: "by the float64 control",
    Method.NOISE_FLOOR: "by the noise floor of the full batch",
    Method.TWO_SAMPLES: "by the rounding of two samples, which agree in float64",
    Method.FEW_SAMPLES: "by the weights that fit, and by float64 on a few samples",
    Method.WEIGHTS: "by the weights that fit",
    Method.FLOAT32_RUNS: "by the same runs in float32, where rounding hides nothing",
    Method.MICRO_BATCH_FLOOR: "by the noise floor of a micro-batch and float64 on two samples",
    Method.FLOAT64_PART: "by float64 on a part of the batch",
    Method.TOLERANCE: "by the tolerances that were asked for",
}


NOT_RELATIVE = "* not relative: the full-batch gradient is zero, or rounding"
"""The footnote of what `measures` marks."""


def number(value: float) -> str:
    """Returns a norm or a relative difference with two digits: `8.8e-01`, `0`, `inf`, `-` where there is none."""
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def value(amount: float) -> str:
    """Returns a value with six digits, integers with their point: `-16.0`, `0.0123457`."""
    text = f"{amount:.6g}"
    return text + ".0" if text.lstrip("-").isdigit() else text


def percent(fraction: float) -> str:
    """Returns a relative difference for a sentence: `88 %`, `0.006 %`, `31 times`."""
    if fraction >= 10:
        return f"{fraction:.0f} times" if fraction < 1e6 else f"{fraction:.1e} times"
    share = fraction * 100
    if share >= 99.5:
        return f"{share:.0f} %"
    return f"{share:.2g} %" if share >= 1e-4 or share == 0 else f"{share:.0e} %"


PROFILE = ("strategy", "K × n", "activations", "peak", "time", "outcome", "rel. diff")
_STATUS = {"out-of-memory": "out of memory", "does-not-fit": "does not fit", "failed": "failed", "not-run": "not run"}


def profile_cells(row: Row) -> tuple[str, ...]:
    """Returns what a table says of a profile's row, in the columns of `PROFILE`; `-` where there is no figure."""
    outcome, difference = "-" if row.outcome is None else row.outcome.value, row.relative_difference
    if row.status != "measured":
        outcome, difference = _STATUS[row.status], None
    elif row.strategy == "full-batch":
        outcome, difference = "reference", None
    return (
        LABELS[row.strategy],
        f"{row.steps}" + (f" × {row.micro_batch}" if row.micro_batch is not None else ""),
        "-" if row.activation_bytes is None else bytes_text(row.activation_bytes),
        "-" if row.memory is None else bytes_text(row.memory.peak),
        "-" if row.seconds is None else seconds_text(row.seconds.median),
        outcome,
        "" if difference is None else number(difference),
    )


def ranks_line(facts: RankFacts, micro_batches: int) -> str:
    """Returns how many ranks there were, under which engine, and what they sent each other."""
    engine = facts.engine.value if facts.engine is not None else "no known engine"
    traffic, difference = facts.traffic.window, facts.replicas.difference
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in traffic.counts.items()) or "no collective"
    replicas = "" if math.isnan(difference) else f"; replicas {'identical' if difference == 0.0 else 'apart'}"
    each = f", K = {micro_batches // facts.ranks} each" if micro_batches else ""
    return f"{facts.ranks} × {engine}{each}: {kinds} per window, {bytes_text(traffic.bytes_moved)}{replicas}"


def shape(row: ParameterComparison) -> str:
    """Returns the shape as `32×16`, `scalar` where it has no dimension."""
    return "×".join(str(size) for size in row.shape) or "scalar"


def measures(row: ParameterComparison, mark: str = "*") -> tuple[str, str, str, str]:
    """Returns shape, norm, relative difference and what was allowed.

    Relative to zero everything is infinite: the plain norms say something then, and the mark says what they are.
    """
    sizes = (number(row.relative_difference), number(row.relative_allowed))
    if row.vanishing:
        sizes = (number(row.difference_norm) + mark, number(row.allowed) + mark)
    return shape(row), number(row.reference_norm), *sizes


def worst(row: ParameterComparison) -> str:
    """Returns the worst element as `[3, 4]: 0.1 vs 0.2` (full batch against accumulated).

    Empty for equivalent rows: which element rounding hits most, and whether it hits any, differs between processors.
    """
    if row.worst is None or row.outcome is Outcome.EQUIVALENT:
        return ""
    index = f"[{', '.join(str(at) for at in row.worst.index)}]"
    return f"{index}: {value(row.worst.reference)} vs {value(row.worst.accumulated)}"


def sort_rows(rows: Iterable[ParameterComparison]) -> list[ParameterComparison]:
    """Returns the parameters worst first; equivalent ones, which rounding alone tells apart, keep the model's order."""

    def rank(row: ParameterComparison) -> tuple[float, ...]:
        return badness(row) if row.outcome is not Outcome.EQUIVALENT else badness(row)[:1]

    return sorted(rows, key=rank, reverse=True)


def join_title(source: str, name: str) -> str:
    """Returns file and name of a spec together: a folder may hold two of one name, and a model many."""
    return f"{source} ({name})" if source and name else source or name


def sentence(verdict: Verdict) -> str:
    """Returns the verdict in words, without its outcome."""
    total = len(verdict.parameters)
    if verdict.outcome is Outcome.EQUIVALENT:
        return _equivalent(verdict, total)
    if verdict.outcome is Outcome.DIVERGENT:
        return _divergent(verdict, total)
    return _inconclusive(verdict, total)


def _equivalent(verdict: Verdict, total: int) -> str:
    if total == 0:
        return "nothing was compared"
    unused = sum(row.why is not None for row in verdict.parameters)
    agree = sum(row.outcome is Outcome.EQUIVALENT for row in verdict.parameters) - unused
    asked = verdict.method == Method.TOLERANCE
    how = "agree within the tolerances that were asked for" if asked else "agree to rounding"
    unused_text = f", {unused} {'was' if unused == 1 else 'were'} not compared" if unused else ""
    return f"{agree} of {total} {_parameters(total)} {_verb(how, agree)}{unused_text}"


def _divergent(verdict: Verdict, total: int) -> str:
    rows = verdict.divergent
    if not rows:
        return "no single gradient differs; the findings say what does"
    text = f"{len(rows)} of {total} {_parameters(total)} {_verb('differ', len(rows))}"
    vanishing_rows = [
        row for row in rows if row.vanishing
    ]  # relative to a zero, or to its rounding, any difference is enormous
    sizes = [row.relative_difference for row in rows if not row.vanishing]
    finite = [size for size in sizes if math.isfinite(size)]
    if finite:
        text += f", by up to {percent(max(finite))}"
    if any(math.isnan(size) for size in sizes):
        text += "; not every gradient is finite and there on both sides"
    elif vanishing_rows or any(math.isinf(size) for size in sizes):
        text += "; where the full-batch gradient is zero, by more than rounding"
    return text


def _inconclusive(verdict: Verdict, total: int) -> str:
    if total == 0:
        return "nothing was compared: the model has no trainable parameter"
    open_rows = [row for row in verdict.parameters if row.outcome is Outcome.INCONCLUSIVE]
    reasons = Counter(row.reason for row in open_rows if row.reason)
    if reasons:
        text = f"{len(open_rows)} of {total} {_parameters(total)} undecided: {reasons.most_common(1)[0][0]}"
        return text + (f" (and {count_text(len(reasons) - 1, 'other reason')})" if len(reasons) > 1 else "")
    if verdict.findings:
        # what the batch lacks, where every parameter agrees
        blind = [finding for finding in verdict.findings if finding.code == "GAV901" and not open_rows]
        return (blind or verdict.findings)[0].summary
    if not open_rows and (hidden := hidden_share(verdict.parameters)) > TENTH:
        return (
            f"rounding may hide up to {percent(hidden)} of the whole gradient: a float64 control, or fewer samples, "
            "would tell"
        )
    return f"{len(open_rows)} of {total} {_parameters(total)} could not be decided"


def _parameters(count: int) -> str:
    return "parameter" if count == 1 else "parameters"


def _verb(phrase: str, count: int) -> str:
    first, _, remainder = phrase.partition(" ")
    return " ".join(filter(None, (first + ("s" if count == 1 else ""), remainder)))


def method(verdict: Verdict) -> str:
    """Returns how the verdict was decided and the smallest fault that this way could have seen."""
    verb = "compared" if verdict.outcome is Outcome.INCONCLUSIVE else "decided"
    counts = Counter(row.method for row in verdict.parameters if row.method != Method.NOT_COMPARED)
    uncompared = len(verdict.parameters) - counts.total()
    if len(counts) > 1:
        text = f"{verb} " + ", ".join(f"{METHODS[name]} ({count})" for name, count in counts.most_common())
    elif verdict.method == Method.NOT_COMPARED:
        return "nothing was compared"
    else:
        text = f"{verb} {METHODS.get(verdict.method, f'by {verdict.method}')}"
    if verdict.outcome is not Outcome.EQUIVALENT:  # the sentence of an equivalent verdict says it already
        text += f"; {uncompared} not compared" if uncompared else ""
    if verdict.method == Method.TOLERANCE and verdict.spec:
        tolerances = [f"{key} {verdict.spec[key]}" for key in ("rtol", "atol") if verdict.spec.get(key) is not None]
        text += f" ({', '.join(tolerances)})" if tolerances else ""
    if (few := verdict.few_samples) is not None:
        text += (
            f" (float64: {few.samples} samples agree to {number(few.structure)}; weights ± {percent(few.weights)}; "
            f"rest {percent(few.rest)}, rounding {percent(few.rounding)})"
        )
    if verdict.run.part:
        what = "that part is" if verdict.method == Method.FLOAT64_PART else "the cause was looked for in"
        text += f"; {what} the first {sum(verdict.run.part)} of {verdict.run.batch_size} samples"
    if verdict.control_failure:
        text += f"; float64 was impossible: {verdict.control_failure}"
    if math.isfinite(verdict.resolution) and verdict.resolution > 0:
        text += f"; smallest relative difference it could have seen: {number(verdict.resolution)}"
    return text
