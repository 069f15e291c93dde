"""A thousand verifications in one process leave memory, files, hooks and generators as they were."""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from problems import classified, story
from torch import nn

import gaverify
from gaverify import Outcome, Problem

WARM, RUNS = 200, 1000
_LEAK = 16 << 20  # bytes; a leak of one gradient of the model below would come to 64 MB over all runs


def problem() -> Problem:
    """A model whose every gradient has 64 kB, with dropout, so that draws are recorded and dealt out as well."""
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.2), nn.ReLU(), nn.Linear(128, 4)), 128, size=8)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def hooks(model: nn.Module) -> int:
    """How many hooks hang on the model, its parameters, and on all modules."""
    own = [module._forward_hooks for module in model.modules()] + [m._forward_pre_hooks for m in model.modules()]
    globally = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    return sum(map(len, own + globally)) + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_thousand_verifications_leave_nothing() -> None:
    subject = problem()
    states = torch.get_rng_state(), random.getstate()
    before = hooks(subject.model), len(os.listdir("/proc/self/fd")), sys.gettrace(), torch.get_default_dtype()
    weights = [parameter.detach().clone() for parameter in subject.model.parameters()]
    sizes = []
    for run in range(RUNS):
        verdict = gaverify.verify(subject, steps=4, exact=run % 10 == 0)
        assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
        if run in (WARM, RUNS - 1):
            gc.collect()
            sizes.append((resident(), len(gc.get_objects())))
    assert sizes[1][0] - sizes[0][0] < _LEAK
    assert sizes[1][1] - sizes[0][1] < RUNS - WARM, "less than an object for each run"
    after = hooks(subject.model), len(os.listdir("/proc/self/fd")), sys.gettrace(), torch.get_default_dtype()
    assert after == before
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert all(torch.equal(old, new) for old, new in zip(weights, subject.model.parameters(), strict=True))
