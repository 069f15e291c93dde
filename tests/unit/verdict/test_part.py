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
from problems import Net as Parts
from problems import cross_entropy as loss
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


def methods(verdict: gaverify.Verdict) -> set[Method]:
    return {Method(row.method) for row in verdict.parameters}


@pytest.fixture
def open_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets working precision explain half a unit of roundoff only: then every processor leaves parameters open.

    How many units a few layers round by differs between processors; that they round at all does not.
    """
    monkeypatch.setattr(criteria, "FEW_UNITS", 0.5)


def quiet(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> Problem:
    """A small network whose rounding two samples tell, and which is equivalent; with another forward around it."""
    made = problems_small.planted("mlp", "weight", 0.0)[0]
    if forward is not None:
        made.model = Parts(lambda net, x: forward(net.inner, x), inner=made.model)
    return made


def summed() -> Problem:
    made = quiet()
    inner = made.loss
    made.loss = lambda model, batch: inner(model, batch) * len(batch[0])
    return made


def pairs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if len(x) < 2:
        raise ValueError("two at least")
    return model(x)


def dropped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(model(nn.functional.dropout(x, 0.2)), 0.2)


def checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def ordered(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x + 0 * torch.randperm(len(x)).sum())


def drawing_no_rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x + 0 * torch.rand(2 * len(x) + 1).sum())


@pytest.mark.usefixtures("open_rows")
@pytest.mark.parametrize(
    ("build", "options", "is_asked", "is_settled"),
    [
        (quiet, {}, True, True),
        (summed, {"weighting": "none"}, True, True),
        (lambda: quiet(dropped), {}, True, True),
        # checkpointing forms all gradients or none
        (lambda: quiet(checkpointed), {}, True, True),
        (lambda: quiet(pairs), {}, True, False),
        (lambda: quiet(ordered), {}, False, False),
        (lambda: quiet(drawing_no_rows), {}, False, False),
    ],
    ids=["mean", "sum", "draws", "checkpoint", "no single sample", "an order", "draws of no rows"],
)
def test_a_few_open_parameters_are_settled_by_two_samples(
    build: Callable[[], Problem], options: dict[str, Any], is_asked: bool, is_settled: bool
) -> None:
    verdict, told = begun(build(), steps=4, diagnose=False, **options)
    assert verdict.outcome is Outcome.EQUIVALENT and ("two samples" in told) is is_asked
    if is_settled:
        assert Method.TWO_SAMPLES in methods(verdict) <= {Method.WORKING_PRECISION, Method.TWO_SAMPLES}
        assert verdict.method == Method.TWO_SAMPLES and verdict.resolution <= 1e-5 and "control" in verdict.timings
    else:
        assert methods(verdict) == {Method.FLOAT64_CONTROL}


def test_a_fault_within_their_rounding_is_seen_by_two_samples() -> None:
    made, options, _ = problems_small.planted("convolutions", "early-gain", 1.5e-6, 3)
    verdict, told = begun(made, steps=4, diagnose=False, weighting=options["weighting"])
    assert "two samples" in told and verdict.method != Method.TWO_SAMPLES
    assert verdict.outcome is Outcome.DIVERGENT


@pytest.mark.usefixtures("open_rows")
@pytest.mark.parametrize("weighting", ["none", [0.25, 0.25, 0.25, 0.25 + 2e-7]], ids=["sum", "nearly a mean"])
def test_no_part_is_run_where_weights_are_wrong(weighting: Any) -> None:
    verdict, told = begun(quiet(), steps=4, weighting=weighting, diagnose=False)
    assert verdict.outcome is Outcome.DIVERGENT and "two samples" not in told


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, Method.WORKING_PRECISION),
        ({"exact": True}, Method.FLOAT64_CONTROL),
        ({"exact": True, "dtype": "float64"}, Method.WORKING_PRECISION),
    ],
    ids=["the bounds as they are leave nothing open", "exact", "nothing is finer than float64"],
)
def test_float64_decides_what_is_asked_of_it(options: dict[str, Any], method: Method) -> None:
    verdict = gaverify.verify(quiet(), steps=4, **options)
    assert verdict.outcome is Outcome.EQUIVALENT and methods(verdict) == {method}


def single(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A kernel for less than float64 alone."""
    if x.dtype is torch.float64:
        raise TypeError(f"expected float32, got {x.dtype}")
    return x * x.sigmoid()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_exact_changes_nothing_where_a_kernel_has_no_float64(norm: Any, dtype: str | None) -> None:
    def verdict(**options: Any) -> gaverify.Verdict:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), norm(8), Parts(single), nn.Linear(8, 4))
        batch = (torch.randn(16, 6), torch.randint(4, (16,)))
        return gaverify.verify(Problem(model, loss, batch), steps=4, dtype=dtype, **options)

    default, exact = verdict(), verdict(exact=True)
    assert exact.outcome is default.outcome
    assert [(row.method, row.outcome) for row in exact.parameters] == [
        (row.method, row.outcome) for row in default.parameters
    ]
    assert [finding.code for finding in exact.findings] == [finding.code for finding in default.findings]
    assert "expected float32" in exact.control_failure


def test_exact_and_tolerances_contradict_each_other() -> None:
    with pytest.raises(gaverify.ProblemError, match="one or the other"):
        gaverify.verify(quiet(), steps=4, exact=True, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.usefixtures("open_rows")
def test_a_target_less_in_a_late_micro_batch_is_seen(ignored: int) -> None:
    """One target of 160,000 that the loss ignores: 5e-6 of the gradient, and nothing of it in the first two samples."""
    torch.manual_seed(0)
    words, targets = torch.randint(50, (8, 20_000)), torch.randint(50, (8, 20_000))
    targets[7, :ignored] = -100
    # each word by itself, so that no micro-batch differs from another but in its targets
    model = nn.Sequential(nn.Embedding(50, 16), nn.Tanh(), nn.Linear(16, 50), nn.Flatten(0, -2))
    problem = Problem(model, lambda model, batch: loss(model, (batch[0], batch[1].flatten())), (words, targets))
    verdict = gaverify.verify(problem, steps=4, diagnose=False)
    assert verdict.outcome is (Outcome.DIVERGENT if ignored else Outcome.EQUIVALENT)


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


Mix = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and between them what a test puts there."""

    def __init__(self, mix: Mix | None = None, width: int = 384) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(128, width), nn.Linear(width, 64), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(self.mix(h) if self.mix is not None else h)


def problem(
    mix: Mix | None = None, *, width: int = 384, alike: bool = False, masked: list[int] | None = None, run: Any = loss
) -> Problem:
    """A window of `Net`; with its first samples alike, with targets that do not count, or with another loss."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 128), torch.randint(64, (64,))
    if alike:
        x[:8], y[:8] = x[0], y[0]
    y[masked or []] = -100
    return Problem(Net(mix, width), run, (x, y))


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


ONE_BY_ONE, WINDOW = [1, 1, 1, 1], [64, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("mix", "steps", "method", "forwards"),
    [
        (None, 4, Method.FEW_SAMPLES, {"bfloat16": [*WINDOW, 4, *ONE_BY_ONE], "float32": [4, *ONE_BY_ONE]}),
        (None, 16, Method.FEW_SAMPLES, {"bfloat16": [64, *[4] * 16, *ONE_BY_ONE], "float32": [4, *ONE_BY_ONE]}),
        # what adding up loses is read from the whole batch: the precision of the first samples would tell nothing more
        (
            lambda h: torch.softmax(h, 0),
            4,
            Method.FLOAT64_PART,
            {"bfloat16": [*WINDOW, 4, *ONE_BY_ONE], "float32": [4, *ONE_BY_ONE], "float64": [8, 4, 4]},
        ),
    ],
    ids=["equivalent", "the first micro-batch is the few samples", "divergent"],
)
def test_few_samples_run_in_float32_and_those_of_a_divergence_in_float64_alone(
    mix: Mix | None, steps: int, method: Method, forwards: dict[str, list[int]]
) -> None:
    verdict, noted = forwards_of(problem(mix), steps=steps, dtype="bfloat16", diagnose=False)
    assert verdict.method == method
    assert {kind: [n for each, n in noted if each == kind] for kind, _ in noted} == forwards


def shrinking(model: nn.Module, batch: Any) -> torch.Tensor:
    """Shrinks what has accumulated: each micro-batch's own gradient is right."""
    gradient = model.last.weight.grad  # type: ignore[union-attr]
    if gradient is not None:
        gradient.mul_(0.95)
    return loss(model, batch)


def nearly_cancelling() -> Problem:
    """The sum of the samples' gradients is far smaller than what each is rounded by."""
    made = problem(run=lambda model, batch: (model(batch[0]).sum(1) * batch[1]).mean())
    made.batch = (1 + 0.03 * made.batch[0], torch.tensor([1.0, -1.0]).repeat(32))
    return made


def without_gradient_at_first() -> Problem:
    def summed(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="sum") / 64

    return problem(masked=[0, 1, 2, 3], run=summed)


def branching() -> Problem:
    """A layer that large batches alone use."""
    made = problem()
    extra = nn.Linear(128, 64)
    made.model = Parts(
        lambda net, x: net.inner(x) + (net.extra(x) if len(x) > 20 else 0), inner=made.model, extra=extra
    )
    return made


FEW, PART, ALL = Method.FEW_SAMPLES, Method.FLOAT64_PART, Method.FLOAT64_CONTROL
COUNTED = {3, 4, 5, 6, 8, 9, 10, 11, *range(16, 24), *range(32, 40), *range(48, 56)}
SAME, OTHER, OPEN = Outcome.EQUIVALENT, Outcome.DIVERGENT, Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("build", "options", "outcome", "method"),
    [
        (problem, {"exact": True}, SAME, ALL),
        (lambda: problem(width=64), {}, SAME, ALL),
        (problem, {"weighting": [0.2575, 0.25, 0.25, 0.25]}, OTHER, ALL),
        (problem, {"weighting": [0.2525, 0.25, 0.25, 0.25]}, OTHER, ALL),
        (problem, {"weighting": [0.5, 0.5, 0.0, 0.0]}, OTHER, ALL),
        (lambda: problem(masked=[0]), {}, OTHER, ALL),
        (lambda: problem(masked=[0]), {"weighting": "tokens"}, SAME, FEW),
        # one of the first four samples counts, so that no grouping rounds their gradient otherwise
        (lambda: problem(masked=sorted({*range(64)} - COUNTED)), {}, SAME, ALL),
        # what few samples show in float32, a part of the batch tells in float64; the rest all of it
        (lambda: problem(lambda h: h + 0.3 * h.mean(0)), {}, OTHER, PART),
        (lambda: problem(lambda h: h + 3e-3 * h.mean(0)), {}, OTHER, PART),
        (lambda: problem(lambda h: h + 3e-6 * h.mean(0)), {}, OTHER, ALL),
        # the mean of samples that are alike is each of them: what acts on others is seen in the whole batch only
        (lambda: problem(lambda h: h + 3e-3 * h.mean(0), alike=True), {}, OTHER, ALL),
        (lambda: problem(alike=True), {}, SAME, ALL),
        # few samples do not pass the branch; the rest is 10 times what they differ by
        (lambda: problem(lambda h: h * 1.03 + 0.06 * h.mean(0) if len(h) > 20 else h), {}, OTHER, ALL),
        (branching, {}, OTHER, ALL),
        (lambda: problem(run=shrinking), {}, OTHER, ALL),
        (nearly_cancelling, {}, SAME, ALL),
        (without_gradient_at_first, {"weighting": "none"}, SAME, ALL),
        (lambda: problem(run=lambda model, batch: loss(model, batch) * 0.0), {}, OPEN, ALL),
    ],
)
def test_few_samples_decide_only_what_they_show(
    build: Callable[[], Problem], options: dict[str, Any], outcome: Outcome, method: Method
) -> None:
    verdict = verify(build(), **options)
    assert (verdict.outcome, verdict.method) == (outcome, method)
    assert (verdict.few_samples is not None) is (method == FEW)


def test_a_divergence_is_looked_into_and_confirmed_without_float64_of_the_whole_batch() -> None:
    """The rounding that a few samples showed is what a control may leave of the whole batch."""
    coupled, told = begun(problem(lambda h: torch.softmax(h, 0)), steps=4, dtype="bfloat16")
    assert [what for what in told if what.endswith("4 samples")] == ["4 samples", "float32: 4 samples"]
    assert [what for what in told if "float64" in what] == ["float64 control: the full batch"]
    assert told.index("float64 control: the full batch") > told.index("a part of the batch: 8 samples")
    assert coupled.method == Method.FLOAT64_PART
    assert [(finding.code, finding.proven) for finding in coupled.findings[:1]] == [("GAV102", True)]


@pytest.mark.parametrize(
    ("build", "code", "words"),
    [
        (lambda: problem(masked=[0, 1, 2, 4, 8, 9, 10, 11, 12]), "GAV202", "7 of 55, 16 of 55, 16 of 55, 16 of 55"),
        # a fit in bfloat16 knows it to a tenth of a percent; the part in float64 to all digits
        (
            lambda: problem(run=lambda model, batch: loss(model, batch) * len(batch[0])),
            "GAV201",
            "loss by 4 (loss weights 1, 1, 1, 1); gaverify ran it: equivalent",
        ),
    ],
)
def test_weights_are_told_exactly(build: Callable[[], Problem], code: str, words: str) -> None:
    verdict = verify(build(), diagnose=True)
    assert verdict.method == Method.FLOAT64_PART
    finding = verdict.findings[0]
    assert (finding.code, finding.proven) == (code, True) and words in f"{finding.evidence} {finding.remedy}"


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


def thin(mix: Mix | None = None, run: Any = loss) -> Problem:
    """Many layers that each have little to do, with as many parameters as a large model."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in net.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return net.last(mix(x) if mix is not None else x)

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(32))
    model = Parts(forward, layers=layers, last=nn.Linear(48, 8))
    return Problem(model, run, (torch.randn(32, 48), torch.randint(8, (32,))))


PRECISIONS = [
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": None, "autocast": "bfloat16"},
    {"dtype": None, "autocast": "float16"},
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_both_strategies_in_float32_decide_where_the_host_is_the_limit(precision: dict[str, Any]) -> None:
    made = thin()
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    verdict, forwards = forwards_of(made, **{"steps": 4, "diagnose": False, **precision})
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, Method.FLOAT32_RUNS)
    assert [n for _, n in forwards] == 2 * [32, 8, 8, 8, 8]
    assert {kind for kind, _ in forwards[5:]} == {"float32"}
    assert verdict.resolution < 1e-4, "float32's"
    trained = (precision["dtype"] or "float32", precision.get("autocast"))
    assert (verdict.run.dtype, verdict.run.autocast) == trained, "what the user trains in"
    assert any(row.working_difference_norm > 10 * row.difference_norm for row in verdict.parameters)
    assert all(map(torch.equal, before, made.model.parameters()))


@pytest.mark.parametrize("precision", PRECISIONS[::3], ids=str)
@pytest.mark.parametrize(
    ("mix", "options", "code"),
    [
        (None, {"weighting": [0.2575, 0.25, 0.25, 0.25]}, "GAV202"),
        (lambda h: h + 0.01 * h.mean(0), {}, "GAV102"),
        (lambda h: torch.softmax(h, 0), {}, "GAV102"),
    ],
    ids=["weight", "coupled", "softmax"],
)
def test_faults_below_the_rounding_are_found_in_float32(
    mix: Mix | None, options: dict[str, Any], code: str, precision: dict[str, Any]
) -> None:
    verdict = verify(thin(mix), diagnose=True, **options, **precision)
    assert verdict.outcome is Outcome.DIVERGENT and verdict.few_samples is None
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [(code, True)]


def half(model: nn.Module, batch: Any) -> torch.Tensor:
    """A kernel of half a precision alone, for more rows than the few samples are."""
    if model(batch[0]).dtype is torch.float32 and len(batch[0]) > 4:
        raise RuntimeError("no kernel")
    return loss(model, batch)


@pytest.mark.parametrize(
    ("run", "options", "method"),
    [
        (loss, {"steps": 16}, Method.FEW_SAMPLES),
        (loss, {"trace": True}, Method.FEW_SAMPLES),
        (half, {}, Method.FEW_SAMPLES),
    ],
    ids=["fewer passes", "each is shown", "no float32"],
)
def test_both_strategies_do_not_run_again(run: Any, options: dict[str, Any], method: Method) -> None:
    verdict = verify(thin(run=run), **options)
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, method)


def test_what_adding_up_loses_is_told_by_the_whole_batch_in_float32() -> None:
    torch.manual_seed(0)
    model = Parts(lambda net, x: (x * net.scale).sum(1), scale=nn.Parameter(torch.randn(70000)))
    made = Problem(model, lambda model, batch: model(batch[0]).mean(), (torch.rand(64, 70000),))
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
