"""Runs jobs in fresh processes, behind keepers, and brings back what they returned: what a fork does for a CPU.

A fresh process imports torch and builds the model again, which takes seconds; no accelerator can be used after a fork.
A job and all that belongs to it are pickled into a file, so that it names what it calls, and what it takes is data.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gaverify.children import given, private_stdout, working_folder
from gaverify.errors import ProblemError
from gaverify.passes.devices import select_device
from gaverify.ranks.collecting import Child, Job, collected, outcome

_FRESH = "where there is an accelerator, ranks are fresh processes"
_ADVICE = (
    "define what they are made of at the top level of a module that can be imported, or run `gaverify run --ranks R "
    "--model package.module:factory`, which every process loads for itself, or hide the accelerator "
    "(CUDA_VISIBLE_DEVICES=) and write device='cpu'"
)
_places: dict[str, str] = {}
"""In a fresh process: the device of whoever started it, and its own."""


def run_fresh(
    jobs: Sequence[Job],
    there: torch.device,
    devices: Sequence[torch.device],
    timeout: float | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Runs each job in a fresh process, all at the same time, and returns their results in order.

    Args:
        jobs: What to run; everything in them must be picklable.
        there: Where the tensors of the jobs lie.
        devices: Where each job shall find them.
        timeout: Seconds after which all are ended, their start included; None waits for ever.
        waiting: Called every few hundredths of a second.

    Raises:
        GaverifyError: As `collected` raises it. All processes are ended first.
        ProblemError: A job cannot be pickled.
    """
    with working_folder("gaverify-ranks-") as folder:
        file = folder / "jobs.pt"
        saved([call for _, call in jobs], file)
        asked = {"file": str(file), "there": str(there)}
        starting = (
            _start(name, {**asked, "number": number, "device": str(device)})
            for number, ((name, _), device) in enumerate(zip(jobs, devices, strict=True))
        )
        return collected(starting, timeout, waiting)


def saved(value: Any, file: Path) -> None:
    """Writes what a fresh process shall load.

    Raises:
        ProblemError: A part of it cannot be pickled.
    """
    try:
        torch.save(value, file)
    except Exception as error:  # `__reduce__` of the user's classes may raise anything
        raise ProblemError(f"{_FRESH}, to which model, loss and batch cannot be handed: {error}; {_ADVICE}") from error


def loaded(file: Path) -> Any:
    """Returns, in a fresh process, what was `saved` for it, on its own device.

    Raises:
        ProblemError: A class or function in it cannot be found here.
    """
    try:
        return torch.load(file, map_location=_places, weights_only=False)
    except (AttributeError, ImportError) as error:
        raise ProblemError(f"{_FRESH}, in which one thing is missing: {error}; {_ADVICE}") from error


def _start(name: str, asked: dict[str, Any]) -> Child:
    kept = given("gaverify.ranks.fresh", asked)
    assert kept.process.stdout is not None
    return Child(name, kept.process.stdout.fileno(), kept)


def main() -> None:
    """Runs the job that stdin names, and writes its outcome to stdout."""
    asked = json.load(sys.stdin)
    with os.fdopen(private_stdout(), "wb") as pipe:
        pickle.dump(outcome(lambda: _done(**asked)), pipe)
    sys.stderr.flush()
    os._exit(0)  # what was started in this process, such as a process group after a failure, is not waited for


def _done(file: str, number: int, there: str, device: str) -> Any:
    torch.set_num_threads(1)  # as launchers set it: the ranks share the processor
    select_device(torch.device(device))
    _places[there] = device
    return loaded(Path(file))[number]()
