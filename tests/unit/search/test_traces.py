"""Traces of two runs, held against each other call by call, and module by module.

What is heard of the float64 control is what a run of its own would show; where it does not run, nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import problems_coupling
import problems_weights
import pytest
import torch
from forwards import begun, experiment_of, forwards_of
from problems import Net, fault_codes, squared_error, story
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


def squared_mean(values: list[float]) -> list[Described]:
    mean = sum(values) / len(values)
    return [("input", (), values, "rows"), ("mean", (0,), [mean], "global"), ("mul", (1,), [mean**2], "global")]


VALUES = [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("make", "inside", "found"),
    [
        (doubled, "mul", []),
        (partial(turned, combine=False), "flip", []),
        (centred, "sub", [("rows", "sub", "mean", 4, True, (0,))]),
        (centred, "input", [("rows", "sub", "mean", 4, False, ())]),
        (squared_mean, "input", [("non-additive", "mul", "mul", 4, False, ())]),
        (partial(turned, combine=True), "input", [("rows", "add", "add", 4, False, ())]),
        # a cached gradient cuts no module that hands the rows out in another order
        (partial(turned, combine=True), "flip", [("rows", "add", "add", 4, False, (0,))]),
    ],
)
def test_the_step_where_samples_meet_is_the_suspect(
    make: Callable[[list[float]], list[Described]], inside: str, found: list[tuple[object, ...]]
) -> None:
    matched = matching(make(VALUES), make(VALUES[:2]), make(VALUES[2:]), inside=inside)
    dependence = Dependence(matched, foreign=False, shares=HALVES, agree=AGREE)
    suspects = SuspectFinder(matched, dependence, 4).find_suspects(HALVES, AGREE, False)
    assert [
        (each.kind, each.operation.name, each.culprit.name, each.samples, each.in_model, each.calls)
        for each in suspects
    ] == found
    assert list(dependence.origins()) == [2 for kind, *_ in found if kind == "rows"]


def test_one_changed_row_is_no_other_order() -> None:
    changed = turned([1.0, 2.0], combine=False)
    changed[1] = ("flip", (0,), [2.0, 1.0 + 1e-6], "rows")
    found = matching(turned(VALUES, combine=False), changed, turned(VALUES[2:], combine=False))
    assert not found.permuted[1]
    assert found.differs(1)


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


@pytest.mark.parametrize(("shape", "at", "fold"), [((3, 2), 0, 2), ((7, 2), 0, 2), ((4,), 1, 1), ((), 0, 2)], ids=str)
def test_a_result_without_whole_samples_has_no_fingerprint(shape: tuple[int, ...], at: int, fold: int) -> None:
    assert described(torch.ones(shape), SampleLayout((SampleDimension(at, fold),))).prints is None


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
    plain, halved = (read_and_maybe_halved("_local_scalar_dense", each) for each in (False, True))
    assert takes_other_branch(plain, halved) and takes_other_branch(halved, plain)
    assert not takes_other_branch(halved, halved)
    unread = [read_and_maybe_halved("neg", each) for each in (False, True)]
    assert not takes_other_branch(*unread)
    longer = read_and_maybe_halved("_local_scalar_dense", True)
    longer.add(replace(longer.steps[3], inputs=(3,)))
    longer.loss = 4
    assert not takes_other_branch(longer, halved), "a loop over more samples goes the same way"


# --- How far each module's outputs are apart between the full batch and the micro-batches ----------------------------


def unit_gradients(middle: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 5), middle, nn.ReLU(), nn.Linear(5, 1))
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    return model


@pytest.mark.parametrize(
    ("middle", "options", "differing"),
    [
        (nn.BatchNorm1d(5), {}, [False, True, True, True]),
        (nn.Identity(), {}, [False, False, False, False]),
        (nn.BatchNorm1d(5), {"diagnose": False}, []),
    ],
    ids=["values part at the layer", "forwards agree", "no search"],
)
def test_modules_are_listed_with_how_far_their_outputs_are_apart(
    middle: nn.Module, options: dict[str, Any], differing: list[bool]
) -> None:
    torch.manual_seed(0)
    problem = Problem(unit_gradients(middle), squared_error, (torch.randn(8, 6), torch.randn(8, 1)))
    verdict = verify(problem, steps=4, **options)
    assert verdict.outcome is gaverify.Outcome.DIVERGENT
    assert [each.difference > 1e-3 for each in verdict.modules] == differing
    assert all(each.difference == 0 or each.difference > 1e-3 for each in verdict.modules)


def scale_and_grow(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes its state in micro-batches alone: a watch of the full batch would not see it."""
    result = net.layer(x) * net.scale
    if len(x) < 16:
        net.scale = net.scale + 1.0
    return result


def read_statistics(net: Any, x: torch.Tensor) -> torch.Tensor:
    moved = net.layer(x - net.norm.running_mean)
    net.norm(x)
    return moved


@pytest.mark.parametrize(
    ("forward", "name"), [(scale_and_grow, "scale"), (read_statistics, "norm.running_mean")], ids=["late", "read"]
)
def test_state_that_the_next_micro_batch_reads_is_heard(forward: Any, name: str) -> None:
    torch.manual_seed(0)
    model = Net(forward, layer=nn.Linear(6, 1), norm=nn.BatchNorm1d(6), scale=nn.Buffer(torch.ones(())))
    verdict = verify(model, lambda model, x: model(x).square().mean(), torch.randn(16, 6), steps=4)
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert finding.code == "GAV401" and name in finding.summary, story(verdict)


def test_statistics_that_are_only_kept_for_evaluation_are_no_state_that_is_tried() -> None:
    verdict, told = begun(problems_coupling.batch_norm(), steps=4)
    assert fault_codes(verdict) == {"GAV101"}
    assert not any("restored" in what or "pinned" in what for what in told), told


@pytest.mark.parametrize("exact", [True, False])
def test_a_diagnosis_reads_the_sketches_of_the_runs_that_decided(exact: bool) -> None:
    """Only a divergence is searched; its micro-batches run in float64 once, and once more with the weights that fit."""
    verdict, forwards = forwards_of(problems_weights.mean_loss(), steps=4, weighting="none", exact=exact)
    assert fault_codes(verdict) == {finding.code for finding in verdict.findings if finding.proven} == {"GAV201"}
    assert [samples for dtype, samples in forwards if dtype == "float32"][:5] == [16, 4, 4, 4, 4]
    samples = [samples for dtype, samples in forwards if dtype == "float64"]
    assert samples[:10] == [16, 4, 4, 4, 4, 4, 4, 4, 4, 16]
    verdict, forwards = forwards_of(problems_weights.mean_loss(), steps=4, exact=exact)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT and len(forwards) == (10 if exact else 5)


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
    cut = proof._merge_micro_batches(experiment_of(nn.Linear(2, 1), sizes=(3, 3, 3, 3, 1), weighting=weighting), 2)
    assert cut.sizes == (6, 7)
    assert cut.weighting == (merged if isinstance(merged, str) else pytest.approx(merged))


def test_micro_batches_that_a_function_weights_are_not_merged() -> None:
    with pytest.raises(ControlFailed, match="not known"):
        proof._merge_micro_batches(experiment_of(nn.Linear(2, 1), sizes=(3, 3, 3, 3), weighting=len), 2)


def replace_memory(net: Any, rows: torch.Tensor) -> torch.Tensor:
    """Replaces an attribute, and writes to tensors that may lie where the replaced one lay."""
    outputs = net.layer(rows) * net.memory.mean()
    net.memory = net.memory * 0.9
    for scratch in [torch.empty(3) for _ in range(400)]:
        scratch.fill_(0.5)
    return outputs


def test_a_tensor_at_the_address_of_replaced_state_is_another() -> None:
    torch.manual_seed(0)
    model = Net(replace_memory, layer=nn.Linear(4, 4), memory=torch.ones(3))
    verdict = verify(model, lambda model, rows: model(rows).square().mean(), torch.randn(8, 4), steps=4)
    (finding,) = verdict.findings
    assert finding.code == "GAV403", story(verdict)
    assert "`memory` is written by `assignment`" in finding.evidence[0].statement
