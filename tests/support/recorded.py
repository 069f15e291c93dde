"""Recorded runs of ranks, written by hand as the recorder writes them: one optimizer, two parameters, one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.samples import input_rows
from gaverify.audit.same_data import StepSample, StoredGradients
from gaverify.records.events import (
    Backward,
    ClosingRecord,
    Forward,
    Step,
    TrainedGroup,
    TrainedParameter,
    write_closing_record,
    write_event,
)

LINE = 1, "train.py", 9
NAMES = (TrainedParameter("0:weight", (4,)), TrainedParameter("0:bias", (1,)))


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def run_of(
    folder: Path,
    final: torch.Tensor,
    own: torch.Tensor,
    *,
    rank: int = 0,
    ranks: int = 1,
    role: str = "accumulated",
    parameters: Sequence[TrainedParameter] = NAMES,
    backward: Mapping[str, Any] | None = None,
    fed: torch.Tensor | None = None,
    told: Mapping[str, Any] | None = None,
    **step: Any,
) -> RecordedRun:
    """Writes the record of a process that made one update.

    Args:
        folder: Where to.
        final: The gradient that it stepped with, shape (5,).
        own: What its one backward pass gave alone, shape (5,).
        rank: Its rank.
        ranks: How many train together.
        role: What the run is.
        parameters: Names and shapes of what its optimizer holds.
        backward: Values of the event of its backward pass.
        fed: The input of its one forward.
        told: What else its closing record holds, or holds otherwise.
        step: What else the sample of its step holds, or holds otherwise.
    """
    folder.mkdir()
    closing = ClosingRecord(updates=1, rank=rank, ranks=ranks, groups=(TrainedGroup(tuple(parameters), (0,)),))
    (folder / "meta.json").write_text(write_closing_record(replace(closing, **(told or {}))), encoding="utf-8")
    events = [
        Forward(*LINE, rows=2 if fed is None else len(fed), model=0, number=1),
        replace(Backward(*LINE, optimizers=(0,), forwards=(1,)), **(backward or {})),
        Step(*LINE, optimizer=0),
    ]
    (folder / "events.jsonl").write_text("".join(f"{write_event(event)}\n" for event in events), encoding="utf-8")
    sample = StepSample(
        final,
        before=torch.ones_like(final),
        stretches=torch.ones_like(final),
        weights=torch.ones_like(final) - 0.1,
        sizes=(4, 1),
        increments=((1, own),),
        forwards=((1, 0),),
        settings=({"lr": 0.1},),
        counted=1,
        led=True,
    )
    if fed is not None:
        torch.save([input_rows((fed,), {})], folder / "rows-1.pt")
    torch.save(replace(sample, **step), folder / "step-0-1.pt")
    torch.save(StoredGradients({0: final[:4].clone(), 1: final[4:].clone()}, {}, {}), folder / "gradients-0-1.pt")
    return RecordedRun(role, folder, 1.0)  # type: ignore[arg-type]


def together(runs: Sequence[RecordedRun]) -> RankedRun:
    return RankedRun("accumulated", runs[0].folder, 1.0, tuple(runs))
