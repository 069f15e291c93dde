"""Hand-written profiles for the tests of everything right of the tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gaverify.records.answers import Environment
from gaverify.records.outcomes import Outcome
from gaverify.records.profile import STRATEGIES, Memory, Profile, Row, Seconds, Setting, Strategy

B = 32


def setting(**changes: Any) -> Setting:
    """A run of `mnist-mlp` on a CPU."""
    sample = Setting(
        model="mnist-mlp",
        parameters=567434,
        trainable=567434,
        batch_size=B,
        device="cpu",
        device_name="x86_64",
        device_memory=None,
        dtype="float32",
        autocast=None,
        mode="train",
        seed=0,
        threads=1,
        optimizer=None,
        repeats=5,
        torch="2.13.0",
    )
    return replace(sample, **changes)


def row(strategy: Strategy, steps: int, **changes: Any) -> Row:
    """A row whose activations are 1 kB and whose peak is 2 MB per sample, on top of 300 MB."""
    samples = B if strategy != "accumulate" else B // steps
    time = 0.001 * (1 + steps)
    sample = Row(
        strategy,
        steps,
        "measured",
        "",
        (B // steps,) * steps,
        samples * 1000,
        Memory("resident", 290_000_000, 300_000_000 + samples * 2_000_000),
        Seconds.of([time, time * 1.1, time * 0.9, time * 1.2, time]),
    )
    if strategy != "full-batch":
        sample = replace(sample, outcome=Outcome.EQUIVALENT, relative_difference=1.1e-7, method="working-precision")
    return replace(sample, **changes)


def profile(**changes: Any) -> Profile:
    """The full batch, and the two other strategies with K = 2, 4, 8."""
    summed, accumulated = ([row(strategy, k) for k in (2, 4, 8)] for strategy in STRATEGIES[1:])
    rows = (row("full-batch", 1), *summed, *accumulated)
    sample = Profile(
        setting(),
        rows,
        (1, 2, 4, 8),
        spec={"model": "mnist-mlp", "steps": 1},
        environment=Environment("2.13.0", "0.1.0", "3.11.7", "Linux", "", ""),
    )
    return replace(sample, **changes)


def failing(**changes: Any) -> Profile:
    """Everything that can happen to a row."""
    rows = (
        row(
            "full-batch",
            1,
            status="out-of-memory",
            message="out of memory on cpu while running the full batch",
            activation_bytes=None,
            memory=None,
            seconds=None,
        ),
        row("accumulate", 2, outcome=Outcome.DIVERGENT, relative_difference=0.88),
        row(
            "accumulate",
            4,
            outcome=Outcome.INCONCLUSIVE,
            relative_difference=None,
            message="not compared with the full batch: out of memory on cpu while running the full batch",
        ),
        Row("accumulate", 8, "failed", "the model or loss raised on micro-batch 1 of 8: ValueError: no"),
        Row("accumulate", 64, "does-not-fit", "steps = 64 micro-batches cannot be cut from a batch of 32 samples"),
        Row("accumulate", 128, "not-run"),
    )
    return profile(rows=rows, interrupted=True, **changes)
