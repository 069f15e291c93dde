"""Traces of two runs, held against each other call by call, and module by module.

What is heard of the float64 control is what a run of its own would show; where it does not run, nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import problems_coupling
import problems_weights
import pytest
import torch
from forwards import begun, forwards_of
from problems import fault_codes, story
from torch import nn

import gaverify
from gaverify import Problem, verify
from gaverify.passes.layouts import SampleDimension, SampleLayout
from gaverify.search import proof
from gaverify.search.bench import ControlFailed
from gaverify.search.trace.suspects import Dependence, Matching, SuspectFinder
from gaverify.search.trace.traces import (
    GroupedFingerprints,
    ModuleCall,
    OperationTrace,
    Result,
    TracedOperation,
    takes_other_branch,
)

# --- Matching, dependence and suspects on traces made by hand: two micro-batches of two samples each -----------------


AGREE = 1e-9
HALVES = [torch.tensor([0.5, 0.5], dtype=torch.float64)]
Described = tuple[str, tuple[int, ...], list[float], str]  # name, inputs, values, "rows" or "global"


def described(tensor: torch.Tensor, layout: SampleLayout, *, summed: bool = True) -> Result:
    """The result of an operation with its fingerprints."""
    result, fingerprints = Result(tuple(tensor.shape), True, layout, summed=summed), GroupedFingerprints()
    fingerprints.add(result, tensor, layout)
    fingerprints.read()
    return result


def trace(*steps: Described, inside: str | None = None) -> OperationTrace:
    """A trace of these operations, each on a line of its own; those named `inside` lie in a module "net"."""
    made = OperationTrace()
    made.calls.append(ModuleCall("net", "Net", False, ()))
    for line, (name, inputs, values, kind) in enumerate(steps):
        layout = SampleLayout((SampleDimension(0),)) if kind == "rows" else SampleLayout()
        numbers = torch.tensor(values, dtype=torch.float64)
        tensor = numbers[:, None] if kind == "rows" else numbers.sum()
        result = described(tensor, layout)
        call = 0 if name == inside else None
        frame = ("train.py", line)
        made.add(
            TracedOperation(name, call, (name, frame, 0), frame, inputs, True, False, len(inputs), (name, frame, None))
        )
        made.steps[-1].results.append(result)
        if call is not None:
            made.calls[0].outputs = (len(made.steps) - 1,)
    made.loss = len(made.steps) - 1
    return made


def matching(full: list[Described], first: list[Described], second: list[Described], **options: str) -> Matching:
    return Matching(trace(*full, **options), [trace(*first, **options), trace(*second, **options)], AGREE)


def dependence(matched: Matching) -> Dependence:
    return Dependence(matched, foreign=False, shares=HALVES, agree=AGREE)


def doubled(values: list[float]) -> list[Described]:
    """Every sample on its own: twice its value, and the mean of that."""
    twice = [2 * value for value in values]
    return [
        ("input", (), values, "rows"),
        ("mul", (0,), twice, "rows"),
        ("mean", (1,), [sum(twice) / len(twice)], "global"),
    ]


def centred(values: list[float]) -> list[Described]:
    """Every sample less the mean of the batch."""
    mean = sum(values) / len(values)
    away = [value - mean for value in values]
    return [
        ("input", (), values, "rows"),
        ("mean", (0,), [mean], "global"),
        ("sub", (0, 1), away, "rows"),
        ("sum", (2,), [sum(value**2 for value in away)], "global"),
    ]


def turned(values: list[float], *, combine: bool) -> list[Described]:
    """The samples in reverse order; added to themselves, or alone."""
    back = values[::-1]
    summed = [a + b**2 for a, b in zip(values, back, strict=True)] if combine else back
    return [
        ("input", (), values, "rows"),
        ("flip", (0,), back, "rows"),
        ("add", (0, 1), summed, "rows"),
        ("mean", (2,), [sum(summed) / len(summed)], "global"),
    ]


VALUES = [1.0, 2.0, 4.0, 8.0]


def test_samples_on_their_own_bring_no_difference_about() -> None:
    found = matching(doubled(VALUES), doubled(VALUES[:2]), doubled(VALUES[2:]))
    assert list(dependence(found).origins()) == []
    assert found.tainted == [False, False, True]  # a mean of other samples is another number, and no fault


def test_the_step_that_gives_the_mean_back_is_the_origin() -> None:
    found = matching(centred(VALUES), centred(VALUES[:2]), centred(VALUES[2:]), inside="sub")
    assert list(dependence(found).origins()) == [2]
    (suspect,) = SuspectFinder(found, dependence(found), 4).find_suspects(HALVES, AGREE, False)
    assert (suspect.kind, suspect.operation.name, suspect.culprit.name) == ("rows", "sub", "mean")
    assert (suspect.samples, suspect.in_model) == (4, True)


def test_the_same_step_outside_of_modules_lies_in_the_loss() -> None:
    found = matching(centred(VALUES), centred(VALUES[:2]), centred(VALUES[2:]))
    (suspect,) = SuspectFinder(found, dependence(found), 4).find_suspects(HALVES, AGREE, False)
    assert not suspect.in_model


def test_rows_in_another_order_are_the_same_rows() -> None:
    parts = [turned(VALUES[:2], combine=False), turned(VALUES[2:], combine=False)]
    found = matching(turned(VALUES, combine=False), *parts)
    assert found.permuted[1]
    assert list(dependence(found).origins()) == []


@pytest.mark.parametrize(("inside", "opened"), [("input", ()), ("flip", (0,))])
def test_what_combines_rows_in_another_order_is_the_origin(inside: str, opened: tuple[int, ...]) -> None:
    """A cached gradient cuts no module that hands the rows out in another order."""
    parts = [turned(VALUES[:2], combine=True), turned(VALUES[2:], combine=True)]
    found = matching(turned(VALUES, combine=True), *parts, inside=inside)
    assert found.permuted[:3] == [False, True, False]
    assert list(dependence(found).origins()) == [2]
    (suspect,) = SuspectFinder(found, dependence(found), 4).find_suspects(HALVES, AGREE, False)
    assert suspect.calls == opened


def test_one_changed_row_is_no_other_order() -> None:
    changed = turned([1.0, 2.0], combine=False)
    changed[1] = ("flip", (0,), [2.0, 1.0 + 1e-6], "rows")
    found = matching(turned(VALUES, combine=False), changed, turned(VALUES[2:], combine=False))
    assert not found.permuted[1]
    assert found.differs(1)


def test_a_product_of_means_is_no_sum_over_samples() -> None:
    def product(values: list[float]) -> list[Described]:
        mean = sum(values) / len(values)
        return [("input", (), values, "rows"), ("mean", (0,), [mean], "global"), ("mul", (1,), [mean**2], "global")]

    found = matching(product(VALUES), product(VALUES[:2]), product(VALUES[2:]))
    assert found.additive(1, HALVES) < AGREE < found.additive(2, HALVES)
    (suspect,) = SuspectFinder(found, dependence(found), 4).find_suspects(HALVES, AGREE, False)
    assert (suspect.kind, suspect.operation.name) == ("non-additive", "mul")


def test_operations_that_not_all_traces_hold_are_strays() -> None:
    longer = [*doubled(VALUES[2:])[:2], ("relu", (1,), [8.0, 16.0], "rows"), ("mean", (2,), [12.0], "global")]
    found = matching(doubled(VALUES), doubled(VALUES[:2]), longer)  # type: ignore[arg-type]
    assert [found.is_matched(index) for index in range(3)] == [True, True, False]


def test_moments_add_up_whatever_the_order() -> None:
    torch.manual_seed(0)
    rows, layout = torch.randn(12, 5, dtype=torch.float64), SampleLayout((SampleDimension(0, 3),))
    order = torch.randperm(12)
    whole, parts = described(rows, layout).moments, [described(part, layout).moments for part in rows[order].split(6)]
    torch.testing.assert_close(sum(parts), whole)
    rows[3, 2] += 1e-3
    assert not torch.allclose(described(rows, layout).moments, whole, rtol=1e-9)


@pytest.mark.parametrize("mask", [-torch.inf, -1e9, torch.finfo(torch.float64).min])
def test_a_mask_hides_no_difference_beside_it(mask: float) -> None:
    layout = SampleLayout((SampleDimension(0),))
    rows = torch.tensor([[0.5, mask], [0.25, mask]], dtype=torch.float64)
    other = torch.tensor([[0.5, mask], [0.25 + 1e-4, mask]], dtype=torch.float64)
    one, two = described(rows, layout).prints, described(other, layout).prints
    assert one is not None and two is not None and torch.isfinite(one).all()
    assert float((one - two).abs().max() / one.abs().max()) > AGREE


def test_what_is_large_is_squashed_whatever_lies_beside_it() -> None:
    layout = SampleLayout((SampleDimension(0),))

    def prints(*rows: tuple[float, ...]) -> torch.Tensor:
        found = described(torch.tensor(rows, dtype=torch.float64), layout).prints
        assert found is not None
        return found[0]

    small, large = prints((2e3, 0.5), (0.5, 0.5)), prints((2e3, 0.5), (0.5, 1e9))
    torch.testing.assert_close(small[0], large[0])
    assert not torch.allclose(small[0], prints((4e3, 0.5), (0.5, 0.5))[0], rtol=1e-3)


def test_what_no_operation_made_has_no_moments() -> None:
    layout, rows = SampleLayout((SampleDimension(0),)), torch.randn(4, 3, dtype=torch.float64)
    results = [described(rows, layout, summed=summed) for summed in (True, False)]
    assert results[0].moments is not None and results[1].moments is None


def _tokens(first: torch.Tensor, kept: torch.Tensor) -> OperationTrace:
    """Two tokens per sample, the samples outermost: what comes in, and which of them a queue keeps."""
    made = OperationTrace()
    for name, tensor in (("input", first), ("lt", kept)):
        layout = SampleLayout((SampleDimension(0, 2),))
        result = described(tensor, layout, summed=False)
        inputs = (0,) if name == "lt" else ()
        made.add(
            TracedOperation(
                name, None, (name, ("moe.py", 7), 0), ("moe.py", 7), inputs, True, False, 1, (name, None, None)
            )
        )
        made.steps[-1].results.append(result)
    return made


def test_what_differs_is_read_in_the_order_in_which_the_steps_before_it_agreed() -> None:
    tokens = torch.arange(8.0, dtype=torch.float64)[:, None]
    kept = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0], dtype=torch.float64)[:, None]
    everything = torch.ones(4, 1, dtype=torch.float64)
    full, parts = _tokens(tokens, kept), [_tokens(tokens[:4], everything), _tokens(tokens[4:], everything)]
    found = Matching(full, parts, AGREE)
    assert found.order == {0: 0, 1: 0}
    assert found.rows[1] is not None and found.rows[1][1] == 2, "samples 2 and 3 lose tokens"


def read_and_maybe_halved(reading: str, halved: bool) -> OperationTrace:
    """A loss that a number of which is read, and which is halved on a further line or not."""
    steps = [
        ("input", (), [1.0, 2.0], "rows"),
        ("mean", (0,), [1.5], "global"),
        (reading, (1,), [1.5], "global"),
        ("mul", (1,), [0.75], "global"),
    ]
    made = trace(*steps[: 4 if halved else 3])
    made.loss = 3 if halved else 1
    return made


def test_a_branch_that_falls_otherwise_is_another_way() -> None:
    read = "_local_scalar_dense"
    assert takes_other_branch(read_and_maybe_halved(read, False), read_and_maybe_halved(read, True))
    assert takes_other_branch(read_and_maybe_halved(read, True), read_and_maybe_halved(read, False))
    assert not takes_other_branch(read_and_maybe_halved(read, True), read_and_maybe_halved(read, True))
    assert not takes_other_branch(read_and_maybe_halved("neg", False), read_and_maybe_halved("neg", True)), (
        "nothing read"
    )


def test_a_loop_over_more_samples_goes_the_same_way() -> None:
    full, part = (read_and_maybe_halved("_local_scalar_dense", True) for _ in range(2))
    full.add(replace(full.steps[3], inputs=(3,)))
    full.loss = 4
    assert not takes_other_branch(full, part)


# --- How far each module's outputs are apart between the full batch and the micro-batches ----------------------------


def differences(model: nn.Module, **options: object) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
    problem = Problem(model, lambda net, batch: nn.functional.mse_loss(net(batch[0]), batch[1]), (inputs, targets))
    verdict = verify(problem, steps=4, **options)  # type: ignore[arg-type]
    return {module.module: module.difference for module in verdict.modules}


def net(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), middle, nn.ReLU(), nn.Linear(5, 1))


def test_values_part_at_the_batch_norm_and_stay_apart() -> None:
    found = differences(net(nn.BatchNorm1d(5)))
    assert list(found) == ["0", "1", "2", "3"]
    assert found["0"] == 0 and min(found["1"], found["2"], found["3"]) > 1e-3


def test_forwards_that_agree_differ_nowhere() -> None:
    model = net(nn.Identity())
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    found = differences(model)
    assert found and set(found.values()) == {0.0}


def test_no_search_no_modules() -> None:
    assert differences(net(nn.LayerNorm(5))) == {}
    assert differences(net(nn.BatchNorm1d(5)), diagnose=False) == {}


def test_state_that_only_micro_batches_change_is_heard() -> None:
    """A watch of the full batch alone would not see it."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.layer(x) * self.scale
            if len(x) < 16:
                self.scale = self.scale + 1.0
            return result

    torch.manual_seed(0)
    problem = Problem(Late(), lambda model, x: model(x).square().mean(), torch.randn(16, 6))
    verdict = gaverify.verify(problem, steps=4)
    assert fault_codes(verdict) == {"GAV401"}
    (finding,) = [finding for finding in verdict.findings if finding.code == "GAV401"]
    assert "scale" in finding.summary


def test_statistics_that_are_only_kept_for_evaluation_are_no_state_that_is_tried() -> None:
    verdict, told = begun(problems_coupling.batch_norm(), steps=4)
    assert fault_codes(verdict) == {"GAV101"}
    assert not any("restored" in what or "pinned" in what for what in told), told


@pytest.mark.parametrize("exact", [True, False])
def test_a_diagnosis_reads_the_sketches_of_the_runs_that_decided(exact: bool) -> None:
    """Only a divergence is searched; its micro-batches run in float64 once, and once more with the weights that fit."""
    verdict, forwards = forwards_of(problems_weights.mean_loss(), steps=4, weighting="none", exact=exact)
    assert fault_codes(verdict) == {"GAV201"}
    samples = [samples for dtype, samples in forwards if dtype == "float64"]
    assert samples[:10] == [16, 4, 4, 4, 4, 4, 4, 4, 4, 16]
    verdict, forwards = forwards_of(problems_weights.mean_loss(), steps=4, exact=exact)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT and len(forwards) == (10 if exact else 5)


def test_statistics_that_are_read_are_state() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            moved = self.layer(x - self.norm.running_mean)
            self.norm(x)
            return moved

    torch.manual_seed(0)
    problem = Problem(Reading(), lambda model, x: model(x).square().mean(), torch.randn(16, 6))
    verdict = gaverify.verify(problem, steps=4)
    assert fault_codes(verdict) == {"GAV401"}


@dataclass(frozen=True)
class _Cut:
    """What of an experiment says how a batch is cut and weighted."""

    sizes: tuple[int, ...]
    weighting: object

    @property
    def steps(self) -> int:
        return len(self.sizes)


@pytest.mark.parametrize(
    ("weighting", "merged"),
    [
        ("uniform", [2 / 5, 3 / 5]),
        ("samples", "samples"),
        ("tokens", "tokens"),
        ([1.0] * 5, [1.0, 1.0]),
        ([0.1, 0.2, 0.3, 0.3, 0.1], [0.3, 0.7]),
    ],
)
def test_neighbouring_micro_batches_are_merged_with_their_weights(weighting: object, merged: object) -> None:
    cut: Any = proof._merge_micro_batches(_Cut((3, 3, 3, 3, 1), weighting), 2)  # type: ignore[arg-type]
    assert cut.sizes == (6, 7)
    assert cut.weighting == (merged if isinstance(merged, str) else pytest.approx(merged))


def test_micro_batches_that_a_function_weights_are_not_merged() -> None:
    with pytest.raises(ControlFailed, match="not known"):
        proof._merge_micro_batches(_Cut((3, 3, 3, 3), len), 2)  # type: ignore[arg-type]


class _Replaces(nn.Module):
    """Replaces an attribute in each forward, and writes to tensors that may lie where the replaced one lay."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.memory = torch.ones(3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(rows) * self.memory.mean()
        self.memory = self.memory * 0.9
        for scratch in [torch.empty(3) for _ in range(400)]:
            scratch.fill_(0.5)
        return outputs


def test_a_tensor_at_the_address_of_replaced_state_is_another() -> None:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    verdict = verify(_Replaces(), lambda model, rows: model(rows).square().mean(), batch, steps=4)
    (finding,) = verdict.findings
    assert finding.code == "GAV403", story(verdict)
    assert "`memory` is written by `assignment`" in finding.evidence[0].statement
