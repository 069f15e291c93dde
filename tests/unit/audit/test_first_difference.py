"""Both runs of a loop traced in this process: where they differ first, and what a control gives every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from followed import following

from gaverify.audit.first_difference import Found, Walk
from gaverify.audit.recording.calls import BackwardCall
from gaverify.audit.recording.script_calls import (
    RESULT,
    PinnedArguments,
    PlacesOfPart,
    ScriptTrace,
    TracedCalls,
)
from gaverify.audit.script_trace import TraceComparison
from gaverify.audit.source_lines import assignment_of, deciding_line, is_kept
from gaverify.records.experiment import DifferenceKind, DifferingNumber
from gaverify.thresholds import COMPUTED_FLOAT32

N, COUNT = 12, 3
"""Rows of the full batch, and micro-batches."""
PARTS: list[PlacesOfPart] = [(N, tuple(range(at, at + N // COUNT))) for at in range(0, N, N // COUNT)]
ROWS = torch.randn(N, 5, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 1.5, N)[:, None]
WEIGHT = torch.randn(5, generator=torch.Generator().manual_seed(1)).requires_grad_()

Loss = Callable[[torch.Tensor, SimpleNamespace], torch.Tensor]
"""A loss of some rows, and of an object that the loop keeps."""


def train(loss: Loss, count: int, calls: Any, between: Callable[[], None] = lambda: None) -> torch.Tensor:
    WEIGHT.grad = None
    kept = SimpleNamespace(asked=0, scale=1.0, bank=torch.ones(5), average=[1.0], mean=torch.zeros(()))
    for part in ROWS.split(N // count):
        root = loss(part, kept) / count
        call = BackwardCall(roots=root, place=None)
        calls.note_loss(call)
        with calls.differentiate(call):
            root.backward()  # type: ignore[no-untyped-call]
        between()
    assert WEIGHT.grad is not None
    return WEIGHT.grad.clone()


def walk_of(loss: Loss, between: Callable[[], None] = lambda: None, *, after_passes: bool = False) -> Walk:
    traces: list[ScriptTrace] = []
    for count in (1, COUNT):
        with following(TracedCalls) as calls:
            train(loss, count, calls, between)
        traces.append(calls.trace)
    return Walk(TraceComparison(*traces, PARTS, COMPUTED_FLOAT32), after_passes=after_passes)


def found_in(loss: Loss, between: Callable[[], None] = lambda: None) -> Found:
    found = walk_of(loss, between).find()
    assert found is not None
    return found


def counted(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    kept.asked += 1
    return ((rows @ WEIGHT) * kept.asked).exp().mean()


def moved(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    kept.average[0] = 0.5 * kept.average[0] + 0.5 * rows.abs().mean().item()
    return (rows @ WEIGHT / kept.average[0]).tanh().mean()


def widest(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = (rows @ WEIGHT).tanh()
    largest = outputs.abs().max()
    return (outputs / largest).mean()


def centred(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = rows @ WEIGHT
    middle = outputs.mean()
    return (outputs - middle).square().mean()


def ordered(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    if not kept.asked:
        kept.bank = rows.abs().sum(0).argsort()  # once in both runs, of other rows
    kept.asked += 1
    return (rows[:, kept.bank] @ WEIGHT).tanh().mean()


def banked(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = rows @ WEIGHT + rows @ kept.bank
    kept.bank[1:].mul_(2.0)
    return outputs.exp().mean()


def decided(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = rows @ WEIGHT
    if outputs.mean() > 0.3:
        return outputs.sin().mean()
    return outputs.square().mean()


def skipped(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    kept.asked += 1
    outputs = rows @ WEIGHT
    if kept.asked == 2:
        return outputs.mean()
    return outputs.square().mean() + outputs.mean()


def larger(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = rows @ WEIGHT
    loss = max(outputs.mean(), -outputs.sin().mean())
    return loss * 2


def weights_of(rows: torch.Tensor) -> torch.Tensor:
    sizes = rows.norm(dim=1)
    return sizes / sizes.max()


def weighted(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    if not kept.asked:
        weights_of(ROWS)  # once for the whole batch
    kept.asked += 1
    return (weights_of(rows) * (rows @ WEIGHT).square()).mean()


def hooked(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = rows @ WEIGHT
    outputs.register_hook(lambda gradient: gradient / gradient.norm())
    return outputs.exp().mean()


def drifting(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = rows @ WEIGHT
    kept.mean = 0.9 * kept.mean + 0.1 * outputs.detach().mean()
    return (outputs - 5 * kept.mean).square().mean()


class Shrunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        largest = gradient.abs().max()
        return gradient / largest


def shrunk(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs: torch.Tensor = Shrunk.apply(rows @ WEIGHT)
    return outputs.exp().mean()


@pytest.mark.parametrize(
    ("loss", "kind", "source"),
    [
        (drifting, DifferenceKind.STATE, "kept.mean = 0.9 * kept.mean + 0.1 * outputs.detach().mean()"),
        (shrunk, DifferenceKind.BACKWARD, "largest = gradient.abs().max()"),
        (counted, DifferenceKind.VALUES, "return ((rows @ WEIGHT) * kept.asked).exp().mean()"),
        (moved, DifferenceKind.VALUES, "return (rows @ WEIGHT / kept.average[0]).tanh().mean()"),
        (widest, DifferenceKind.VALUES, "largest = outputs.abs().max()"),
        (centred, DifferenceKind.VALUES, "return (outputs - middle).square().mean()"),
        (banked, DifferenceKind.STATE, "kept.bank[1:].mul_(2.0)"),
        (decided, DifferenceKind.BRANCH, "if outputs.mean() > 0.3:"),
        (skipped, DifferenceKind.BRANCH, "if kept.asked == 2:"),
        (larger, DifferenceKind.BRANCH, "loss = max(outputs.mean(), -outputs.sin().mean())"),
        (weighted, DifferenceKind.VALUES, "return sizes / sizes.max()"),
        (hooked, DifferenceKind.BACKWARD, "outputs.register_hook(lambda gradient: gradient / gradient.norm())"),
    ],
)
def test_the_first_difference_is_found_by_its_line(loss: Loss, kind: DifferenceKind, source: str) -> None:
    difference = found_in(loss).difference
    assert (difference.kind, difference.operation.source) == (kind, source)


def test_a_number_is_told_with_what_holds_it_and_the_line_that_assigns_it() -> None:
    counter, average = found_in(counted).difference, found_in(moved).difference
    assert counter.number is not None and average.number is not None
    assert (counter.number.name, counter.number.micro_batches) == ("kept.asked", (1.0, 2.0, 3.0))
    assert counter.micro_batches == (1, 2) and [line.source for line in counter.assigned] == ["kept.asked += 1"]
    assert (counter.ratios[0], counter.ratios[2]) == pytest.approx((1, 3))
    (assigned,) = average.assigned
    assert average.number.name == "kept.average[0]" and assigned.source.startswith("kept.average[0] = 0.5")


def test_what_all_samples_share_is_told_as_what_the_line_reads() -> None:
    (source,) = found_in(centred).difference.sources
    assert source.source == "middle = outputs.mean()"


def limit() -> None:
    assert WEIGHT.grad is not None
    WEIGHT.grad.clamp_(-0.1, 0.1)


def right(rows: torch.Tensor, kept: SimpleNamespace) -> torch.Tensor:
    outputs = rows @ WEIGHT
    outputs.register_hook(lambda gradient: gradient * 0.5)
    if outputs.mean() > -100:
        kept.asked += 1
    return (outputs * kept.scale - outputs.detach()).exp().mean() + (rows @ kept.bank).mean()


def test_where_everything_agrees_only_changes_of_gradients_between_passes_are_left() -> None:
    assert walk_of(right).find() is None
    difference = found_in(right, limit).difference
    assert (difference.kind, difference.operation.source) == (
        DifferenceKind.BETWEEN_PASSES,
        "WEIGHT.grad.clamp_(-0.1, 0.1)",
    )


@pytest.mark.parametrize("loss", [counted, moved, widest, centred, decided, drifting, hooked, shrunk, larger, weighted])
def test_the_full_batch_s_value_at_the_first_difference_repairs_the_gradient(loss: Loss) -> None:
    walk = walk_of(loss)
    found = walk.find()
    assert found is not None
    pins = walk.pins_of(found)
    assert pins
    differed = list[bool]()
    with following(PinnedArguments, pins, PARTS, differed.append) as full:
        reference = train(loss, 1, full)
    assert not differed
    with following(PinnedArguments, pins, PARTS, differed.append) as calls:
        calls.take(full.kept)
        torch.testing.assert_close(train(loss, COUNT, calls), reference)
    assert any(differed)


def scale_in_place(factor: float) -> None:
    assert WEIGHT.grad is not None
    WEIGHT.grad.mul_(factor)


def assign_from_numpy(factor: float) -> None:
    assert WEIGHT.grad is not None
    WEIGHT.grad = torch.from_numpy(WEIGHT.grad.numpy() * factor)


def after_last_pass(edit: Callable[[float], None]) -> Walk:
    """The walk of a loop that edits its gradients by another number than the full batch's."""
    passes: list[int] = []

    def count_and_edit() -> None:
        passes.append(1)
        if len(passes) in (1, 1 + COUNT):  # the last pass of each run
            edit(1.0 / len(passes))

    return walk_of(right, count_and_edit, after_passes=True)


def test_places_that_both_runs_compute_once_can_be_compared() -> None:
    # it is asked of such places whether they are shared, which must not ask again whether they agree
    assert walk_of(ordered).find() is not None


@pytest.mark.parametrize("edit", [scale_in_place, assign_from_numpy])
def test_a_change_after_the_last_pass_is_told_and_its_number_is_replaced(edit: Callable[[float], None]) -> None:
    """A control that would replace all of the gradient is none."""
    walk = after_last_pass(edit)
    found = walk.find()
    assert found is not None and found.difference.kind is DifferenceKind.AFTER_PASSES
    pins = walk.pins_of(found)
    assert [(pin.number, pin.once) for pin in pins] == ([(0, 1)] if edit is scale_in_place else [])
    if pins:
        assert found.difference.operation.source == "WEIGHT.grad.mul_(factor)"
        assert found.difference.number == DifferingNumber("factor", 1.0, (0.25,))


def test_the_decision_that_is_replaced_is_the_number_that_the_condition_reads() -> None:
    walk = walk_of(decided)
    found = walk.find()
    assert found is not None
    (pin,) = walk.pins_of(found)
    assert (pin.name, pin.paths) == ("torch.Tensor.__bool__", (RESULT,))
    counter = walk_of(skipped)
    without_number = counter.find()
    assert without_number is not None
    assert not counter.pins_of(without_number), "no call of torch decides"


SOURCE = """
class Loss:
    average = 1.0

    def __call__(self, errors, scale):
        part = scale * 2
        if part > 1:
            errors = errors * 2
        if errors.mean() > 3:
            return errors
        self.average = 0.5 * self.average
        total = 0.0
        def inner():
            nonlocal total
            total = total + 1
            return errors / total
        return inner()
"""


def test_a_function_that_is_only_written_there_decides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("if fast:\n    def own(x):\n        if x:\n            return 1\nmodel(x)\n", encoding="utf-8")
    assert deciding_line((str(path), 5), []) is None


def test_lines_of_the_source_are_read(tmp_path: Path) -> None:
    path = tmp_path / "loss.py"
    path.write_text(SOURCE, encoding="utf-8")
    file = str(path)
    line = {text.strip(): at for at, text in enumerate(SOURCE.splitlines(), 1)}
    inside, behind = (file, line["errors = errors * 2"]), (file, line["return errors / total"])
    assert deciding_line(inside, []) == (file, line["if part > 1:"])
    ran = frozenset({(file, line["return errors"])}), frozenset({behind})
    assert deciding_line((file, line["return inner()"]), ran) == (file, line["if errors.mean() > 3:"])
    assert assignment_of("self.average", behind) == (file, line["self.average = 0.5 * self.average"])
    assert assignment_of("part", inside) == (file, line["part = scale * 2"])
    assert assignment_of("scale", inside) is None
    assert [is_kept(name, behind) for name in ("total", "self.average", "file")] == [True, True, True]
    assert [is_kept(name, inside) for name in ("part", "scale", "self.average")] == [False, False, True]
    assert deciding_line((str(tmp_path / "missing.py"), 3), []) is None
