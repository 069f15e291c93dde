"""Sketches and fingerprints of gradients, weights that are fitted to them, and weights that are asked for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from forwards import experiment_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gaverify
from gaverify import Problem, ProblemError
from gaverify.passes.dispatch import Observed, TargetCount
from gaverify.passes.layouts import project_rows, real_numbers, summaries
from gaverify.passes.precision import widest
from gaverify.passes.sketches import SINGULAR_FLOAT64, SKETCH, fit_weights, sketch, sketch_of
from gaverify.passes.user_code import micro_batch_weight, targets_of, valid_targets
from gaverify.verdict.sketches import GradientSketches


def gradients(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_linear_relations_hold_exactly_and_a_missing_gradient_is_zero() -> None:
    a, b = gradients(0, (300, 40), (7,)), gradients(1, (300, 40), (7,))
    mixed = [2 * x - 3 * y for x, y in zip(a, b, strict=True)]
    torch.testing.assert_close(sketch(mixed), 2 * sketch(a) - 3 * sketch(b))
    torch.testing.assert_close(sketch(a) - sketch([a[0], None]), sketch([None, a[1]]))
    assert sketch([None, None]).shape == (SKETCH,) and not sketch([None]).any()
    large = gradients(0, (400, 100), (50_000,))
    length = float(torch.cat([tensor.reshape(-1) for tensor in large]).norm())
    assert float(sketch(large).norm()) == pytest.approx(length, rel=0.1), "in expectation"


def test_the_elements_of_a_small_model_have_buckets_of_their_own() -> None:
    """Else a handful of weights could be explained by the collisions, and every fit would succeed."""
    small = gradients(0, (3, 4), (3,), (1, 3), (1,), (16, 8), (16,))
    numbers = torch.cat([tensor.reshape(-1) for tensor in small])
    found = sketch(small)
    assert int((found != 0).sum()) == numbers.numel()
    assert float(found.norm()) == pytest.approx(float(numbers.norm()))


def test_signs_hang_on_the_place() -> None:
    """4,096 places on, a tensor begins at the same bucket: two equal ones must not add up there."""
    one = torch.ones(SKETCH, dtype=torch.float64)
    here, there = sketch_of(one, 0), sketch_of(one, SKETCH)
    assert abs(float(here @ there)) < 0.1 * SKETCH


def test_many_small_tensors_add_up_as_one_by_one() -> None:
    """More rows than wait at a time, several precisions, no element at all, and starts that wrap around."""
    numbers = torch.Generator().manual_seed(0)
    sizes = [0, 1, SKETCH, SKETCH + 1, 16 * SKETCH - 1, 16 * SKETCH, *torch.randint(1, 3 * SKETCH, (300,)).tolist()]
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    tensors = [torch.randn(n, generator=numbers).to(dtypes[place % 3]) for place, n in enumerate(sizes)]
    one_by_one = sum(sketch_of(tensor, place) for place, tensor in enumerate(tensors))
    torch.testing.assert_close(sketch(tensors), one_by_one, rtol=1e-12, atol=1e-9)


def test_a_large_tensor_is_the_sum_of_its_elements() -> None:
    """In whole pieces, in whole tiles of 16 rows, and in what is left of one."""
    for count in (16 * SKETCH, 256 * SKETCH, 256 * SKETCH + 17 * SKETCH + 5):
        one = torch.zeros(count, dtype=torch.float64)
        one[count - 3] = 2.0
        found = sketch_of(one, 7)
        assert found.nonzero().tolist() == [[(count - 3 + 7 * 2531) % SKETCH]] and float(found.norm()) == 2.0


class Launches(TorchDispatchMode):
    """Counts operations that work on numbers; a view is none."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_tensor_costs_one_launch(dtype: torch.dtype) -> None:
    """On a device a launch takes as long as the work on it: they are added up at once, however many there are."""
    tensors = [torch.randn(8, 9).to(dtype) for _ in range(200)]
    sketch(tensors)  # draws the signs
    with Launches() as launches:
        sketch(tensors)
    assert launches.count <= len(tensors) + 30


def test_no_gradient_is_kept_until_the_backward_pass_ends() -> None:
    """Autograd copies a gradient into `.grad` where somebody still holds it: a second set of them."""
    model = nn.Linear(3, 2)
    seen, given = GradientSketches(experiment_of(model)), []
    with seen.listening() as note:
        for weight in (1.0, 2.0):
            model.weight.register_hook(lambda gradient: given.append(gradient.data_ptr()))
            (model(torch.ones(4, 3)).square().sum() * weight).backward()
            assert model.weight.grad.data_ptr() == given[-1]
            note(0)
            expected = sketch([model.weight.grad, model.bias.grad])
            model.zero_grad()
            torch.testing.assert_close(seen.columns()[:, -1], expected)


def test_columns_are_in_the_order_of_the_backward_passes_however_many_there_are() -> None:
    """They are fetched in groups; one that gave no parameter anything is zero."""
    model = nn.Embedding(3, 1)
    weight = model.weight
    seen = GradientSketches(experiment_of(model))
    with seen.listening() as note:
        for k in range(130):
            if k != 70:
                (weight.sum() * k).backward()
            note(k)
    columns = seen.columns()
    assert columns.shape == (SKETCH, 130) and columns.dtype is torch.float64
    assert columns.norm(dim=0).tolist() == pytest.approx([math.sqrt(3) * k if k != 70 else 0.0 for k in range(130)])


def test_every_kind_of_gradient_is_sketched() -> None:
    tensor = torch.randn(6, 3)
    torch.testing.assert_close(sketch([tensor.to_sparse()]), sketch([tensor]))
    torch.testing.assert_close(sketch([tensor.bfloat16()]), sketch([tensor]), rtol=0.01, atol=0.05)
    assert int((sketch([torch.complex(tensor, tensor + 1)]) != 0).sum()) == 36


@pytest.mark.parametrize("length", [1, 7, 1000, (1 << 16) + 5])
def test_rows_that_differ_in_one_number_are_told_apart(length: int) -> None:
    torch.manual_seed(0)
    row = torch.randn(length, dtype=torch.float64)
    for at in {0, length // 2, length - 1}:
        other = row.clone()
        other[at] += 0.01
        assert (summaries(row) - summaries(other)).abs().max() > 1e-4


def test_rows_are_projected_one_by_one_whatever_lies_around_them() -> None:
    torch.manual_seed(1)
    rows = torch.randn(6, 3, 40, dtype=torch.float64)
    torch.testing.assert_close(summaries(rows[2:4]), summaries(rows)[2:4], rtol=1e-14, atol=1e-14)
    assert summaries(rows).shape == (6, 3, 3)
    assert project_rows(rows, 1).shape == (6, 3, 1)


def test_normalised_rows_keep_apart() -> None:
    """The sum of a row behind a softmax or a LayerNorm is the same for all of them."""
    for rows in (torch.randn(5, 64).softmax(1), torch.nn.functional.layer_norm(torch.randn(5, 64), (64,))):
        torch.testing.assert_close(rows.sum(1), rows.sum(1)[:1].expand(5), atol=1e-4, rtol=1e-4)
        assert (torch.cdist(project_rows(rows), project_rows(rows)) + torch.eye(5)).min() > 1e-3


def test_pieces_of_a_long_row_do_not_cancel_each_other() -> None:
    """The directions start again after 65,536 numbers: exchanged pieces must not give the same projections."""
    pieces = torch.randn(2, 1 << 16, dtype=torch.float64)
    exchanged = project_rows(pieces.flip(0).reshape(-1)) - project_rows(pieces.reshape(-1))
    assert exchanged.abs().max() > 1


@pytest.mark.parametrize(
    ("shape", "pairs"), [((), (2,)), ((4,), (4, 2)), ((4, 3), (4, 6)), ((2, 4, 3), (2, 4, 6))], ids=str
)
def test_complex_numbers_stay_in_their_rows_and_real_ones_are_not_copied(
    shape: tuple[int, ...], pairs: tuple[int, ...]
) -> None:
    values, real = torch.randn(shape, dtype=torch.complex64, requires_grad=True), torch.randn(shape)
    assert real_numbers(values).shape == pairs
    assert not real_numbers(values).requires_grad
    assert not torch.equal(real_numbers(values.conj()), real_numbers(values))
    assert real_numbers(real).data_ptr() == real.data_ptr()


def test_the_widest_dtype_of_a_device() -> None:
    assert widest(torch.device("cpu")) is widest(torch.device("cuda", 0)) is torch.float64
    assert widest(torch.device("mps")) is torch.float32


# --- The one fit of micro-batch weights, on gradients written by hand ------------------------------------------------


EYE = torch.eye(6, 3, dtype=torch.float64)  # three micro-batches whose gradients are orthogonal unit vectors


def fit(columns: torch.Tensor, target: torch.Tensor, **options):  # type: ignore[no-untyped-def]
    return fit_weights(columns, target, singular=SINGULAR_FLOAT64, **options)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_right_weights_come_back_exactly() -> None:
    right = vector(0.1, 0.3, 0.6)
    found = fit(EYE, EYE @ right, weights=vector(1, 1, 1))
    assert found.weights == pytest.approx(right.tolist()) and found.residual < 1e-15 and found.determined
    assert found.multipliers == pytest.approx(right.tolist())
    assert not found.vacuous and found.factor_residual > 0.1
    even = fit(EYE, EYE @ vector(1 / 3, 1 / 3, 1 / 3), weights=vector(1, 1, 1))
    assert even.factor == pytest.approx(3.0) and even.factor_residual < 1e-15, "a forgotten division"


def test_used_weights_are_fitted_where_only_their_gradient_is_known() -> None:
    found = fit(EYE, EYE @ vector(1, 1, 1), used=EYE @ vector(0.5, 1.0, 2.0))
    assert found.used == pytest.approx((0.5, 1.0, 2.0)) and found.used_residual < 1e-15
    assert found.multipliers == pytest.approx((2.0, 1.0, 0.5))


def test_micro_batches_that_cannot_be_told_apart_keep_the_weights_that_were_used() -> None:
    columns = EYE[:, [0, 0, 1]]
    found = fit(columns, columns @ vector(0.5, 0.5, 1.0), weights=vector(0.2, 0.8, 1.0))
    assert not found.determined
    assert found.weights == pytest.approx((0.2, 0.8, 1.0)), "they fit already"


def test_as_many_weights_as_numbers_say_nothing() -> None:
    assert fit(EYE[:3], vector(1, 2, 3), weights=vector(1, 1, 1)).vacuous
    assert fit(EYE, EYE @ vector(1, 2, 3), weights=vector(1, 1, 1), equations=3).vacuous


def test_what_no_weights_explain_is_the_residual() -> None:
    outside = torch.eye(6, dtype=torch.float64)[5]
    found = fit(EYE, EYE @ vector(1, 1, 1) + outside * 3.0, weights=vector(1, 1, 1))
    assert found.residual == pytest.approx(3.0 / math.sqrt(12.0))
    nothing = fit(EYE[:, :0], outside, used=vector(0, 0, 0, 0, 0, 0))
    assert nothing.weights == () and nothing.residual == 1.0 and not nothing.determined
    undefined = fit(EYE * math.nan, outside, weights=vector(1, 1, 1))
    assert undefined.residual == math.inf and not undefined.determined


def test_noise_is_the_spread_of_the_micro_batches() -> None:
    same = EYE[:, [0, 0, 0, 0]] / 4
    assert fit(same, same.sum(1), weights=vector(1, 1, 1, 1)).noise == 0.0
    spread = vector(1.0, 3.0)[None] * torch.ones(1, 2, dtype=torch.float64)  # shares 1 and 3 of a sum of 4
    assert fit(spread, vector(4.0), weights=vector(1, 1)).noise == pytest.approx(math.sqrt(2 * 2.0) / 4)


BATCH = {"x": torch.zeros(6, 2), "labels": torch.tensor([1, -100, 2, 2, -100, -100])}


def weight(weighting, k: int = 1, *, sizes=(4, 2), batch=BATCH, observed=None, full=None) -> float:
    problem = Problem(nn.Identity(), lambda model, batch: None, batch)
    experiment = experiment_of(problem.model, sizes=sizes, problem=problem, weighting=weighting)
    start = sum(sizes[:k])
    micro = {key: value[start : start + sizes[k]] for key, value in batch.items()}
    return micro_batch_weight(experiment, k, micro, observed or Observed(), full or Observed())


def counted(*counts: tuple[float, int]) -> Observed:
    """What a pass shows whose losses divided by these numbers, of so many targets."""
    divisors = [(torch.tensor(total), numel) for total, numel in counts]
    return Observed(target_counts=[TargetCount(divisor, divisor, numel, -100) for divisor, numel in divisors])


@pytest.mark.parametrize(
    ("weighting", "k", "expected"),
    [
        ("uniform", 0, 1 / 2),
        ("none", 0, 1.0),
        ("samples", 0, 4 / 6),
        ("samples", 1, 2 / 6),
        ("tokens", 0, 1.0),  # three valid targets, all in the first micro-batch
        ("tokens", 1, 0.0),
        ([0.3, 0.7], 1, 0.7),
        (lambda micro: len(micro["x"]) / 10, 1, 0.2),
        (lambda micro, batch: len(micro["x"]) / len(batch["x"]), 0, 4 / 6),
        (lambda micro: torch.tensor(0.25), 0, 0.25),
        (torch.tensor([1.0, 2.0]), 1, 2.0),
        (lambda micro, scale=2.0: scale, 0, 2.0),
    ],
)
def test_weights(weighting, k: int, expected: float) -> None:
    assert weight(weighting, k) == pytest.approx(expected)


def test_what_the_loss_divided_by_counts_before_the_targets_of_the_batch() -> None:
    assert weight("tokens", observed=counted((5.0, 8)), full=counted((20.0, 32))) == 0.25
    assert weight("tokens", observed=counted((2.0, 2), (6.0, 8)), full=counted((3.0, 3), (24.0, 32))) == 0.25


@pytest.mark.parametrize(("valid", "share"), [(14.0, 0.25), (16.0, 1 / 3)])
def test_calls_that_ignore_targets_count_where_the_mean_is_divided_by_hand(valid: float, share: float) -> None:
    """Those that ignore none say nothing: then the labels of the batch count, here 1 of 3 in the second micro-batch."""

    def summed(*counts: float) -> Observed:
        return Observed([TargetCount(torch.tensor(n), torch.tensor(n), 8, -1, is_mean=False) for n in counts])

    batch = {"labels": torch.tensor([1, 2, -100, -100, 3, -100])}
    full, part = summed(valid - 8, 8.0), summed(valid / 8, valid / 8)
    assert weight("tokens", batch=batch, observed=part, full=full) == share


@pytest.mark.parametrize(
    ("weighting", "sentence"),
    [
        ("even", '`weighting`: must be "uniform", "samples", "tokens" or "none", or one number per micro-batch, got'),
        ([0.5], "must have one number per micro-batch: 1 numbers, but steps is 2"),
        (["a", "b"], 'or one number per micro-batch, got \\["a", "b"\\]'),
        (3, "or one number per micro-batch, got 3"),
    ],
)
def test_what_is_no_weighting_says_so(weighting, sentence: str) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ProblemError, match=sentence):
        gaverify.verify(model, lambda model, batch: model(batch).mean(), torch.ones(4, 2), 2, weighting)


@pytest.mark.parametrize(
    ("weighting", "batch", "sentence"),
    [
        (lambda micro: None, BATCH, "returned None"),
        ("tokens", {"x": torch.zeros(6, 2)}, "no integer targets"),
        ("tokens", {"labels": torch.full((6,), -100)}, "no target that the loss counts"),
    ],
)
def test_weights_that_are_no_number_say_so(weighting, batch, sentence: str) -> None:
    with pytest.raises(ProblemError, match=sentence):
        weight(weighting, batch=batch)


def test_valid_targets_are_those_of_the_largest_loss() -> None:
    assert valid_targets([Observed(), counted((2.0, 4), (9.0, 16))]) == [None, 9.0]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": torch.tensor([1]), "z": torch.tensor([2])}, 1),
        ({"a": torch.tensor([1]), "b": torch.tensor([2])}, 2),
        ((torch.zeros(1), torch.tensor([3])), 3),
        (SimpleNamespace(x=torch.zeros(1), y=torch.tensor([4])), 4),
        ((torch.zeros(1),), None),
    ],
)
def test_targets_are_found_by_name_then_by_type(batch, expected) -> None:
    targets = targets_of(batch)
    assert (None if targets is None else int(targets)) == expected
