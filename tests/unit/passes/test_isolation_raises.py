"""Nothing stays changed when something raises in the middle, wherever that is: in a pass, a probe or a control run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import cross_entropy
from problems_busy import differences, picture_of_model, picture_of_world, prepared_problem
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gaverify
from gaverify import ProblemError
from gaverify.passes.isolation import ModelState

Prepared = tuple[nn.Module, Callable[..., torch.Tensor], Any, Callable[[], Any]]


class Interrupts(TorchDispatchMode):
    """Counts operations, gaverify's own included, and raises at the n-th; not where a state is being put back."""

    def __init__(self, position: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.count, self.raised, self._position, self._error, self._paused = 0, False, position, error, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused:
            self.count += 1
            if self.count == self._position:
                self.raised = True
                raise self._error("in the middle")
        return func(*args, **(kwargs or {}))


def _verified(monkeypatch: pytest.MonkeyPatch, mode: Interrupts, prepared: Prepared, options: dict[str, Any]) -> None:
    restore = ModelState.restore

    def uninterrupted(state: ModelState) -> None:
        with mode.paused():
            restore(state)

    monkeypatch.setattr(ModelState, "restore", uninterrupted)
    try:
        with mode:
            gaverify.verify(*prepared[:3], **{"steps": 3, **options})
    except (KeyboardInterrupt, RuntimeError, ProblemError) as error:
        assert mode.raised and "in the middle" in str(error)
    finally:
        monkeypatch.undo()


def normalised() -> Prepared:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
    model[0].weight.grad = torch.ones(8, 6)
    return model, cross_entropy, (torch.randn(12, 6), torch.randint(4, (12,))), tuple


def contrasted() -> Prepared:
    torch.manual_seed(0)
    model, seen = nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(6, 5)}), []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(len(batch[0]))
        similarity = F.normalize(model["a"](batch[0])) @ F.normalize(model["b"](batch[1])).T
        return F.cross_entropy(similarity / 0.1, torch.arange(len(similarity)))

    return model, loss, (torch.randn(12, 6), torch.randn(12, 6)), lambda: list(seen)


CASES: dict[str, tuple[Callable[[], Prepared], dict[str, Any]]] = {
    "busy": (prepared_problem, {}),
    "busy in bfloat16, traced": (prepared_problem, {"dtype": "bfloat16", "trace": True}),
    "statistics": (normalised, {}),
    "negatives": (contrasted, {}),
    "negatives, weights": (contrasted, {"weighting": "none", "mode": "eval"}),
    "noise floor": (normalised, {"dtype": "float64"}),
}


def _check(monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException], shares: list[float]) -> None:
    build, options = CASES[name]
    whole = Interrupts()
    _verified(monkeypatch, whole, build(), options)
    assert whole.count > 1000, "this verification diagnoses nothing"
    for share in shares:
        prepared = build()
        model, counters = prepared[0], prepared[3]
        before, world, counted = picture_of_model(model), picture_of_world(), counters()
        mode = Interrupts(max(1, int(share * whole.count)), error)
        _verified(monkeypatch, mode, prepared, options)
        assert mode.raised, share
        where = f"after operation {mode.count} of {whole.count}"
        assert differences(before, picture_of_model(model)) == [], where
        assert differences(world, picture_of_world()) == [], where
        assert counters() == counted, where


ERRORS = [KeyboardInterrupt, RuntimeError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_it_was(monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]) -> None:
    """Ctrl-C comes through everything; an error in a probe ends that probe alone, and the verdict goes on."""
    golden = [0.0, *((0.6180339887 * number) % 0.98 for number in range(1, 7))]
    _check(monkeypatch, name, error, golden)


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_it_was_at_many_points(
    monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    _check(monkeypatch, name, error, [number / 101 for number in range(100)])
