"""Loops as text, with a record in which every call of them was made: what patches are proposed for."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from gaverify.patches import Context, Source
from gaverify.records.audit import Calls, Record
from gaverify.records.events import Backward, Clipping, Event, ScalerCall, SchedulerStep, Step, ZeroGrad
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.windows import Window

FILE = "/work/train.py"
KINDS: dict[str, Event] = {
    "backward(": Backward(1),
    "optimizer.step(": Step(1),
    "scaler.step(": Step(1),
    "zero_grad(": ZeroGrad(1),
    "clip_grad_norm_(": Clipping(1),
    "scheduler.step(": SchedulerStep(1),
    "unscale_(": ScalerCall(1, call="unscale_"),
    "scaler.update(": ScalerCall(1, call="update"),
}


def context_of(text: str) -> Context:
    """A record in which every call of the text was made in one window of 4 micro-batches."""
    events = [
        replace(event, file=FILE, line=number)
        for number, line in enumerate(text.splitlines(), 1)
        for word, event in KINDS.items()
        if word in line
    ]
    record = Record(Calls((Window(1, tuple(events)),), steps=4))
    return Context(FILE, record, {FILE: Source(text, hashlib.sha256(text.encode()).hexdigest())})


def finding_of(code: str, **values: object) -> Finding:
    evidence = (Evidence("events", "measured", "", values),)
    return Finding(code, "", "fault", "", Location(file=FILE, line=1), evidence, proven=True)


LOOP = """for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / accumulation_steps  # 'the mean'
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""
HEAD = "accumulation_steps = 4\n"
