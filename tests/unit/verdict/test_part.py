"""What a part of the batch settles, or a window's sketches and a few of its samples, and what goes to the control.

Shapes of the windows: B = 64 samples of 128 features in K = 4 micro-batches; 70,000 parameters, so that a part is
worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import problems_small
import pytest
import torch
from forwards import begun, experiment_of, forwards_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import gaverify
from gaverify import Outcome, Problem
from gaverify.passes.dispatch import Observed
from gaverify.passes.experiment import Placement
from gaverify.passes.gradients import PassResult
from gaverify.passes.precision import Arithmetic
from gaverify.records.outcomes import Method
from gaverify.thresholds import FEW_UNITS, U32
from gaverify.verdict import criteria, measurement


def noisy(seed: int = 3) -> Problem:
    """Convolutions whose rounding leaves a few parameters open, and which are equivalent."""
    return problems_small.planted("convolutions", "weight", 0.0, seed)[0]


def methods(verdict: gaverify.Verdict) -> set[Method]:
    return {Method(row.method) for row in verdict.parameters}


@pytest.fixture
def open_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets working precision explain half a unit of roundoff only: then every processor leaves parameters open.

    How many units a few layers round by differs between processors; that they round at all does not.
    """
    monkeypatch.setattr(criteria, "FEW_UNITS", 0.5)


def quiet() -> Problem:
    """A small network whose rounding two samples tell, and which is equivalent."""
    return problems_small.planted("mlp", "weight", 0.0)[0]


@pytest.mark.usefixtures("open_rows")
def test_a_few_open_parameters_are_settled_by_a_part() -> None:
    verdict = gaverify.verify(quiet(), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert verdict.method == Method.TWO_SAMPLES
    assert Method.TWO_SAMPLES in methods(verdict) <= {Method.WORKING_PRECISION, Method.TWO_SAMPLES}
    assert verdict.resolution <= 1e-5
    assert "control" in verdict.timings


def test_the_bounds_as_they_are_leave_nothing_open_there() -> None:
    assert methods(gaverify.verify(quiet(), steps=4)) == {Method.WORKING_PRECISION}


def test_exact_asks_float64_for_everything() -> None:
    for problem in (noisy(), problems_small.planted("mlp", "weight", 0.0)[0]):
        verdict = gaverify.verify(problem, steps=4, exact=True)
        assert verdict.outcome is Outcome.EQUIVALENT
        assert methods(verdict) == {Method.FLOAT64_CONTROL}


class _Swish(torch.autograd.Function):
    """A kernel for float32 alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"expected float32, got {x.dtype}")
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        share = x.sigmoid()
        return gradient * (share + x * share * (1 - share))


class _Float32Alone(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Swish.apply(x)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_exact_changes_nothing_where_a_kernel_has_no_float64(norm: Any, dtype: str | None) -> None:
    def verdict(**options: Any) -> gaverify.Verdict:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), norm(8), _Float32Alone(), nn.Linear(8, 4))
        batch = (torch.randn(16, 6), torch.randint(4, (16,)))
        return gaverify.verify(Problem(model, cross_entropy, batch), steps=4, dtype=dtype, **options)

    default, exact = verdict(), verdict(exact=True)
    assert exact.outcome is default.outcome
    assert [(row.method, row.outcome) for row in exact.parameters] == [
        (row.method, row.outcome) for row in default.parameters
    ]
    assert [finding.code for finding in exact.findings] == [finding.code for finding in default.findings]
    assert "expected float32" in exact.control_failure


def test_exact_in_a_float64_model_has_nothing_finer_to_ask() -> None:
    problem = problems_small.planted("mlp", "weight", 0.0)[0]
    verdict = gaverify.verify(problem, steps=4, dtype="float64", exact=True)
    assert methods(verdict) == {Method.WORKING_PRECISION}


def test_exact_and_tolerances_contradict_each_other() -> None:
    with pytest.raises(gaverify.ProblemError, match="one or the other"):
        gaverify.verify(noisy(), steps=4, exact=True, rtol=1e-3, atol=0.0)


def refused(problem: Problem, **options: Any) -> gaverify.Verdict:
    """Verifies, and checks that two samples were asked and settled nothing."""
    verdict, told = begun(problem, steps=4, diagnose=False, **options)
    assert "two samples" in told and verdict.method != Method.TWO_SAMPLES
    return verdict


@pytest.mark.usefixtures("open_rows")
def test_weights_that_are_a_little_wrong_are_settled_by_no_part() -> None:
    verdict, told = begun(quiet(), steps=4, diagnose=False, weighting=[0.25, 0.25, 0.25, 0.25 + 2e-7])
    assert methods(verdict) == {Method.FLOAT64_CONTROL} and "two samples" not in told


WITHIN = ("convolutions", "early-gain", 1.5e-6, 3)


def test_a_fault_within_their_rounding_is_seen_by_two_samples() -> None:
    problem, options, _ = problems_small.planted(*WITHIN)
    assert refused(problem, weighting=options["weighting"]).outcome is Outcome.DIVERGENT


class Words(nn.Module):
    """Classifies each word by itself, so that no micro-batch differs from another but in its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table(words))).flatten(0, -2)


@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.usefixtures("open_rows")
def test_a_target_less_in_a_late_micro_batch_is_seen(ignored: int) -> None:
    """One target of 160,000 that the loss ignores: 5e-6 of the gradient, and nothing of it in the first two samples."""
    torch.manual_seed(0)
    words, targets = torch.randint(50, (8, 20_000)), torch.randint(50, (8, 20_000))
    targets[7, :ignored] = -100
    problem = Problem(
        Words(), lambda model, batch: cross_entropy(model(batch[0]), batch[1].flatten()), (words, targets)
    )
    verdict = gaverify.verify(problem, steps=4, diagnose=False)
    assert verdict.outcome is (Outcome.DIVERGENT if ignored else Outcome.EQUIVALENT)


@pytest.mark.usefixtures("open_rows")
def test_checkpointing_that_forms_all_gradients_or_none_is_settled_as_well() -> None:
    problem = quiet()

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

    verdict = gaverify.verify(Problem(Checkpointed(problem.model), problem.loss, problem.batch), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.TWO_SAMPLES


@pytest.mark.usefixtures("open_rows")
def test_a_sum_over_the_samples_is_settled_as_a_mean_is() -> None:
    problem = quiet()
    summed = Problem(problem.model, lambda model, batch: problem.loss(model, batch) * len(batch[0]), problem.batch)
    verdict = gaverify.verify(summed, steps=4, weighting="none")
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.TWO_SAMPLES


@pytest.mark.usefixtures("open_rows")
def test_draws_of_two_samples_are_found_in_another_precision_than_they_were_made_in() -> None:
    problem = quiet()
    model = nn.Sequential(nn.Dropout(0.2), problem.model, nn.Dropout(0.2))
    verdict = gaverify.verify(Problem(model, problem.loss, problem.batch), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.TWO_SAMPLES


@pytest.mark.usefixtures("open_rows")
@pytest.mark.parametrize(
    "draw", [torch.randperm, lambda rows: torch.rand(2 * rows + 1)], ids=["an order", "numbers that are no rows"]
)
def test_draws_that_are_open_to_doubt_are_settled_by_no_part(draw: Callable[[int], torch.Tensor]) -> None:
    problem = quiet()

    class Drawing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + 0 * draw(len(x)).sum())

    verdict, told = begun(Problem(Drawing(problem.model), problem.loss, problem.batch), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert verdict.method != Method.TWO_SAMPLES and "two samples" not in told


class Attending(nn.Module):
    """A layer of attention that is run twice, so that nobody knows the terms of its gradients.

    The bias of the keys shifts all logits of a softmax: its gradient is zero but for rounding. `late` lets it act on
    the batch of samples whose last feature is above zero, `own` on each sample by itself.
    """

    def __init__(self, late: float, own: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.late, self.own = late, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flags = (x[:, :1, -1:] > 0).to(x)
        for _ in range(2):
            key, value = self.key(x), self.value(x)
            x = torch.softmax(self.query(x) @ key.mT, -1) @ value
        return x.mean(1) + self.late * (flags * self.key.bias).mean(0) ** 2 + self.own * self.key.bias


@pytest.mark.usefixtures("open_rows")
@pytest.mark.parametrize(
    ("late", "own", "method", "outcome"),
    [
        (0.0, 0.0, Method.TWO_SAMPLES, Outcome.EQUIVALENT),
        (1e-4, 0.0, Method.FLOAT64_CONTROL, Outcome.DIVERGENT),
        (0.0, 1e-6, Method.FLOAT64_CONTROL, Outcome.EQUIVALENT),
    ],
)
def test_a_gradient_of_zero_is_settled_where_it_differs_by_no_more_than_rounding(
    late: float, own: float, method: Method, outcome: Outcome
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 5, 8)
    inputs[:, 0, -1] = torch.linspace(-2, 1, 16)
    batch = inputs, torch.randint(8, (16,))
    model = Attending(late, own)
    verdict = gaverify.verify(model, lambda model, b: cross_entropy(model(b[0]), b[1]), batch, diagnose=False)
    assert (verdict.outcome, verdict.method) == (outcome, method), verdict.parameters


def test_no_part_is_run_where_more_differs_than_rounding() -> None:
    verdict, told = begun(quiet(), steps=4, weighting="none", diagnose=False)
    assert verdict.outcome is Outcome.DIVERGENT and "two samples" not in told


@pytest.mark.usefixtures("open_rows")
def test_a_model_that_takes_no_single_sample_goes_to_float64() -> None:
    problem = quiet()

    class Pairs(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < 2:
                raise ValueError("two at least")
            return self.inner(x)

    verdict = refused(Problem(Pairs(problem.model), problem.loss, problem.batch))
    assert verdict.outcome is Outcome.EQUIVALENT and methods(verdict) == {Method.FLOAT64_CONTROL}


def test_everything_is_put_back() -> None:
    problem = noisy()
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    state = torch.get_rng_state()
    gaverify.verify(problem, steps=4)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())
    assert all(parameter.grad is None for parameter in problem.model.parameters())


Mix = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and between them what a test puts there."""

    def __init__(self, mix: Mix | None = None, width: int = 384) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(128, width), nn.Linear(width, 64), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(self.mix(h) if self.mix is not None else h)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def problem(mix: Mix | None = None, *, width: int = 384, alike: bool = False) -> Problem:
    torch.manual_seed(0)
    x, y = torch.randn(64, 128), torch.randint(64, (64,))
    if alike:
        x[:8], y[:8] = x[0], y[0]
    return Problem(Net(mix, width), loss, (x, y))


def verify(problem: Problem, **options: Any) -> gaverify.Verdict:
    return gaverify.verify(problem, **{"steps": 4, "dtype": "bfloat16", "diagnose": False, **options})


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"autocast": "bfloat16", "dtype": None}])
def test_an_equivalent_window_is_told_by_its_weights_and_a_few_samples(precision: dict[str, Any]) -> None:
    verdict = verify(problem(), **precision)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert {row.method for row in verdict.parameters} == {Method.FEW_SAMPLES}
    few = verdict.few_samples
    assert few is not None and few.samples == 4 and few.structure < FEW_UNITS * U32
    assert few.rest < few.allowed == verdict.resolution < 0.1
    assert few.weights < 0.02


def test_an_equivalent_window_runs_its_few_samples_in_float32_and_none_in_float64() -> None:
    verdict, forwards = forwards_of(problem(), steps=4, dtype="bfloat16", diagnose=False)
    assert verdict.method == Method.FEW_SAMPLES
    assert [n for kind, n in forwards if kind == "bfloat16"] == [64, 16, 16, 16, 16, 4, 1, 1, 1, 1]
    assert [n for kind, n in forwards if kind == "float32"] == [4, 1, 1, 1, 1] and len(forwards) == 15


def test_the_first_micro_batch_is_not_run_again_where_it_is_the_few_samples() -> None:
    verdict, forwards = forwards_of(problem(), steps=16, dtype="bfloat16", diagnose=False)
    assert verdict.method == Method.FEW_SAMPLES
    assert [n for kind, n in forwards if kind == "bfloat16"] == [64, *[4] * 16, 1, 1, 1, 1]


def test_the_first_samples_of_a_divergence_run_in_float64_alone() -> None:
    """What adding up loses is read from the whole batch, so that their own precision would tell nothing more."""
    coupled = problem(lambda h: torch.softmax(h, 0))
    verdict, forwards = forwards_of(coupled, steps=4, dtype="bfloat16", diagnose=False)
    assert verdict.method == Method.FLOAT64_PART
    assert [n for kind, n in forwards if kind == "bfloat16"] == [64, 16, 16, 16, 16, 4, 1, 1, 1, 1]
    assert [n for kind, n in forwards if kind == "float64"] == [8, 4, 4]


def test_float64_tells_what_may_be_the_rounding_of_float32() -> None:
    coupled = problem(lambda h: h + 3e-6 * h.mean(0))
    verdict, forwards = forwards_of(coupled, steps=4, dtype="bfloat16", diagnose=False)
    assert verdict.few_samples is None
    assert [n for kind, n in forwards if kind == "float64"][:5] == [4, 1, 1, 1, 1]


def test_a_small_batch_is_asked_in_float64_as_a_whole() -> None:
    verdict = verify(problem(width=64))
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.FLOAT64_CONTROL


def test_exact_asks_float64_of_the_whole_batch() -> None:
    assert verify(problem(), exact=True).method == Method.FLOAT64_CONTROL


def divergent(verdict: gaverify.Verdict) -> bool:
    """Whether the float64 control found a divergence that the window left open; what adding up loses it has told."""
    lost = [finding for finding in verdict.findings if finding.code == "GAV501"]
    assert all("4 samples" in str(finding.evidence) for finding in lost)
    return verdict.outcome is Outcome.DIVERGENT and verdict.few_samples is None


@pytest.mark.parametrize("weight", [0.2575, 0.2525])
def test_one_weight_of_four_that_is_a_little_off(weight: float) -> None:
    assert divergent(verify(problem(), weighting=[weight, 0.25, 0.25, 0.25]))


def test_a_divergence_is_looked_into_and_confirmed_without_float64_of_the_whole_batch() -> None:
    """The rounding that a few samples showed is what a control may leave of the whole batch."""
    told: list[str] = []
    coupled = verify(problem(lambda h: torch.softmax(h, 0)), diagnose=True, progress=lambda what, *_: told.append(what))
    assert [what for what in told if what.endswith("4 samples")] == ["4 samples", "float32: 4 samples"]
    assert [what for what in told if "float64" in what] == ["float64 control: the full batch"]
    assert told.index("float64 control: the full batch") > told.index("a part of the batch: 8 samples")
    assert coupled.method == Method.FLOAT64_PART
    assert [(finding.code, finding.proven) for finding in coupled.findings[:1]] == [("GAV102", True)]
    made = problem()
    made.batch[1][[0, 1, 2, 4, 8, 9, 10, 11, 12]] = -100
    tokens = verify(made, diagnose=True)
    assert tokens.method == Method.FLOAT64_PART
    finding = tokens.findings[0]
    assert finding.code == "GAV202" and finding.proven
    assert "7 of 55, 16 of 55, 16 of 55, 16 of 55" in str(finding.evidence)
    assert "weighting tokens" in finding.remedy


def test_a_part_whose_counts_differ_is_no_fault_of_a_batch_whose_counts_do_not() -> None:
    """One of the first four samples counts, so that no grouping rounds their gradient otherwise."""
    made = problem()
    made.batch[1][:] = -100
    made.batch[1][[3, 4, 5, 6, 8, 9, 10, 11, *range(16, 24), *range(32, 40), *range(48, 56)]] = 1
    assert verify(made).outcome is Outcome.EQUIVALENT


def test_a_scale_is_told_exactly() -> None:
    """A fit in bfloat16 knows it to a tenth of a percent; the part in float64 to all digits."""
    made = problem()
    made.loss = lambda model, batch: loss(model, batch) * len(batch[0])
    verdict = verify(made, diagnose=True)
    assert verdict.method == Method.FLOAT64_PART
    assert verdict.findings[0].code == "GAV201" and verdict.findings[0].proven
    told = "loss by 4 (loss weights 1, 1, 1, 1); gaverify ran it: equivalent"
    assert verdict.findings[0].remedy.endswith(told)


def test_a_mean_of_means_over_15_and_16_valid_targets() -> None:
    made = problem()
    made.batch[1][0] = -100
    assert divergent(verify(made))
    assert verify(made, weighting="tokens").few_samples is not None


@pytest.mark.parametrize("share", [0.3, 3e-3, 3e-6])
def test_samples_that_act_on_each_other_show_below_the_rounding(share: float) -> None:
    found = verify(problem(lambda h: h + share * h.mean(0)))
    assert found.few_samples is None
    assert divergent(found)
    # what few samples show in float32, a part of the batch tells in float64; the rest all of it
    assert found.method == (Method.FLOAT64_PART if share > 1e-3 else Method.FLOAT64_CONTROL)


def test_samples_that_are_alike_say_nothing_about_structure() -> None:
    """Their mean is each of them: what acts on others is seen in the whole batch only."""
    assert divergent(verify(problem(lambda h: h + 3e-3 * h.mean(0), alike=True)))
    assert verify(problem(alike=True)).method == Method.FLOAT64_CONTROL


def test_what_shows_in_large_batches_only_is_more_than_rounding() -> None:
    """A few samples do not pass the branch; the rest is 10 times what they differ by."""
    found = verify(problem(lambda h: h * 1.03 + 0.06 * h.mean(0) if len(h) > 20 else h))
    assert divergent(found)


def test_gradients_that_do_not_add_up() -> None:
    """A forward that shrinks what has accumulated: each micro-batch's own gradient is right."""
    made = problem()

    def shrinking(model: nn.Module, batch: Any) -> torch.Tensor:
        gradient = model.last.weight.grad
        if gradient is not None:
            gradient.mul_(0.95)
        return loss(model, batch)

    made.loss = shrinking
    assert verify(made).few_samples is None


def test_a_rounding_above_a_tenth_of_the_gradient_says_nothing() -> None:
    """Samples that nearly cancel: the sum of their gradients is far smaller than what each is rounded by."""
    made = problem()
    inputs, _ = made.batch
    made.batch = (1 + 0.03 * inputs, torch.tensor([1.0, -1.0]).repeat(32))
    made.loss = lambda model, batch: (model(batch[0]).sum(1) * batch[1]).mean()
    assert verify(made).few_samples is None


def test_samples_without_a_gradient_say_nothing() -> None:
    made = problem()
    made.batch[1][:4] = -100
    made.loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="sum") / 64
    assert verify(made, weighting="none").method == Method.FLOAT64_CONTROL


def test_a_gradient_of_zeros_is_no_window() -> None:
    made = problem()
    made.loss = lambda model, batch: loss(model, batch) * 0.0
    assert verify(made).outcome is Outcome.INCONCLUSIVE


def test_a_micro_batch_that_counts_for_nothing() -> None:
    assert divergent(verify(problem(), weighting=[0.5, 0.5, 0.0, 0.0]))


def test_a_gradient_on_one_side_only_is_no_question_of_numbers() -> None:
    class Branching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (0.0 * self.extra(x) if len(x) > 20 else 0.0)

    made = problem()
    made.model = Branching()
    assert divergent(verify(made))


def test_what_adding_up_loses_is_told() -> None:
    verdict = verify(problem(), steps=64)
    assert verdict.few_samples is not None and verdict.few_samples.lost > verdict.few_samples.error
    assert [finding.code for finding in verdict.findings] == ["GAV501"]
    assert "4 samples" in str(verdict.findings[0].evidence)


def test_a_weight_that_no_operation_can_lift_is_copied() -> None:
    """A model that reads its weights' memory itself: the few samples run in a copy of it."""
    made = problem()

    class Reading(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x @ self.first.weight.data.mT @ self.first.weight.data))

    torch.manual_seed(0)
    made.model = Reading()
    verdict = verify(made)
    assert verdict.few_samples is not None and verdict.few_samples.structure < FEW_UNITS * U32


# Where the host is the limit, both strategies run once more in float32 in the place of the few samples.


class Thin(nn.Module):
    """Many layers that each have little to do, with as many parameters as a large model."""

    def __init__(self, mix: Mix | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(32))
        self.last, self.mix = nn.Linear(48, 8), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.last(self.mix(x) if self.mix is not None else x)


def thin(mix: Mix | None = None, run_loss: Any = loss, model: nn.Module | None = None) -> Problem:
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 48), torch.randint(8, (32,))
    return Problem(model or Thin(mix), run_loss, (inputs, targets))


PRECISIONS = [
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": None, "autocast": "bfloat16"},
    {"dtype": None, "autocast": "float16"},
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_both_strategies_in_float32_decide_where_the_host_is_the_limit(
    precision: dict[str, Any],
) -> None:
    made = thin()
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    verdict, forwards = forwards_of(made, **{"steps": 4, "diagnose": False, **precision})
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, Method.FLOAT32_RUNS)
    assert [n for _, n in forwards] == 2 * [32, 8, 8, 8, 8]
    assert {kind for kind, _ in forwards[5:]} == {"float32"}
    assert verdict.resolution < 1e-4, "float32's"
    assert (verdict.run.dtype, verdict.run.autocast) == (
        precision["dtype"] or "float32",
        precision.get("autocast"),
    ), "what the user trains in"
    assert any(row.working_difference_norm > 10 * row.difference_norm for row in verdict.parameters)
    assert all(map(torch.equal, before, made.model.parameters()))


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    ("made", "options", "code"),
    [
        (lambda: thin(), {"weighting": [0.2575, 0.25, 0.25, 0.25]}, "GAV202"),
        (lambda: thin(lambda h: h + 0.01 * h.mean(0)), {}, "GAV102"),
        (lambda: thin(lambda h: h + 0.1 * h.mean(0)), {}, "GAV102"),
        (lambda: thin(lambda h: torch.softmax(h, 0)), {}, "GAV102"),
    ],
    ids=["weight", "coupled-1", "coupled-10", "softmax"],
)
def test_faults_below_the_rounding_are_found_in_float32(
    made: Callable[[], Problem], options: dict[str, Any], code: str, precision: dict[str, Any]
) -> None:
    verdict = verify(made(), diagnose=True, **options, **precision)
    assert verdict.outcome is Outcome.DIVERGENT and verdict.few_samples is None
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [(code, True)]


@pytest.mark.parametrize("options", [{"steps": 16}, {"trace": True}], ids=str)
def test_few_samples_decide_where_they_are_fewer_passes_and_where_each_is_shown(options: dict[str, Any]) -> None:
    verdict = verify(thin(), **options)
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method != Method.FLOAT32_RUNS


def test_few_samples_decide_where_float32_does_not_run() -> None:
    """A kernel of half a precision alone, for more rows than the few samples are."""

    def half(model: nn.Module, batch: Any) -> torch.Tensor:
        if model(batch[0]).dtype is torch.float32 and len(batch[0]) > 4:
            raise RuntimeError("no kernel")
        return loss(model, batch)

    verdict = verify(thin(run_loss=half))
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, Method.FEW_SAMPLES)


def test_what_adding_up_loses_is_told_by_the_whole_batch_in_float32() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(70000))

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        return (batch[0] * model.scale).sum(1).mean()

    torch.manual_seed(0)
    made = Problem(Scales(), mean, (torch.rand(64, 70000),))
    verdict = verify(made, steps=8)
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, Method.FLOAT32_RUNS)
    (finding,) = verdict.findings
    assert (finding.code, finding.proven) == ("GAV501", False)
    assert "64 samples" in str(finding.evidence)
    exact = made.batch[0].bfloat16().double().mean(0)
    errors = [relative(copied.bfloat16().double(), exact) for copied in (exact, accumulated(made.batch[0].bfloat16()))]
    values = finding.evidence[0].values
    assert (values["full"], values["accumulated"]) == pytest.approx(errors, rel=0.1)


def relative(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    return float((rounded - exact).norm() / exact.norm())


def accumulated(inputs: torch.Tensor) -> torch.Tensor:
    """What eight gradients in bfloat16 add up to."""
    total = torch.zeros_like(inputs[0])
    for rows in inputs.chunk(8):
        total += (rows / 64).sum(0)
    return total


@pytest.mark.parametrize(
    ("device", "kind", "elements", "steps", "batch_size", "each", "is_cheaper"),
    [
        ("cuda", torch.bfloat16, 1 << 20, 4, 32, 1 << 24, True),
        ("cuda", torch.bfloat16, 1 << 20, 4, 32, 1 << 25, False),  # more to multiply than the host needs to launch
        ("cpu", torch.bfloat16, 1 << 20, 4, 32, 1 << 16, True),
        ("cpu", torch.bfloat16, 1 << 20, 4, 32, 1 << 24, False),
        ("cuda", torch.bfloat16, 1 << 27, 4, 32, 1 << 24, False),  # copies of the weights that are too large
        ("cuda", torch.float32, 1 << 27, 4, 32, 1 << 24, True),  # under autocast nothing is copied
        ("cuda", torch.bfloat16, 1 << 20, 9, 32, 1 << 24, True),
        ("cuda", torch.bfloat16, 1 << 20, 10, 32, 1 << 24, False),  # more passes than those of four samples, twice
        ("cuda", torch.bfloat16, 1 << 20, 5, 8, 1 << 24, True),
        ("cuda", torch.bfloat16, 1 << 20, 6, 8, 1 << 24, False),  # of two samples
    ],
)
def test_where_float32_costs_less_than_a_few_samples(
    device: str, kind: torch.dtype, elements: int, steps: int, batch_size: int, each: int, is_cheaper: bool
) -> None:
    parameters = {"w": torch.empty(elements, dtype=kind, device="meta")}
    experiment = experiment_of(
        nn.Identity(),
        parameters=parameters,
        batch_size=batch_size,
        sizes=(batch_size // steps,) * steps,
        placement=Placement((torch.device(device),)),
    )
    observed = Observed(arithmetic=Arithmetic(operations=100, work=100 * each))
    full = PassResult({}, 1.0, observed=(observed,))
    assert measurement.is_cheaper_in_float32(experiment, full) is is_cheaper
