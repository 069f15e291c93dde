"""Hand-written verdicts for the tests of everything right of the tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gaverify.records.answers import Environment
from gaverify.records.audit import RowCheck, UpdateComparison
from gaverify.records.audit_report import Arithmetic, Audit, Moment, RecordedCalls, TrainedModels
from gaverify.records.experiment import WeightFit
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.outcomes import Element, NotCompared, Outcome, ParameterComparison
from gaverify.records.patch import Edit, Patch
from gaverify.records.verdict import Losses, RunInfo, Trace, TraceRow, TraceStep, Verdict
from gaverify.records.windows import AccumulationWindow

ENVIRONMENT = Environment("2.13.0", "0.1.0")


def row(name: str = "0.weight", outcome: Outcome = Outcome.EQUIVALENT, **changes: Any) -> ParameterComparison:
    """A parameter of shape 32×16 that agrees to rounding, or differs by 88 %."""
    divergent = outcome is Outcome.DIVERGENT
    difference = 1.056 if divergent else 9.6e-8
    worst = Element((3, 14), 0.0123457, -0.0456789 if divergent else 0.0123458)
    sample = ParameterComparison(
        name, (32, 16), outcome, "working-precision", 1.2, 1.3, difference, 4.9e-7, difference, worst
    )
    return sample._replace(**changes)


def run(**changes: Any) -> RunInfo:
    """A run of `mlp` with 8 samples in 4 micro-batches."""
    sample = RunInfo(
        model="mlp",
        parameters=1234,
        trainable=1234,
        batch_size=8,
        micro_batches=(2, 2, 2, 2),
        weights=(0.25, 0.25, 0.25, 0.25),
        weighting="uniform",
        strategy="accumulate",
        device="cpu",
        dtype="float32",
        seed=0,
        mode="train",
        losses=Losses(2.302585, 2.302585),
    )
    return replace(sample, **changes)


def equivalent(**changes: Any) -> Verdict:
    """Four parameters that agree to rounding."""
    rows = tuple(row(name) for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    made = {"environment": ENVIRONMENT, "timings": {"total": 0.125}}
    sample = Verdict(Outcome.EQUIVALENT, rows, run(), "working-precision", 9.5e-7, **made)
    return replace(sample, **changes)


def batchnorm() -> Finding:
    """The proven fault of design section 9."""
    return Finding(
        "GAV101",
        "batch-statistics",
        "fault",
        "normalises with the statistics of the micro-batch",
        Location("1", "BatchNorm1d", "train.py", 12),
        (
            Evidence(
                "forward-trace",
                "measured",
                "relative difference 8.8e-01 in `0.weight`; first diverging operation `native_batch_norm`",
                {"relative": 0.88, "operation": "native_batch_norm", "shape": (8, 32), "limit": math.inf},
            ),
            Evidence(
                "freeze",
                "control",
                "with `1` in evaluation mode in both runs the difference is 8e-08: proven",
                {"after": 8e-8},
            ),
        ),
        "replace it by GroupNorm(4, 32) (another model); or keep it in evaluation mode",
        proven=True,
    )


def divergent(**changes: Any) -> Verdict:
    """Three of six parameters differ, the float64 control decided; one proven fault and a note."""
    rows = (
        row("0.weight", Outcome.DIVERGENT, method="float64-control"),
        row("0.bias", Outcome.DIVERGENT, method="float64-control", shape=(32,), difference_norm=0.12),
        row("1.weight", Outcome.DIVERGENT, method="float64-control", shape=(32,), difference_norm=0.6),
        row("2.weight", method="float64-control", reference_norm=0.0, difference_norm=1e-9, allowed=1e-8),
        row("2.bias", shape=(10,), difference_norm=0.0),
        row(
            "spare.bias",
            shape=(),
            why=NotCompared.UNUSED,
            reference_norm=0.0,
            difference_norm=0.0,
            worst=None,
            method="not-compared",
        ),
    )
    note = Finding("GAV402", "buffer-drift", "note", "`1.running_mean` ends up different: 0.12 against 0.31")
    sample = Verdict(
        Outcome.DIVERGENT,
        rows,
        run(model="mlp-batchnorm", losses=Losses(2.302585, 2.41)),
        "float64-control",
        3.1e-15,
        environment=ENVIRONMENT,
        findings=(batchnorm(), note),
        timings={"total": 0.5},
        spec={"model": "mlp-batchnorm", "steps": 4, "shape": (3, 32), "limit": math.nan},
    )
    return replace(sample, **changes)


def inconclusive(**changes: Any) -> Verdict:
    """One gradient is NaN, ragged micro-batches, token weights."""
    nan = math.nan
    rows = (
        row("embed.weight"),
        row(
            "head.weight",
            Outcome.INCONCLUSIVE,
            method="not-compared",
            reference_norm=nan,
            accumulated_norm=nan,
            difference_norm=nan,
            allowed=nan,
            working_difference_norm=nan,
            worst=None,
            why=NotCompared.NOT_FINITE_IN_FULL,
        ),
    )
    settings = run(
        model="models/language.py:factory",
        micro_batches=(3, 3, 2),
        weights=(0.1, 0.52, 0.38),
        weighting="tokens",
        autocast="bfloat16",
        losses=Losses(nan, 2.302585),
        trainable=1200,
    )
    suspect = Finding(
        "GAV503", "non-finite-gradient", "fault", "the loss of micro-batch 2 is NaN", Location(None, None, "loss.py", 7)
    )
    sample = Verdict(
        Outcome.INCONCLUSIVE, rows, settings, "noise-floor", 2e-5, environment=ENVIRONMENT, findings=(suspect,)
    )
    return replace(sample, **changes)


def traced(**changes: Any) -> Verdict:
    """`toy-linear --steps 2 --trace`: −16, −20, 1.0, 1.2."""
    trace = Trace(
        (TraceRow(1, -16.0, 0.0, 1, 0, 1), TraceRow(2, -20.0, 0.0, 2, 0, 1)),
        TraceStep(0.01, 1.0, 1.2, 1.2, 0.0, True),
    )
    weight = row(
        "weight",
        shape=(1, 1),
        reference_norm=20.0,
        accumulated_norm=20.0,
        difference_norm=0.0,
        working_difference_norm=0.0,
        worst=Element((0, 0), -20.0, -20.0),
    )
    settings = run(
        model="toy-linear",
        parameters=1,
        trainable=1,
        batch_size=4,
        micro_batches=(2, 2),
        weights=(0.5, 0.5),
        losses=Losses(9.0, 9.0),
    )
    return equivalent(parameters=(weight,), run=settings, trace=trace, **changes)


def large(faults: int = 2, rows: int = 60) -> Verdict:
    """A transformer with long names, of which the first `faults` parameters differ."""
    parameters = tuple(
        row(
            f"transformer.decoder.layers.{at}.self_attention.query_key_value_projection.weight",
            Outcome.DIVERGENT if at < faults else Outcome.EQUIVALENT,
            shape=(3072, 1024),
        )
        for at in range(rows)
    )
    outcome = Outcome.DIVERGENT if faults else Outcome.EQUIVALENT
    settings = run(model="causal-lm", parameters=124_439_808, trainable=124_000_000)
    return equivalent(outcome=outcome, parameters=parameters, run=settings)


def audited(outcome: Outcome = Outcome.DIVERGENT, judged: bool = True) -> Audit:
    """Two updates: the first agrees, the second differs."""
    updates = (
        UpdateComparison(1, Outcome.EQUIVALENT, True, (row("0.weight"),), RowCheck(8, 8)),
        UpdateComparison(
            2,
            Outcome.DIVERGENT,
            judged,
            (row("0.weight", Outcome.DIVERGENT),),
            RowCheck(8, 8),
            AccumulationWindow(fit=WeightFit((0.25, 0.75), 1e-8, True, used=(0.5, 0.5), factor=0.9)),
        ),
    )
    timeline = (
        Moment("backward", 1, "train.py", 7),
        Moment("backward", 1, "train.py", 7),
        Moment("step", 1, "train.py", 9),
        Moment("zero_grad", 1, "train.py", 10),
    )
    return Audit(
        "train.py",
        outcome,
        "update 2: 1 of 1 parameter differs",
        updates,
        RecordedCalls(timeline=timeline),
        trained=TrainedModels(("Net",), ("SGD",), 512),
        arithmetic=Arithmetic("cpu", "float32"),
        environment=Environment("2", "0"),
        method="noise-floor",
        findings=(batchnorm(),),
        timings={"total": 3.0, "full": 1.0},
    )


def patched() -> Audit:
    """The same audit with a patch whose diff has tabs and a long line."""
    diff = [
        "--- a/train.py",
        "+++ b/train.py",
        "@@ -10,3 +10,3 @@",
        " \tfor x, y in loader:",
        "-\t\tloss(x, y).backward()",
        f"+\t\t(loss(x, y) / accumulation_steps).backward()  # {'<wide> ' * 40}",
        " \t\tstep()",
    ]
    edits = (Edit("train.py", 11, 2, 11, 12, "(loss(x, y) / accumulation_steps)"),)
    patch = Patch(
        edits, ("GAV101",), "Divides the loss by `accumulation_steps`.", "\n".join([*diff, ""]), "another model"
    )
    return replace(audited(), patch=patch)


EVERY = (equivalent, divergent, inconclusive, traced, large)
