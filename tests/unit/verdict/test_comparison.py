"""What is measured of a parameter, what is decided from it, and what is not a number."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from forwards import begun, experiment_of
from problems import Net, Problem, fault_codes, story
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gaverify
from gaverify import Outcome, ProblemError
from gaverify.records.outcomes import Method, NotCompared
from gaverify.thresholds import U32, U64
from gaverify.verdict import measurement
from gaverify.verdict.comparison import measure
from gaverify.verdict.criteria import Difference, Grounds, decide, decide_at_once, floors_allowed, floors_wanted

# --- Measuring: norms against float64 by hand, whatever the shape, and one transfer for all parameters ---------------


SHAPES = [(), (1,), (3, 5), (40, 40), (40000,), (300, 1000), (0,), (2, 0)]


def gradients(seed: int, dtype: torch.dtype, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape for shape in SHAPES for _ in range(count)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return {str(at): tensor for at, tensor in enumerate(drawn)}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((dtype, 1.0) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64)),
        # squares that float32 cannot hold
        *((torch.float32, size) for size in (1e-30, 1e-12, 1e18, 1e30)),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 9], ids=["by-segments", "stacked"])
def test_norms_against_float64_by_hand(dtype: torch.dtype, size: float, count: int) -> None:
    actual, expected = (
        {name: size * tensor for name, tensor in gradients(seed, dtype, count).items()} for seed in (0, 1)
    )
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for row in measure(actual, expected):
        a, e = actual[row.name].to(wide), expected[row.name].to(wide)
        for found, tensor in ((row.reference, e), (row.accumulated, a), (row.difference, a - e)):
            assert found == pytest.approx(float(tensor.abs().square().sum().sqrt()), rel=1e-5, abs=0)
        if a.numel() and not dtype.is_complex:
            assert row.worst is not None
            assert float((a - e)[row.worst.index].abs()) == pytest.approx(float((a - e).abs().max()), rel=1e-5)


def test_the_worst_element_is_looked_for_where_it_may_matter() -> None:
    expected = {"fault": torch.ones(5, 40), "rounding": torch.ones(5, 40), "same": torch.ones(5, 40)}
    actual = {name: gradient.clone() for name, gradient in expected.items()}
    actual["fault"][3, 7] = 2.0
    actual["rounding"][4, 1] += 2.0**-23
    rows = {row.name: row for row in measure(actual, expected)}
    assert rows["fault"].worst == ((3, 7), 1.0, 2.0)
    assert rows["rounding"].worst is None and rows["rounding"].difference > 0
    located = {row.name: row for row in measure(actual, expected, find_worst=True)}
    assert located["rounding"].worst is not None and located["rounding"].worst.index == (4, 1)
    assert located["same"].worst is None
    assert all(row.worst is None for row in measure(actual, expected, find_worst=False))


def test_the_worst_element_of_a_large_gradient_lies_in_any_slice() -> None:
    expected = torch.zeros(3, 1 << 18)
    actual = expected.clone()
    actual[2, 12345] = -3.0
    (row,) = measure({"w": actual}, {"w": expected})
    assert row.worst == ((2, 12345), 0.0, -3.0)


def test_missing_and_infinite_sides() -> None:
    one, bad = torch.ones(2), torch.tensor([1.0, math.inf])
    actual = {"both": None, "lost": None, "gained": one, "nan": bad, "nan-both": bad, "fine": one}
    expected = {"both": None, "lost": one, "gained": None, "nan": one, "nan-both": bad, "fine": one}
    rows = {row.name: row for row in measure(actual, expected)}
    assert all(math.isnan(row.difference) and row.why for name, row in rows.items() if name != "fine")
    assert rows["fine"].difference == 0.0 and rows["fine"].why is None


class Fetches(TorchDispatchMode):
    """Counts the numbers that are fetched one by one, each a synchronisation on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def fetched(layers: int) -> int:
    torch.manual_seed(0)
    model, targets = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), torch.randn(8, 4)
    problem = (torch.randn(8, 4), targets)
    with Fetches() as seen:
        verdict = gaverify.verify(model, lambda m, b: (m(b[0]) - b[1]).square().mean(), problem, steps=2)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT and verdict.method == "working-precision"
    assert any(row.allowed > 1.01 * 16 * 2.0**-24 * row.reference_norm for row in verdict.parameters), "terms are known"
    return seen.count


def test_a_verdict_fetches_no_number_per_parameter() -> None:
    assert fetched(24) == fetched(3)
    with Fetches() as seen:
        float(torch.ones(()))
    assert seen.count == 1, "they could be seen"


# The one decision, with hand-made rows: each explanation of a difference reaches as far as it says, and no further.


U16 = 2.0**-8  # of bfloat16
SIZES = (0.0, 1e-12, 1e-8, 9e-7, 1e-6, 1e-5, 1.0)
SAME, FAULT, OPEN = Outcome.EQUIVALENT, Outcome.DIVERGENT, Outcome.INCONCLUSIVE


def row(
    difference: float, reference: float = 1.0, accumulated: float | None = None, missing: NotCompared | None = None
) -> Difference:
    return Difference(
        "w", (2,), reference, reference if accumulated is None else accumulated, difference, None, missing
    )


CONTROL = Grounds(Method.FLOAT64_CONTROL, U64, working_unit=U32)


@pytest.mark.parametrize(
    ("why", "reached", "grounds", "beyond"),
    [
        ("working precision: 16 u of the norm", 16 * U32, Grounds(Method.WORKING_PRECISION, U32), OPEN),
        ("bfloat16: 16 of its own u", 16 * U16, Grounds(Method.WORKING_PRECISION, U16), OPEN),
        ("Σ|terms| of a sum", 16 * U32 * 10, Grounds(Method.WORKING_PRECISION, U32, terms=10.0), OPEN),
        ("terms that allow more than 1e-5", 16 * U32, Grounds(Method.WORKING_PRECISION, U32, terms=11.0), OPEN),
        ("8 times the rounding of two samples", 8e-6, Grounds(Method.TWO_SAMPLES, U32, floor=1e-6), OPEN),
        ("rounding of more than 1e-5", 9.9e-6, Grounds(Method.TWO_SAMPLES, U32, floor=3e-6), OPEN),
        ("two samples without this gradient", 16 * U32, Grounds(Method.TWO_SAMPLES, U32), OPEN),
        ("terms smaller than the norm say nothing", 16 * U32, Grounds(Method.WORKING_PRECISION, U32, terms=0.5), OPEN),
        ("float64: 4 u32, for casts that hide", 4 * U32, Grounds(Method.FLOAT64_CONTROL, U64), FAULT),
        ("float64: of the terms", 4 * U32 * 9, Grounds(Method.FLOAT64_CONTROL, U64, terms=9.0), FAULT),
        ("float64: half of the orders of magnitude", math.sqrt(U64 / U32) * 0.5, CONTROL._replace(working=0.5), FAULT),
        ("float64: what was NaN before did not shrink", 4 * U32, CONTROL._replace(working=math.nan), FAULT),
        ("float64: 32 of its floors", 32e-6, Grounds(Method.FLOAT64_CONTROL, U64, floor=1e-6), FAULT),
        ("float32 by the floor: 32 floors", 32e-5, Grounds(Method.NOISE_FLOOR, U32, floor=1e-5), OPEN),
        ("a floor of zero allows 16 u still", 16 * U32, Grounds(Method.NOISE_FLOOR, U32, floor=0.0), FAULT),
        ("bfloat16 by the floor: 4 floors", 0.4, Grounds(Method.NOISE_FLOOR, U16, floor=0.1), OPEN),
        ("a float64 model by the floor: 4 u32", 4 * U32, Grounds(Method.NOISE_FLOOR, U64, floor=0.0), FAULT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_explanation_reaches_so_far(why: str, reached: float, grounds: Grounds, beyond: Outcome) -> None:
    within, above = decide(row(reached), grounds), decide(row(reached * (1 + 1e-9)), grounds)
    assert (within.outcome, above.outcome) == (SAME, beyond), why
    assert within.allowed == above.allowed == pytest.approx(reached)
    assert within.method == grounds.method


@pytest.mark.parametrize(("unit", "floor", "fault"), [(U32, 1e-5, 320e-5), (U16, 0.1, 1.6)])
def test_between_the_thresholds_of_the_floor_nothing_is_claimed(unit: float, floor: float, fault: float) -> None:
    grounds = Grounds(Method.NOISE_FLOOR, unit, floor=floor)
    assert decide(row(floors_allowed(unit) * floor * 1.01), grounds).outcome is OPEN
    assert decide(row(fault), grounds).outcome is OPEN
    assert decide(row(fault * 1.001), grounds).outcome is FAULT


@pytest.mark.parametrize("difference", [6e-5, 3e-6])
def test_the_smallest_fault_on_record_stays_a_fault_in_float64(difference: float) -> None:
    grounds = Grounds(Method.FLOAT64_CONTROL, U64, working=difference, working_unit=U32, floor=1e-16)
    assert decide(row(difference), grounds).outcome is FAULT


def test_scale_is_the_larger_norm() -> None:
    assert decide(row(16 * U32 * 5, 1.0, 5.0), Grounds(Method.WORKING_PRECISION, U32)).outcome is SAME
    assert decide(row(16 * U32 * 5, 5.0, 1.0), Grounds(Method.WORKING_PRECISION, U32)).outcome is SAME


@pytest.mark.parametrize(
    ("missing", "outcome"),
    [
        (NotCompared.UNUSED, SAME),
        (NotCompared.MISSING_IN_ACCUMULATED, FAULT),
        (NotCompared.NOT_FINITE_IN_FULL, FAULT),
        (NotCompared.NOT_FINITE_IN_BOTH, OPEN),
    ],
)
@pytest.mark.parametrize("method", [Method.WORKING_PRECISION, Method.FLOAT64_CONTROL, Method.NOISE_FLOOR])
def test_a_side_that_is_missing(missing: NotCompared, outcome: Outcome, method: Method) -> None:
    decided = decide(row(math.nan, math.nan, math.nan, missing), Grounds(method, U32, floor=1.0))
    assert (decided.outcome, decided.method) == (outcome, Method.NOT_COMPARED)


def test_a_gradient_that_is_the_rounding_of_its_terms_is_explained_by_them() -> None:
    grounds = Grounds(Method.WORKING_PRECISION, U32, terms=1.0)
    zero, small = decide(row(5e-7, 5e-7), grounds), decide(row(5e-7, 2e-6), grounds)
    assert zero.outcome is SAME and zero.vanishing
    assert small.outcome is OPEN, "a gradient above the rounding of its terms may hide a fault of 25 %"
    assert decide(row(5e-7, 5e-7), grounds._replace(terms=0.1)).outcome is OPEN, "more than its terms explain"


def test_a_floor_explains_no_gradient_that_is_no_larger_than_itself() -> None:
    assert decide(row(1e-6, 1e-6), Grounds(Method.TWO_SAMPLES, U32, floor=1e-6)).outcome is OPEN


def test_what_vanishes_is_relative_to_the_arithmetic_that_decided() -> None:
    rounding = decide(row(4e-8, 5e-8), Grounds(Method.WORKING_PRECISION, U32, terms=1.0))
    assert rounding.vanishing, "a sum of terms around 1 that cancels to 5e-8 is float32's rounding"
    small = decide(row(4e-15, 5e-8), Grounds(Method.WORKING_PRECISION, U32, terms=5e-8))
    assert not small.vanishing, "a loss multiplied by 1e-8 has small gradients that are no rounding"
    assert decide(row(0.0, 0.0), Grounds(Method.FLOAT64_CONTROL, U64)).vanishing
    assert not decide(
        row(math.nan, math.nan, 1.0, NotCompared.MISSING_IN_FULL), Grounds(Method.FLOAT64_CONTROL, U64)
    ).vanishing


def test_a_floor_is_wanted_for_a_tiny_gradient_that_diverges() -> None:
    grounds = Grounds(Method.FLOAT64_CONTROL, U64)
    large, tiny = decide(row(0.0, 1.0), grounds), decide(row(1e-17, 1e-17), grounds)
    assert tiny.outcome is FAULT
    assert floors_wanted([large, tiny])
    assert not floors_wanted([large, decide(row(1e-5, 1e-5), grounds)]), "far above what float64 rounds"
    assert not floors_wanted([large, decide(row(0.0, 1e-17), grounds)]), "nothing diverges"


def test_many_rows_are_decided_as_each_of_them() -> None:
    rows = [row(d, e)._replace(name=str(at)) for at, (d, e) in enumerate(itertools.product(SIZES, SIZES))]
    rows.append(row(math.nan, math.nan, math.nan, NotCompared.NOT_FINITE_IN_BOTH))
    terms = {str(at): SIZES[at % len(SIZES)] for at in range(0, len(rows), 2)}
    each = [decide(row, Grounds(Method.WORKING_PRECISION, U32, terms.get(row.name, 0.0))) for row in rows]
    together = decide_at_once(rows, U32, terms)
    assert list(map(repr, together)) == list(map(repr, each))
    assert {decided.outcome for decided in together} == {SAME, OPEN}


# --- A loss that is not finite names the first thing that is not: parameter, buffer, input or operation --------------


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def logarithm(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out = model(batch)
    masked = out.masked_fill(out > 1e9, -math.inf)  # a mask is no fault
    return (masked - masked.max() - 1).log().mean()


def overflowing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).abs().sum() * 1e38 * 1e10


def masked_at_last(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A mask of minus infinity harms nobody."""
    scores = model(batch)
    mask = torch.zeros_like(scores).masked_fill(torch.tensor([False, True]), -math.inf)
    return (scores + mask).softmax(1)[:, 0].log().mean() + (scores * 0 - 1).sqrt().mean()


@pytest.mark.parametrize(
    ("where", "loss", "named"),
    [
        ("0.weight", squared, "parameter `0.weight` is not finite"),
        ("1.running_mean", squared, "buffer `1.running_mean` is not finite"),
        ("batch", squared, "the batch holds NaN"),
        ("", logarithm, f"`log` at tests/unit/verdict/test_comparison.py:{logarithm.__code__.co_firstlineno + 3}"),
        ("", overflowing, "`mul` at"),
        ("", masked_at_last, "`sqrt` at"),
    ],
)
def test_the_first_thing_that_is_not_finite_is_named(where: str, loss: Any, named: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval(), torch.randn(8, 4)
    if where:
        {**model.state_dict(), "batch": batch}[where].view(-1)[0] = math.nan
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(model, loss, batch, mode="eval")
    assert named in str(raised.value)


def test_a_control_that_reads_it_alone_is_no_fault_of_gaverify() -> None:
    """In training BatchNorm does not read its statistics; the control that freezes it does, and finds NaN."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].running_mean[0] = math.nan
    torch.manual_seed(0)
    verdict = gaverify.verify(model, squared, torch.randn(8, 4))
    assert verdict.outcome is gaverify.Outcome.DIVERGENT
    assert "GAV101" in {finding.code for finding in verdict.findings}


# --- A kernel without float64 may return what the memory held: such a control decides nothing ------------------------


def broken_in_float64(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.inner(x).tanh()
    return y * math.nan if y.dtype is torch.float64 else y


def missing_in_float64(net: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise NotImplementedError("no float64")
    return net.inner(x).tanh() * (1.01 if len(x) == 8 else 1.0)


@pytest.mark.parametrize("broken", [True, False])
def test_a_control_without_numbers_decides_nothing(broken: bool) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 6, device="cpu"), torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1], device="cpu")

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, mask = batch
        return (model(values).square().mean(1) * mask).sum() / mask.sum()

    forward = broken_in_float64 if broken else lambda net, x: net.inner(x).tanh()
    verdict = gaverify.verify(Net(forward, inner=nn.Linear(6, 3)), loss, batch, steps=4)
    assert verdict.outcome is Outcome.DIVERGENT and fault_codes(verdict) == {"GAV202"}, story(verdict)
    assert not any(finding.code == "GAV503" for finding in verdict.findings), story(verdict)
    assert ("some kernel has no float64" in verdict.control_failure) is broken


# --- How many bits the arithmetic has, autocast included; what noise and doubt of a run decide ------------------------


@pytest.mark.parametrize(("autocast", "unit"), [(None, 2.0**-11), (torch.bfloat16, 2.0**-8)])
def test_the_unit_is_that_of_the_coarsest_arithmetic_autocast_included(
    autocast: torch.dtype | None, unit: float
) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).half())
    experiment = experiment_of(model, autocast=autocast)
    assert measurement.working_unit(experiment) == unit
    assert measurement.lowest_precision(experiment) is torch.float16


def test_the_noise_of_moved_weights_is_measured_and_undone() -> None:
    """Three runs near the weights say how much the gradient of a kernel without float64 may differ."""
    torch.manual_seed(0)
    model = Net(missing_in_float64, inner=nn.Linear(6, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verdict, told = begun(Problem(model, squared, torch.randn(8, 6)), steps=4, exact=True)
    assert verdict.method == Method.NOISE_FLOOR, story(verdict)
    assert verdict.outcome is Outcome.DIVERGENT, story(verdict)
    assert [what for what in told if "noise" in what] == [f"noise floor: run {run} of 3" for run in (1, 2, 3)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
