"""Kernels that keep their draws to themselves: a stand-in for cuDNN's recurrent layers, and fused attention.

cuDNN's dropout between layers reads a buffer that was seeded once: no generator moves, and no mask comes out.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from drawing import recorded
from torch import nn

import gaverify
from gaverify import Outcome, Problem

SECRET = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _stand_in():
    """`standin::_cudnn_rnn` masks its input by a generator that nobody else knows of."""
    library = torch.library.Library("standin", "DEF")
    library.define(
        "_cudnn_rnn(Tensor x, float dropout, bool train) -> (Tensor, Tensor)", tags=torch.Tag.nondeterministic_seeded
    )

    def forward(x: torch.Tensor, dropout: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        keep = torch.rand(x.shape, generator=SECRET) >= (dropout if train else 0.0)
        mask = keep / (1 - dropout if train else 1.0)
        return x * mask, mask

    def setup(ctx, inputs, output) -> None:
        ctx.save_for_backward(output[1])

    def backward(ctx, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None

    library.impl("_cudnn_rnn", forward, "CPU")
    torch.library.register_autograd("standin::_cudnn_rnn", backward, setup_context=setup, lib=library)
    yield
    library._destroy()


def layer(x: torch.Tensor, dropout: float = 0.5, train: bool = True) -> torch.Tensor:
    return torch.ops.standin._cudnn_rnn(x, dropout, train)[0]


def test_hidden_draws_are_fused_whatever_the_generator_does() -> None:
    x = torch.randn(4, 3)
    assert recorded(lambda: layer(x)).fused == {"_cudnn_rnn"}
    assert recorded(lambda: layer(x, dropout=0.0)).fused == set()
    assert recorded(lambda: layer(x, train=False)).fused == set()


def problem(*, written_out: bool) -> Problem:
    """A model with the layer; where cuDNN is switched off it is written out, if it can be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](batch))
        visible = written_out and not torch.backends.cudnn.enabled
        return model[2](F.dropout(hidden, 0.5) if visible else layer(hidden)).square().mean()

    return Problem(model, loss, torch.randn(8, 6))


def test_recurrent_dropout_is_verified_on_unfused_kernels() -> None:
    verdict = gaverify.verify(problem(written_out=True), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert [finding.code for finding in verdict.findings if finding.severity == "fault"] == []


def test_hidden_draws_that_no_remedy_shows_are_named_as_that() -> None:
    verdict = gaverify.verify(problem(written_out=False), steps=4)
    assert verdict.outcome is not Outcome.EQUIVALENT
    codes = {finding.code for finding in verdict.findings if finding.severity == "fault"}
    assert "GAV302" in codes
    assert codes <= {"GAV302", "GAV403"}  # a generator that nobody can reach is hidden state as well
