"""Makes problems that tell from outside what a verification does: which forwards it runs, and what it begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import gaverify
from gaverify import Problem, Verdict
from gaverify.passes.experiment import Experiment, Placement
from gaverify.passes.isolation import ModelState


def make_large(model: nn.Module) -> nn.Module:
    """Gives a model so many parameters, which nothing uses, that its first samples are looked at alone."""
    model.register_parameter("unused", nn.Parameter(torch.zeros(1 << 16)))
    return model


def experiment_of(model: nn.Module, *, sizes: tuple[int, ...] = (2, 2), **changes: Any) -> Experiment:
    """An experiment on the CPU with these micro-batches of ones."""
    values: dict[str, Any] = {
        "problem": Problem(model, lambda model, batch: model(batch).mean(), torch.ones(sum(sizes), 2)),
        "parameters": dict(model.named_parameters()),
        "modules": list(model.modules()),
        "state": ModelState([model]),
        "batch_size": sum(sizes),
        "sizes": sizes,
        "placement": Placement((torch.device("cpu"),)),
    }
    return Experiment(**values | changes)


def begun(problem: Problem, **options: Any) -> tuple[Verdict, list[str]]:
    """The verdict, and what the verification said that it begins."""
    told: list[str] = []
    return gaverify.verify(problem, progress=lambda what, *_: told.append(what), **options), told


@contextmanager
def noting_forwards(problem: Problem) -> Iterator[tuple[Problem, Path]]:
    """The problem with a loss that writes a line per forward to a file: the loss itself keeps nothing."""
    with TemporaryDirectory() as folder:
        notes = os.open(path := Path(folder, "forwards"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        inner = problem.loss

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            result = inner(model, batch)
            os.write(notes, f"{result.dtype} {len(batch[0] if isinstance(batch, tuple) else batch)}\n".encode())
            return result

        try:
            yield replace(problem, loss=loss), path
        finally:
            os.close(notes)


def forwards_of(problem: Problem, **options: Any) -> tuple[Verdict, list[tuple[str, int]]]:
    """The verdict, and of each forward the dtype of its loss and its number of samples."""
    with noting_forwards(problem) as (noted, path):
        verdict = gaverify.verify(noted, **options)
        lines = [line.split() for line in path.read_text().splitlines()]
        return verdict, [(dtype.removeprefix("torch."), int(samples)) for dtype, samples in lines]
