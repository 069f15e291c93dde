"""Two oracles that share no code with gaverify: closed form in exact fractions, and one sample at a time.

Shapes: B samples of D features, K micro-batches of n_k samples, one output.
"""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import mlp, squared_error
from torch import nn

import gaverify
from gaverify import Outcome, Verdict

FEW = settings(max_examples=15, deadline=None, derandomize=True)


def cuts(size: int, steps: int) -> list[int]:
    """Sizes of a `DataLoader`'s micro-batches; as even as possible where that would leave fewer than `steps`."""
    each = math.ceil(size / steps)
    if each * (steps - 1) < size:
        return [each] * (steps - 1) + [size - each * (steps - 1)]
    return [size // steps + (k < size % steps) for k in range(steps)]


def exact_gradient(x: list[list[int]], y: list[int], w: list[int]) -> list[Fraction]:
    """Returns ∂/∂w of the mean squared error of y ≈ xw: (2/B) Σ_i (x_i·w − y_i) x_i, without rounding."""
    residuals = [sum(a * b for a, b in zip(row, w, strict=True)) - target for row, target in zip(x, y, strict=True)]
    return [Fraction(2, len(x)) * sum(r * row[d] for r, row in zip(residuals, x, strict=True)) for d in range(len(w))]


def exact_accumulated(x: list, y: list, w: list, sizes: list[int], weights: list[Fraction]) -> list[Fraction]:
    """Returns Σ_k w_k g_k."""
    total, start = [Fraction(0)] * len(w), 0
    for size, weight in zip(sizes, weights, strict=True):
        part = exact_gradient(x[start : start + size], y[start : start + size], w)
        total = [a + weight * b for a, b in zip(total, part, strict=True)]
        start += size
    return total


def norm(values: list[Fraction]) -> float:
    return math.sqrt(sum(value * value for value in values))


def linear(x: list, y: list, w: list, steps: int, weighting, **options) -> Verdict:
    model = nn.Linear(len(w), 1, bias=False)
    model.weight.data = torch.tensor([w], dtype=torch.float32)
    batch = (torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None])
    return gaverify.verify(model, squared_error, batch, steps=steps, weighting=weighting, **options)


@st.composite
def least_squares(draw: st.DrawFn) -> tuple[list, list, list, int]:
    """Small integers, so that float32 holds every term exactly."""
    size, features = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    number = st.integers(-5, 5)
    x = draw(st.lists(st.lists(number, min_size=features, max_size=features), min_size=size, max_size=size))
    y = draw(st.lists(number, min_size=size, max_size=size))
    w = draw(st.lists(number, min_size=features, max_size=features))
    return x, y, w, draw(st.integers(1, size))


@FEW
@given(least_squares(), st.sampled_from(["uniform", "samples", "none", "explicit"]), st.data())
def test_closed_form(problem: tuple, weighting: str, data: st.DataObject) -> None:
    x, y, w, steps = problem
    sizes = cuts(len(x), steps)
    numbers = st.sampled_from([1, 2, 3, 5]).map(lambda n: Fraction(n, 4))
    weights = {
        "uniform": [Fraction(1, steps)] * steps,
        "samples": [Fraction(size, len(x)) for size in sizes],
        "none": [Fraction(1)] * steps,
        "explicit": data.draw(st.lists(numbers, min_size=steps, max_size=steps)),
    }[weighting]
    full, accumulated = exact_gradient(x, y, w), exact_accumulated(x, y, w, sizes, weights)
    difference = [a - b for a, b in zip(accumulated, full, strict=True)]
    verdict = linear(x, y, w, steps, [float(weight) for weight in weights] if weighting == "explicit" else weighting)
    (row,) = verdict.parameters
    assert verdict.run.micro_batches == tuple(sizes)
    assert verdict.run.weights == pytest.approx([float(weight) for weight in weights])
    scale = max(norm(full), norm(accumulated))
    assert row.reference_norm == pytest.approx(norm(full), rel=1e-5, abs=1e-5)
    assert row.accumulated_norm == pytest.approx(norm(accumulated), rel=1e-5, abs=1e-5)
    assert row.difference_norm == pytest.approx(norm(difference), rel=1e-5, abs=1e-4)
    if scale == 0:
        assert verdict.outcome is Outcome.INCONCLUSIVE
    else:
        assert verdict.outcome is (Outcome.DIVERGENT if any(difference) else Outcome.EQUIVALENT)


@FEW
@given(least_squares())
def test_fitted_factor_is_the_exact_one(problem: tuple) -> None:
    """A forgotten division on equal micro-batches is a factor K, whatever the data."""
    x, y, w, _ = problem
    x, y = x + x[::-1], y + y[::-1]
    verdict = linear(x, y, w, 2, "none")
    if not any(exact_gradient(x, y, w)):
        return
    (finding,) = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert finding.code == "GAV201"
    assert finding.evidence[0].values["factor"] == pytest.approx(2.0, rel=1e-6)


def toy_linear() -> tuple:
    """Row 1 of the reference systems: w = 1, x = [4, 2], target 2x."""
    return [[4], [2]], [8, 4], [1]


def test_toy_linear_in_fractions() -> None:
    x, y, w = toy_linear()
    assert exact_gradient(x, y, w) == [-20]
    first = [Fraction(1, 2) * value for value in exact_gradient(x[:1], y[:1], w)]
    assert first == [-16]
    assert exact_accumulated(x, y, w, [1, 1], [Fraction(1, 2)] * 2) == [-20]


def test_toy_linear_trace() -> None:
    """−16 after the first micro-batch, −20 after the second, the weight 1.0 until the step and 1.2 after it."""
    verdict = linear(*toy_linear(), 2, "uniform", trace=True)
    assert verdict.outcome is Outcome.EQUIVALENT
    first, second = verdict.trace.rows
    assert (first.gradient, second.gradient) == (-16.0, -20.0)
    assert (first.movement, second.movement) == (0.0, 0.0)
    assert [(row.backward, row.step, row.zero_grad) for row in verdict.trace.rows] == [(1, 0, 1), (2, 0, 1)]
    step = verdict.trace.step
    assert step.before == 1.0
    assert step.after_full == pytest.approx(1.2, rel=1e-6)
    assert step.after_accumulated == pytest.approx(1.2, rel=1e-6)
    (row,) = verdict.parameters
    assert (row.reference_norm, row.accumulated_norm, row.difference_norm) == (20.0, 20.0, 0.0)


def test_toy_linear_undivided() -> None:
    """Without the division −32 and −40: twice the full-batch gradient, and the weight 1.4 after the step."""
    verdict = linear(*toy_linear(), 2, "none", trace=True)
    assert verdict.outcome is Outcome.DIVERGENT
    assert [row.gradient for row in verdict.trace.rows] == [-32.0, -40.0]
    assert verdict.trace.step.after_full == pytest.approx(1.2, rel=1e-6)
    assert verdict.trace.step.after_accumulated == pytest.approx(1.4, rel=1e-6)


def test_toy_linear_as_one_summed_loss() -> None:
    """Row 2 of the reference systems: the same gradient by one backward pass."""
    verdict = linear(*toy_linear(), 2, "uniform", strategy="summed-loss")
    (row,) = verdict.parameters
    assert verdict.outcome is Outcome.EQUIVALENT
    assert (row.reference_norm, row.accumulated_norm) == (20.0, 20.0)


def one_at_a_time(model: nn.Module, x: torch.Tensor, y: torch.Tensor, factors: list[float]) -> dict[str, torch.Tensor]:
    """Returns Σ_i factor_i ∂ℓ_i/∂θ in float64, one backward pass per sample."""
    model = copy.deepcopy(model).double()
    for sample, target, factor in zip(x.double(), y, factors, strict=True):
        (factor * F.cross_entropy(model(sample[None]), target[None])).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@FEW
@given(
    size=st.integers(2, 12),
    features=st.integers(1, 6),
    data=st.data(),
    weighting=st.sampled_from(["uniform", "samples", "none", "explicit"]),
    seed=st.integers(0, 1000),
)
def test_one_sample_at_a_time(size: int, features: int, data: st.DataObject, weighting: str, seed: int) -> None:
    steps = data.draw(st.integers(1, size))
    sizes = cuts(size, steps)
    weights = {
        "uniform": [1 / steps] * steps,
        "samples": [n / size for n in sizes],
        "none": [1.0] * steps,
        "explicit": data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=steps, max_size=steps)),
    }[weighting]
    torch.manual_seed(seed)
    model, x, y = mlp(features), torch.randn(size, features), torch.randint(4, (size,))
    full = one_at_a_time(model, x, y, [1 / size] * size)
    accumulated = one_at_a_time(model, x, y, [w / n for w, n in zip(weights, sizes, strict=True) for _ in range(n)])
    verdict = gaverify.verify(
        model,
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        (x, y),
        steps=steps,
        weighting=weights if weighting == "explicit" else weighting,
    )
    assert [row.name for row in verdict.parameters] == list(full)
    for row in verdict.parameters:
        scale = float(full[row.name].norm())
        assert row.shape == tuple(full[row.name].shape)
        assert row.reference_norm == pytest.approx(scale, rel=1e-5, abs=1e-7)
        assert row.accumulated_norm == pytest.approx(float(accumulated[row.name].norm()), rel=1e-5, abs=1e-7)
        difference = float((accumulated[row.name] - full[row.name]).norm())
        assert row.difference_norm == pytest.approx(difference, rel=1e-5, abs=3e-7 * max(scale, 1.0))
        assert row.outcome is (Outcome.DIVERGENT if difference > 1e-9 * max(scale, 1e-9) else Outcome.EQUIVALENT)


def test_the_oracle_can_disagree() -> None:
    """The tests above compare with something that moves: another weighting is another gradient."""
    torch.manual_seed(0)
    model, x, y = mlp(), torch.randn(6, 6), torch.randint(4, (6,))
    even = one_at_a_time(model, x, y, [1 / 6] * 6)
    uneven = one_at_a_time(model, x, y, [1 / 8] * 4 + [1 / 4] * 2)
    assert all(not torch.allclose(even[name], uneven[name]) for name in even)
