"""What a control pins, which control of a suspect counts, and what is a normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from forwards import experiment_of
from problems import Net, cross_entropy

import gaverify
from gaverify.passes.experiment import Experiment
from gaverify.search.bench import ControlFailed, take_rows
from gaverify.search.neutral import PinnedOutputs, PinnedResults
from gaverify.search.trace.first_divergence import per_channel_affine

# --- Which rows of a full-batch value a micro-batch is given ---------------------------------------------------------


@pytest.mark.parametrize(("order", "expected"), [(0, [0.0, 0, 0, 1]), (1, [0.0, 0, 1, 1])])
def test_a_known_order_decides_and_not_the_nearer_values(order: int, expected: list[float]) -> None:
    whole = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 1], device="cpu")
    for own in (0.0, 1.0):
        part = torch.full((4,), own, device="cpu")
        assert take_rows(whole, part, 0, 2, 4, order=order).tolist() == expected


# A call that writes in place is held constant in the tensor that it wrote to, since other code may hold that tensor.


def halves(**modules: torch.nn.Module) -> Experiment:
    """An experiment with two micro-batches of two samples."""
    return experiment_of(torch.nn.ModuleDict(modules))


def held(run: Any, *names: str) -> list[torch.Tensor]:
    """What `run(samples)` returns for the full batch and for both micro-batches, with these calls held."""
    samples = torch.arange(8.0, device="cpu").reshape(4, 2).requires_grad_()
    first = run.__code__.co_firstlineno
    places = [(name, (__file__, line), 0) for name in names for line in range(first, first + 6)]
    probe = PinnedResults(halves(), places)
    found = []
    for k, part in ((None, samples), (0, samples[:2]), (1, samples[2:])):
        with probe.around(k):
            found.append(run(part))
    return found


def test_a_sum_that_is_written_in_place_is_the_full_batch_everywhere() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(2)
        total.index_add_(0, torch.zeros(len(x), dtype=torch.long, device="cpu"), x.sum(1))
        return total

    for total in held(run, "index_add_"):
        assert total.tolist() == [28.0, 0.0] and not total.requires_grad


def test_nothing_trained_is_overwritten() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cpu"))

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(2.0)
        return x * weight

    with pytest.raises(ControlFailed, match="trained or shared memory"):
        held(run, "mul_")
    assert weight.requires_grad


def test_outputs_that_are_held_are_rows_of_the_full_batch_and_others_live() -> None:
    samples = torch.arange(8.0, device="cpu").reshape(4, 2).requires_grad_()
    # samples without their mean, and their own sums beside them
    module = Net(lambda _, x: (x - x.mean(0), x.sum(1)))
    probe = PinnedOutputs(halves(layer=module), "layer", positions=(0,))
    whole = (samples - samples.mean(0)).detach()
    for k, part in ((None, slice(0, 4)), (0, slice(0, 2)), (1, slice(2, 4))):
        with probe.around(k):
            held, live = module(samples[part])
        assert torch.equal(held, whole[part]) and not held.requires_grad
        assert torch.equal(live, samples[part].sum(1)) and live.requires_grad
    with probe.around(1), pytest.raises(ControlFailed, match="more often than the full batch"):
        module(samples[:2])
        module(samples[:2])


@pytest.mark.parametrize("counted", [2, 3])
def test_inputs_get_the_full_batch_s_gradients_without_padding_that_none_came_back_to(counted: int) -> None:
    full = torch.arange(12.0, device="cpu").reshape(4, 3).requires_grad_()
    part = full[:2, :2].detach().clone().requires_grad_()
    module = Net(lambda _, rows: rows[:, :counted].sum(1))  # the other entries are padding
    probe = PinnedOutputs(halves(layer=module), "layer", with_gradients=True)
    with probe.around(None):
        module(full).square().sum().backward()
    with probe.around(0):
        total = module(part).sum()
    if counted == 2:
        total.backward()
        assert full.grad is not None and torch.equal(cast(torch.Tensor, part.grad), full.grad[:2, :2])
    else:
        with pytest.raises(ControlFailed, match="padded to another length"):
            total.backward()


# --- Whether a module scales its channels; by slopes that really differ, not by what rounding makes of equal ones ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("slopes", "is_normalisation"),
    [((0.5, 1.0, 2.0), True), ((1.0, 1.0, 1.0), False), ((0.3, 0.3, 0.3), False), ((1.0, 1.0, 1.01), True)],
)
def test_slopes_of_the_channels(dtype: torch.dtype, slopes: tuple[float, ...], is_normalisation: bool) -> None:
    for seed in range(20):  # rounding differs from draw to draw
        generator = torch.Generator().manual_seed(seed)
        before = torch.randn(16, 3, generator=generator, dtype=dtype)
        shift = torch.randn(3, generator=generator, dtype=dtype)
        after = (before - shift) / 7 * 7 * torch.tensor(slopes, dtype=dtype) + shift
        assert per_channel_affine(before, after) is is_normalisation


def test_other_functions_of_the_input() -> None:
    before = torch.randn(16, 3)
    assert not per_channel_affine(before, before.square())
    assert not per_channel_affine(before, before[:8])


def by_hand(h: torch.Tensor) -> torch.Tensor:
    mean = h.mean(0)
    return (h - mean) / ((h - mean) ** 2).mean(0).add(1e-5).sqrt()


def mixed(h: torch.Tensor) -> torch.Tensor:
    """Switchable normalisation: statistics of the batch and of the sample, averaged."""
    mean = (h.mean(0) + h.mean(1, keepdim=True)) / 2
    return (h - mean) / (h.var(0) + h.var(1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("mix", "code"),
    [
        (by_hand, "GAV101"),
        (mixed, "GAV101"),
        (lambda h: h * torch.sigmoid(h.mean(0)), "GAV102"),
        (lambda h: h - h.mean(0), "GAV102"),
        (lambda h: h + 0.5 * h.mean(0), "GAV102"),
        (lambda h: h / h.sum(0), "GAV102"),
        (lambda h: torch.softmax(h, 0), "GAV102"),
        (lambda h: h + torch.mean(input=h, dim=0), "GAV102"),
    ],
)
def test_a_norm_is_one_wherever_it_is_written(mix: Callable[[torch.Tensor], torch.Tensor], code: str) -> None:
    torch.manual_seed(0)
    parts = {"first": torch.nn.Linear(6, 8), "last": torch.nn.Linear(8, 4)}
    model = Net(lambda net, x: net.last(torch.relu(mix(net.first(x)))), **parts)
    verdict = gaverify.verify(model, cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))), steps=4)
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [(code, True)]


# --- State that holds itself -----------------------------------------------------------------------------------------


def count_forwards(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    net.kept.append(torch.tensor(net.calls))
    return net.layer(x) * net.calls


def test_state_that_holds_itself_is_told_apart_by_the_tensors_in_it() -> None:
    torch.manual_seed(0)
    ring: list[Any] = []
    ring.append(ring)
    model = Net(count_forwards, layer=torch.nn.Linear(4, 1), calls=0, kept=ring)
    verdict = gaverify.verify(model, lambda model, x: model(x).square().mean(), torch.randn(8, 4))
    assert [(finding.code, finding.proven) for finding in verdict.findings] == [("GAV403", True)], str(verdict)
