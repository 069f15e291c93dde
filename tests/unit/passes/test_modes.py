"""Models whose classes use a name of `nn.Module` for something else, and models with layers in different modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import story
from torch import nn

import gaverify
from gaverify import Outcome, ProblemError
from gaverify.report import render


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)).relu())


def train_weights(self: nn.Module, *_: Any, **__: Any) -> None:
    with torch.no_grad():
        for parameter in self.parameters():
            parameter.add_(1)


def freezes(self: Net, mode: bool = True) -> Net:
    nn.Module.train(self, mode)
    self.norm.eval()
    return self


def model_with(**methods: Any) -> nn.Module:
    torch.manual_seed(0)
    return type("Changed", (Net,), methods)()  # type: ignore[no-any-return]


def verify(model: nn.Module, **options: Any) -> gaverify.Verdict:
    torch.manual_seed(1)
    batch = torch.randn(16, 6), torch.randint(4, (16,))
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    try:
        return gaverify.verify(model, nn.CrossEntropyLoss(), batch, **options)
    finally:
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before), "the user's weights were changed"
        assert modes == [module.training for module in model.modules()]


@pytest.mark.parametrize(
    "train",
    [
        lambda self, epochs=1: train_weights(self),
        lambda self, loader: train_weights(self),
        lambda self: train_weights(self),
        lambda self, trainer=None, **options: train_weights(self),
        lambda self, verbose=True: train_weights(self),
        3,
        property(lambda self: self),
    ],
)
@pytest.mark.parametrize(("mode", "outcome"), [("auto", Outcome.DIVERGENT), ("eval", Outcome.EQUIVALENT)])
def test_a_method_that_trains_is_not_run(train: Any, mode: str, outcome: Outcome) -> None:
    verdict = verify(model_with(train=train), mode=mode, diagnose=False)
    assert verdict.outcome is outcome, story(verdict)


def freezes_all_it_gets(self: Net, *arguments: Any) -> Net:
    return freezes(self, *arguments)


def freezes_by_a_flag(self: Net, learn: bool = True) -> None:
    nn.Module.train(self, learn)
    self.norm.train(False)


@pytest.mark.parametrize("train", [freezes, freezes_all_it_gets, freezes_by_a_flag])
def test_a_method_that_switches_the_mode_is_run(train: Callable[..., Any]) -> None:
    verdict = verify(model_with(train=train), mode="train")
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert (verdict.run.mode, verdict.run.in_evaluation) == ("train", ("1 BatchNorm1d",))


def test_a_method_of_the_instance_that_keeps_a_layer_frozen_is_run() -> None:
    net = Net()
    net.norm.eval()
    net.norm.train = lambda self, mode=True: self  # type: ignore[assignment, misc]
    assert verify(net, mode="train").outcome is Outcome.EQUIVALENT


def test_weights_that_the_switch_itself_merges_are_put_back() -> None:
    def merges(self: Net, mode: bool = True) -> Net:
        if self.training and not mode:
            self.head.weight.data += 1
        return nn.Module.train(self, mode)  # type: ignore[return-value]

    assert verify(model_with(train=merges), mode="eval").outcome is Outcome.EQUIVALENT


def test_a_switch_that_raises_is_told() -> None:
    def refuses(self: Net, mode: bool = True) -> Net:
        raise RuntimeError("frozen for ever")

    with pytest.raises(ProblemError, match=r"`train\(True\)` of the model's class Changed raised RuntimeError: frozen"):
        verify(model_with(train=refuses))


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "buffers", "modules", "named_modules", "children"])
def test_another_method_by_the_name_of_a_list_is_told(name: str) -> None:
    for other in (lambda self, group: [], 3):
        model, batch = nn.Sequential(Net()), (torch.randn(16, 6), torch.randint(4, (16,)))
        model[0].__class__ = type("Changed", (Net,), {name: other})
        with pytest.raises(ProblemError, match=f"`{name}` of the model's class Changed does not list"):
            gaverify.verify(model, nn.CrossEntropyLoss(), batch)


def test_layers_in_different_modes_stay_so_and_are_told() -> None:
    model = nn.Sequential(Net(), nn.Linear(4, 4))
    model[0].norm.eval()
    verdict, everywhere = verify(model), verify(model, mode="train")
    assert (verdict.outcome, everywhere.outcome) == (Outcome.EQUIVALENT, Outcome.DIVERGENT)
    assert (verdict.run.mode, verdict.run.in_evaluation) == ("as is", ("1 BatchNorm1d",))
    advice = "1 BatchNorm1d kept in eval mode; `--mode train` tests a loop that calls `model.train()`"
    assert advice in " ".join(render([verdict], "text").split())
    assert (everywhere.run.mode, everywhere.run.in_evaluation) == ("train", ())


def test_a_linear_layer_in_another_mode_is_not_worth_a_word_and_one_all_in_evaluation_is_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    model[0].eval()
    run = verify(model).run
    assert (run.mode, run.in_evaluation) == ("train", ())
    assert verify(Net().eval()).outcome is Outcome.DIVERGENT
