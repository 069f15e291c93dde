"""A verdict as a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from gaverify.records.numbers import count_text
from gaverify.records.outcomes import Method, Outcome, Reference, hidden_share
from gaverify.records.verdict import CountedTargets, RunInfo, Trace, Verdict
from gaverify.report.blocks import Facts, Page, Parameters, Section, Table
from gaverify.report.charts import chart_by_outputs, weights_charts
from gaverify.report.common_blocks import blamed_modules, make_page
from gaverify.report.layout import METHODS, join_title, number, percent, ranks_line, value, word_resolution
from gaverify.thresholds import FIT_EXACT, TENTH

_NO_ACCUMULATION = "nothing accumulated (K = 1)"


def verdict_page(verdict: Verdict) -> Page:
    """Returns the page of a verdict."""
    run = verdict.run
    return make_page(
        verdict,
        join_title(verdict.source, verdict.name) or run.model,
        sentence(verdict),
        Facts(tuple(_facts(verdict))),
        _sections(verdict),
        method=method(verdict),
        states=[_NO_ACCUMULATION] if run.steps == 1 and verdict.is_equivalent else (),
        rows=verdict.parameters,
        file=verdict.source,
        model=run.model,
    )


def _sections(verdict: Verdict) -> Iterator[Section]:
    causes = blamed_modules(verdict.findings)
    if chart := chart_by_outputs(verdict.modules, causes, sum(verdict.run.part)):
        yield Section("Forward pass: first difference", (chart,))
    fits = (evidence.values.get("weights") for finding in verdict.findings for evidence in finding.evidence)
    # of several findings the first with fitted weights is the one that the chart explains
    fitted = next((fit for fit in fits if isinstance(fit, (list, tuple)) and fit), None)
    if fitted is not None:
        # a document may hold null for a weight that is not finite
        weights = [float(weight) if isinstance(weight, (int, float)) else math.nan for weight in fitted]
        yield Section("Micro-batch weights", weights_charts([("", verdict.run.weights, weights)]))
    if verdict.trace is not None:
        yield Section("Micro-batch by micro-batch", (_trace_table(verdict.trace), _trace_step(verdict.trace)))
    if verdict.parameters:
        parameters = Parameters(verdict.parameters, verdict.outcome, causes=causes)
        yield Section(count_text(len(verdict.parameters), "parameter"), (parameters,))


def _facts(verdict: Verdict) -> list[tuple[str, str]]:
    """Returns what was run, as (label, text)."""
    run = verdict.run
    count = f"{run.parameters:,} {'parameter' if run.parameters == 1 else 'parameters'}"
    trainable = "all trainable" if run.trainable == run.parameters else f"{run.trainable:,} trainable"
    autocast = f"autocast {run.autocast or 'off'}"
    # torch's switches let products round float32: that is part of how the run was computed
    rounded = f" ({', '.join(run.rounded)})" if run.rounded else ""
    rows = [
        ("spec", join_title(verdict.source, verdict.name)),
        ("model", f"{run.model}: {count}, {trainable}"),
        ("batch", _batch(run)),
        ("weighting", _weights(run)),
        ("strategy", f"{run.strategy}, {run.mode} mode, seed {run.seed}"),
        ("mode", _layers_in_evaluation(run)),
        ("reference", _reference(run)),
        ("ranks", "" if verdict.ranks is None else ranks_line(verdict.ranks, run.steps)),
        ("where", f"{run.device}, {run.dtype}{rounded}, {autocast}, torch {verdict.environment.torch}"),
        ("loss", f"full batch {value(run.losses.full)}, accumulated {value(run.losses.accumulated)}"),
    ]
    return [(label, text) for label, text in rows if text]


def _batch(run: RunInfo) -> str:
    sizes = run.micro_batches
    if len(set(sizes)) == 1:
        return f"B = {run.batch_size} = {run.steps} × {sizes[0]} (micro-batches × samples)"
    parts = [str(size) for size in sizes]
    if len(parts) > 12:  # the first and the last ones show where it is ragged
        parts = [*parts[:4], "…", *parts[-4:]]
    return f"B = {run.batch_size} = {'+'.join(parts) or '?'} ({run.steps} micro-batches)"


def _layers_in_evaluation(run: RunInfo) -> str:
    """Which layers are not trained as the others; nothing where all are in one mode."""
    if not run.in_evaluation:
        return ""
    advice = "; `--mode train` tests a loop that calls `model.train()`" if run.mode == "as is" else ""
    return f"{', '.join(run.in_evaluation)} kept in eval mode{advice}"


def _reference(run: RunInfo) -> str:
    """How the full batch was made to fit; nothing where it fitted."""
    if run.reference is Reference.FULL:
        return ""
    failed = " and ".join(run.reference_failed)
    return "offload: activations on the host" + (f" ({failed} did not fit)" if failed else "")


def _weights(run: RunInfo) -> str:
    if not run.weights:
        return run.weighting
    recipe = run.weighting if run.targets is None else f"{run.weighting} ({_word_targets(run.targets)})"
    if len(set(run.weights)) == 1:
        is_left = run.weighting == "none" and run.weights[0] == 1
        return "none: losses are not scaled" if is_left else f"{recipe}, each loss × {run.weights[0]:.4g}"
    parts = [f"{weight:.4g}" for weight in run.weights]
    if len(parts) > 8:  # equal weights were one number above; what differs shows at both ends
        parts = [*parts[:3], "…", *parts[-3:]]
    return f"{recipe}, losses × {', '.join(parts)}"


def _word_targets(targets: CountedTargets) -> str:
    """Which targets the weighting `tokens` counted, and by which value it left out the others."""
    ignored = " or ".join(map(str, targets.ignored))
    if targets.weighted:
        return f"class weights of all targets but {ignored}: {targets.counted:.4g}"
    of = f"{targets.counted:g} of {targets.total:,} targets"
    return f"{of}: all but {ignored}" if targets.counted < targets.total else f"{of}: none is {ignored}"


def _trace_table(trace: Trace) -> Table:
    # a model of one number shows the number itself, with its sign
    gradient = "accumulated gradient" if trace.step.scalar else "accumulated ‖gradient‖"
    head = ("micro-batch", gradient, "movement", "backward : step : zero_grad")
    rows = [
        (
            str(row.micro_batch),
            value(row.gradient),
            value(row.movement),
            f"{row.backward} : {row.step} : {row.zero_grad}",
        )
        for row in trace.rows
    ]
    return Table((head, *rows), right=(1, 2))


def _trace_step(trace: Trace) -> Facts:
    step = trace.step
    weights = "weight" if step.scalar else "‖weights‖"
    text = (
        f"SGD, lr {step.lr:g}: {weights} {value(step.before)} → full batch {value(step.after_full)}, "
        f"accumulated {value(step.after_accumulated)} (difference {number(step.weights_difference)})"
    )
    return Facts((("step", text),))


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
    # a parameter that both runs leave without a gradient agrees, and nothing of it was compared
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
    # relative to a zero, or to its rounding, any difference is enormous
    vanishing_rows = [row for row in rows if row.vanishing]
    sizes = [row.relative_difference for row in rows if not row.vanishing]
    finite = [size for size in sizes if math.isfinite(size)]
    if finite:
        # In the notation of the table and of the findings, where the same number stands again.
        text += f", relative difference up to {number(max(finite))}"
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
        # the most frequent reason stands for the others
        return text + (f" (and {count_text(len(reasons) - 1, 'other reason')})" if len(reasons) > 1 else "")
    if verdict.findings:
        # what the batch lacks, where every parameter agrees
        blind = [finding for finding in verdict.findings if finding.code == "GAV901" and not open_rows]
        return (blind or verdict.findings)[0].summary
    # nothing differs and nothing is open: rounding alone may hide a fault
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
    """Returns how the verdict was decided, and above which difference a fault would have been detected."""
    verb = "compared" if verdict.outcome is Outcome.INCONCLUSIVE else "decided"
    counts = Counter(row.method for row in verdict.parameters if row.method != Method.NOT_COMPARED)
    uncompared = len(verdict.parameters) - counts.total()
    # where methods are mixed, each says for how many parameters it decided
    if len(counts) > 1:
        (first, most), *others = counts.most_common()
        text = f"{verb} for {count_text(most, 'parameter')} {METHODS[first]}"
        text += "".join(f", for {count} {METHODS[name]}" for name, count in others)
    elif verdict.method == Method.NOT_COMPARED:
        return "nothing was compared"
    else:
        # a document may name a method that this version does not know
        text = f"{verb} {METHODS.get(verdict.method, f'by {verdict.method}')}"
    if verdict.outcome is not Outcome.EQUIVALENT:  # the sentence of an equivalent verdict says it already
        text += f"; {uncompared} not compared" if uncompared else ""
    if Method.FLOAT32_RUNS in counts and verdict.run.rounded:
        formats = sorted({words.split()[-1] for words in verdict.run.rounded})
        text += f"; there no product was rounded to {' or '.join(formats)}"
    if verdict.method == Method.TOLERANCE and verdict.spec:
        tolerances = [f"{key} {verdict.spec[key]}" for key in ("rtol", "atol") if verdict.spec.get(key) is not None]
        text += f" ({', '.join(tolerances)})" if tolerances else ""
    if (few := verdict.few_samples) is not None:
        # float64 is run only where float32 leaves more than its own rounding, and agrees to far more digits
        precision = "float64" if few.structure <= FIT_EXACT else "float32"
        text += (
            f" ({precision}: {few.samples} samples agree to {number(few.structure)}; weights ± {percent(few.weights)}; "
            f"rest {percent(few.rest)}, rounding {percent(few.rounding)})"
        )
    if verdict.run.part:
        what = "that part is" if verdict.method == Method.FLOAT64_PART else "the cause was looked for in"
        text += f"; {what} the first {sum(verdict.run.part)} of {verdict.run.batch_size} samples"
    if verdict.control_failure:
        text += f"; float64 was impossible: {verdict.control_failure}"
    # beside a difference that was found it tells nothing
    if math.isfinite(verdict.resolution) and verdict.resolution > 0 and verdict.outcome is not Outcome.DIVERGENT:
        text += f"; {word_resolution(verdict.resolution)}"
    return text
