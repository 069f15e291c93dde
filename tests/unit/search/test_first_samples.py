"""Controls of the bench, of a part of the batch, and what confirms them on the whole."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import measured
import problems_backward
import problems_coupling
import problems_state
import problems_statistics
import problems_weights
import pytest
import torch
import torch.nn.functional as F
from forwards import begun, experiment_of, make_large
from problems import Case, Net, Problem, cross_entropy, fault_codes, mlp, squared_error, story
from torch import nn

import gaverify
from gaverify import Finding, Verdict
from gaverify.cli import main
from gaverify.errors import ProblemError
from gaverify.passes import dispatch
from gaverify.passes.isolation import ModelState
from gaverify.records.comparison import Comparison, Repeatability
from gaverify.records.experiment import ControlKind, ControlRun
from gaverify.records.outcomes import Method
from gaverify.search import confirming, operations, proof
from gaverify.search.bench import Bench, find_needed

# A divergence is judged and searched on a part of the batch, and confirmed on all of it; else the whole batch is.


_FAMILIES = (
    problems_backward,
    problems_coupling,
    problems_weights,
    problems_state,
    problems_statistics,
)
_CASES = {case.id: case for family in _FAMILIES for case in family.FAULTS}


def large(case: Case) -> Problem:
    """The problem of a case, with a large model."""
    problem = case.build()
    make_large(problem.model)
    return problem


def centre(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def flagged_samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Sixteen samples whose last feature is one in the second half, which the first samples do not reach."""
    inputs = torch.randn(16, 6)
    inputs[:, -1] = (torch.arange(16) >= 8).float()
    return inputs, torch.randint(3, (16,))


def verified(everywhere: bool, flagged: bool, *, is_large: bool = True, **options: object) -> Verdict:
    """With a fault that all samples show, in the model, and one of those in the second half, in the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Net(centre) if everywhere else nn.Identity(), nn.Linear(8, 3))
    if is_large:
        make_large(model)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = model(batch[0])
        coupled = (batch[0][:, -1:] * found).sum(0).square().sum() if flagged else 0.0
        return F.cross_entropy(found, batch[1]) + coupled

    return gaverify.verify(model, loss, flagged_samples(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("everywhere", "flagged", "options", "part", "method", "codes"),
    [
        (True, False, {}, (2, 2), Method.FLOAT64_PART, {"GAV102"}),
        (True, False, {"exact": True}, (), Method.FLOAT64_CONTROL, {"GAV102"}),
        (True, False, {"is_large": False}, (), Method.FLOAT64_CONTROL, {"GAV102"}),
        (False, True, {}, (), Method.FLOAT64_CONTROL, {"GAV103"}),
        (True, True, {}, (), Method.FLOAT64_CONTROL, {"GAV102", "GAV103"}),
        (False, False, {}, (), Method.WORKING_PRECISION, set()),
    ],
    ids=["all samples", "exact", "a small batch", "only later samples", "both", "neither"],
)
def test_what_all_samples_show_is_found_in_a_part_and_confirmed_on_the_whole(
    everywhere: bool, flagged: bool, options: dict[str, Any], part: tuple[int, ...], method: Method, codes: set[str]
) -> None:
    verdict = verified(everywhere, flagged, **options)
    assert (verdict.run.part, verdict.method, fault_codes(verdict)) == (part, method, codes), story(verdict)
    faults = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert all(finding.proven for finding in faults), story(verdict)
    # a parameter that nothing uses has no norm, and hides no other's
    assert any(evidence.probe == "harm" for finding in faults for evidence in finding.evidence) is bool(faults)


def couple_late(x: torch.Tensor) -> torch.Tensor:
    """Couples the samples of the second half."""
    late = (x[:, -1:] > 0).to(x)
    return x + late * (late * x).mean(0)


@pytest.mark.parametrize(
    ("second", "is_divergent"),
    [(couple_late, True), (lambda x: x - 0.5 * x.mean(0) if len(x) < 4 else x, False)],
    ids=["late samples alone", "micro-batches smaller than any of the whole"],
)
def test_a_parameter_that_the_whole_shows_otherwise_is_not_decided_by_the_part(
    second: Callable[[torch.Tensor], torch.Tensor], is_divergent: bool
) -> None:
    def both(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two branches, the first of which acts on all samples."""
        return centre(net, net.first(x)), net.other(second(x))

    torch.manual_seed(0)
    model = make_large(Net(both, first=nn.Linear(6, 3), other=nn.Linear(6, 3)))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return sum(F.cross_entropy(each, batch[1]) for each in model(batch[0]))  # type: ignore[return-value]

    verdict, told = begun(Problem(model, loss, flagged_samples()), diagnose=False)
    assert "a part of the batch: 4 samples" in told
    assert {"first.weight"} | ({"other.weight"} if is_divergent else set()) == {
        row.name for row in verdict.divergent if row.name.endswith("weight")
    }, story(verdict)


class Counting(nn.Module):
    """Two numbers that each forward changes: one acts on all samples, the other on those of the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("all", torch.ones(()))
        self.register_buffer("late", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.all, self.late = self.all + x[:, 0].mean(), self.late + x[:, 1].mean()
        return self.layer(x) * (self.all + (x[:, -1:] > 0) * self.late)


def test_state_that_the_part_does_not_need_is_named_where_the_whole_does() -> None:
    torch.manual_seed(0)
    verdict = gaverify.verify(make_large(Counting()), nn.CrossEntropyLoss(), flagged_samples())
    (finding,) = [each for each in verdict.findings if each.severity == "fault"]
    assert "`all`" in finding.summary and "`late`" in finding.summary, story(verdict)


def said(verdict: Verdict) -> list[tuple[object, ...]]:
    return sorted((f.code, f.severity, f.proven, f.remedy, str(f.location)) for f in verdict.findings)


def shift_large(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses a parameter in batches that are larger than a micro-batch."""
    return x + net.shift if len(x) > 4 else x


@pytest.mark.parametrize(
    ("options", "count", "behind", "is_looked_at"),
    [
        ({}, 16, nn.Identity(), True),
        ({"weighting": "none"}, 16, nn.Identity(), True),
        ({"weighting": [0.25] * 4}, 16, nn.Identity(), False),
        ({}, 16, Net(shift_large, shift=nn.Parameter(torch.ones(()))), False),
        ({}, 8, nn.Identity(), True),
        ({"steps": 3}, 6, nn.Identity(), False),
    ],
    ids=["mean", "sum", "numbers", "missing", "small", "more than half of it"],
)
def test_first_samples_are_like_the_whole_or_there_are_none(
    options: dict[str, Any], count: int, behind: nn.Module, is_looked_at: bool
) -> None:
    torch.manual_seed(0)
    model = make_large(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Net(centre), nn.Linear(8, 3), behind))
    problem = Problem(model, nn.CrossEntropyLoss(), (torch.randn(count, 6), torch.randint(3, (count,))))
    assert ("a part of the batch: 4 samples" in begun(problem, **options)[1]) is is_looked_at


@pytest.mark.parametrize(
    "name", ("A01", "A11", "B01", "B02", "B11", "D03", "C02", "A08", "hard-examples", "constant-beside-backward")
)
def test_a_part_finds_what_the_whole_finds(name: str) -> None:
    case: Case = _CASES[name]
    # A08: two samples of four in a micro-batch lie in a convolution as its channels could
    steps = 2 if name == "A08" else case.steps
    part = gaverify.verify(large(case), steps=steps, **case.options)
    whole = gaverify.verify(case.build(), steps=steps, **case.options)
    assert said(part) == said(whole), story(part)
    assert {row.name for row in part.divergent} == {row.name for row in whole.divergent}


@pytest.mark.parametrize(("name", "again"), [("A01", False), ("A11", False), ("B01", False), ("masked-mean", True)])
def test_the_whole_is_the_second_batch_of_what_a_part_shows_but_for_numbers_without_a_meaning(
    name: str, again: bool
) -> None:
    case = _CASES[name]
    assert "a second batch" in begun(case.build(), steps=case.steps, **case.options)[1]
    assert ("a second batch" in begun(large(case), steps=case.steps, **case.options)[1]) == again


@pytest.mark.parametrize("name", ["A01", "A01b-by-hand", "averages"])
def test_a_sum_over_many_samples_is_confirmed_in_float64(name: str) -> None:
    """Working precision rounds it by more than the gradients of correct models differ."""
    case = _CASES[name]
    made, told = case.build(), list[str]()
    torch.manual_seed(0)
    repeated = [each.repeat_interleave(1200, 0) for each in made.batch]
    made.batch = tuple(each + torch.randn_like(each) if each.is_floating_point() else each for each in repeated)
    whole = gaverify.verify(made, steps=case.steps, **(case.options | {"exact": True}))
    part = gaverify.verify(made, steps=case.steps, progress=lambda what, *_: told.append(what), **case.options)
    assert said(part) == said(whole) and fault_codes(part), story(part)
    assert part.method == "float64-control" and sum(part.run.part), part.run
    assert "tracing micro-batch 1 of 4" not in told, "the search ran in the part alone"


@pytest.mark.parametrize("late", (True, False))
def test_what_cuts_the_graph_is_the_cause_only_where_nothing_diverges_before_it(late: bool) -> None:
    """The control of a softmax over the samples holds what they get from it: no gradient goes to what is before it.

    An operation there couples the later samples, which the part does not have.
    """

    def subtract_late(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        flagged = (x[:, -1:] > 0).to(x)
        return x - flagged * (flagged * x).mean(0)

    torch.manual_seed(0)
    before = (Net(subtract_late) if late else nn.Identity(), nn.Linear(6, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(6, 6), *before, Net(lambda _, x: torch.softmax(x, 0)), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
        model[0].bias.zero_()
    verdict, told = begun(Problem(make_large(model), cross_entropy, flagged_samples()))
    assert "GAV102" in fault_codes(verdict), story(verdict)
    assert "tracing micro-batch 1 of 2" in told, "the part was searched"
    assert ("tracing micro-batch 1 of 4" in told) is late, "the whole was searched"


def test_a_state_that_was_forgotten_holds_no_weights() -> None:
    model = nn.Linear(3, 3)
    state, held = ModelState([model]), weakref.ref(model.weight.data)
    assert state is not None
    state.forget()
    state.restore()
    assert held() is None


# What counts as rounding in a control run: less where no float64 was possible and the difference itself is small.


def bench(total: float, dtype: torch.dtype = torch.float32, *, lift: torch.dtype | None = None) -> Bench:
    return Bench(experiment_of(nn.Linear(2, 1, dtype=dtype), lift=lift), total=total)


@pytest.mark.parametrize(
    ("total", "rounding"),
    [(0.5, 1e-4), (3e-4, 3e-6), (1e-5, 16 * 2.0**-24)],
)
def test_an_eighth_of_a_small_difference_is_not_rounding(total: float, rounding: float) -> None:
    """A loss with a moving mean and deviation: restored, 4e-5 of 3e-4 stay, which are real."""
    assert bench(total).rounding == pytest.approx(rounding)


def test_float64_leaves_less_whatever_the_difference_is() -> None:
    assert bench(3e-4, torch.float64).rounding == bench(0.5, lift=torch.float64).rounding == 4 * 2.0**-24
    assert bench(3e-4, torch.float64).experiment.is_float64, "its weights are"
    assert not bench(1e-9).experiment.is_float64, "how small it is does not make it exact"


# --- Release one by one: what is needed stays, what is not goes, and nothing is run that tells nothing ---------------


def _enough(needed: set[int], runs: list[list[int]]) -> Callable[[list[int]], ControlRun]:
    def control(some: list[int]) -> ControlRun:
        runs.append(some)
        missing = len(needed - set(some))
        return ControlRun("held", 0.1 * missing, missing == 0)

    return control


@pytest.mark.parametrize("needed", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
@pytest.mark.parametrize("size", [4, 9, 17])
def test_what_is_needed_stays(needed: set[int], size: int) -> None:
    found = find_needed(list(range(size)), _enough(needed, []))
    assert {entry.item for entry in found} == needed


def test_what_something_makes_alone_is_noted() -> None:
    found = find_needed([0, 1, 2], _enough({0, 2}, []))
    assert [(entry.item, entry.alone) for entry in found] == [(0, pytest.approx(0.1)), (2, pytest.approx(0.1))]
    kept = find_needed([0, 1], _enough({1}, []), keep=lambda item: item == 0)
    assert math.isnan(kept[0].alone) and kept[1].alone == pytest.approx(0.1), "what is kept is released for this alone"


@pytest.mark.parametrize(
    ("items", "control", "needed"),
    [
        (["attribute", "buffer"], lambda some: ControlRun("held", 0.0, bool(some)), ["buffer"]),
        ([0, 1], lambda _: None, [0, 1]),
        ([7], _enough(set(), []), []),
        ([7], _enough({7}, []), [7]),
    ],
    ids=["the last of two that are enough", "impossible runs", "nothing beside the items", "the only one"],
)
def test_what_stays_where_controls_tell_little(items: list[Any], control: Any, needed: list[Any]) -> None:
    assert [entry.item for entry in find_needed(items, control)] == needed


def test_many_things_are_halved() -> None:
    runs: list[list[int]] = []
    assert [entry.item for entry in find_needed(list(range(64)), _enough({40}, runs))] == [40]
    assert len(runs) <= 14


# --- What a part of the batch showed is looked for on the whole where it is one thing, told without a doubt ----------


CONTROL = ControlRun("with the weights that fit", 1e-9, True, kind=ControlKind.RESULT_PINNED)
FOUND = measured.divergent(weight_remedy=CONTROL, cleared=True, left=1e-9)


def with_control(run: ControlRun | None) -> Comparison:
    return replace(FOUND, window=replace(FOUND.window, remedy=run))


DOUBTFUL = {
    "something is left": replace(FOUND, cleared=False),
    "forwards that do not repeat": replace(FOUND, repeatability=Repeatability(1e-5, 0.0)),
    "backwards that do not repeat": replace(FOUND, repeatability=Repeatability(0.0, 1e-5)),
    "nobody asked whether they repeat": replace(FOUND, repeatability=None),
    "draws that matter": replace(FOUND, draws=replace(FOUND.draws, control=CONTROL)),
    "gradients that a forward clears": replace(FOUND, backward=replace(FOUND.backward, kept=CONTROL)),
    "two causes": replace(FOUND, forward=replace(FOUND.forward, causes=(measured.cause(control=CONTROL),))),
    "a control that leaves something": with_control(replace(CONTROL, rounding=False)),
    "a control that failed": with_control(None),
}


class Asked(Bench):
    """A bench that says that it was asked."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> None:
        raise AssertionError("the whole batch was run")


@pytest.mark.parametrize("why", DOUBTFUL)
def test_what_is_doubtful_in_the_part_is_not_looked_for_on_the_whole(why: str) -> None:
    assert confirming.confirm_on_batch(Asked(), FOUND, DOUBTFUL[why]) is None


def test_one_thing_is() -> None:
    with pytest.raises(AssertionError, match="the whole batch was run"):
        confirming.confirm_on_batch(Asked(), FOUND, FOUND)


def test_a_second_batch_that_the_loss_refuses_leaves_the_proof_as_it_is() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0][:, 0].unique()) < len(batch[0]):
            raise ValueError("the same sample twice")
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Net(centre), nn.Linear(8, 3))
    verdict = gaverify.verify(model, loss, (torch.randn(16, 6), torch.randint(3, (16,))))
    assert [(each.code, each.proven) for each in verdict.findings] == [("GAV102", True)], story(verdict)


# Which line counts: the loss, and never what is the same for every batch; none where the recipe itself is wrong.


GIVEN = [0.2575, 0.25, 0.25, 0.25]


def embed(net: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Embedded positions are the same in every micro-batch, and so add up with weights whose sum is 1."""
    return net.head(net.tokens(tokens) + net.places(torch.arange(5)))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())  # planted here


def found(ignored: bool, weighting: Any) -> Finding:
    torch.manual_seed(0)
    tokens = torch.randint(12, (8, 5))
    labels = tokens.masked_fill(torch.arange(5) > torch.arange(8)[:, None] // 2, -100) if ignored else tokens
    model = Net(embed, tokens=nn.Embedding(12, 8), places=nn.Embedding(5, 8), head=nn.Linear(8, 12))
    verdict = gaverify.verify(Problem(model, loss, (tokens, labels)), steps=4, weighting=weighting)
    (finding,) = verdict.findings
    assert (finding.code, finding.proven) == ("GAV202", True)
    return finding


def test_weights_given_for_micro_batches_that_are_alike_are_no_matter_of_the_model() -> None:
    finding = found(False, GIVEN)
    assert finding.location is None
    assert "the given weights" in finding.summary


def test_the_loss_counts_whatever_the_weights_add_up_to() -> None:
    with open(__file__, encoding="utf-8") as lines:
        line = next(at for at, text in enumerate(lines, 1) if text.rstrip().endswith("# planted here"))
    for weighting in (GIVEN, "none", "uniform"):
        location = found(True, weighting).location
        assert location is not None and location.line == line


# --- A fault of gaverify's own leaves with its own exception; what the model, the loss or a kernel raises is told ----


def planted(*_: Any, **__: Any) -> Any:
    raise ValueError("planted")  # Python turns a TypeError in an operator into one of its own


@pytest.mark.parametrize(
    ("room", "name"),
    [(operations, "trace_divergences"), (proof, "PinnedResults"), (dispatch, "_raise_precision")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_gaverify_is_no_finding_and_no_missing_kernel(
    room: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = torch.ones(1)  # meets float64 in the control

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return F.cross_entropy((outputs - outputs.mean(0)) * constant, batch[1])

    monkeypatch.setattr(room, name, planted)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="planted"):
        gaverify.verify(nn.Linear(6, 3), loss, (torch.randn(16, 6), torch.randint(3, (16,))))
    if room is operations:
        assert main(["run", "--model", "mlp-batchnorm", "--steps", "4"]) == 70
        printed = capsys.readouterr()
        assert "GAV000" not in printed.out and "bug in gaverify, not in your model" in printed.err


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise TypeError("in the user's backward")


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: squared_error(model, batch["no key"]),
        lambda model, batch: squared_error(model, (batch[0], batch[1].view(-1, 7))),
        lambda model, batch: squared_error(model, batch) * torch.randint(5, 2, (1,)),
        lambda model, batch: squared_error(model, batch) * random.choice([]),
        lambda model, batch: Raising.apply(squared_error(model, batch)),
    ],
    ids=["the loss", "a kernel", "a draw", "Python's generator", "the backward"],
)
def test_what_the_users_code_raises_is_told(loss: Any) -> None:
    batch = torch.randn(16, 6), torch.randn(16, 4)
    with pytest.raises(ProblemError, match="the model or loss raised on the full batch"):
        gaverify.verify(Problem(mlp(), loss, batch), steps=4)


def test_what_a_weighting_raises_is_told() -> None:
    problem = problems_weights.mean_loss()
    with pytest.raises(ProblemError, match="no weight today"):
        gaverify.verify(problem, steps=4, weighting=lambda _: (_ for _ in ()).throw(TypeError("no weight today")))


@pytest.mark.parametrize(
    ("options", "code"), [({"weighting": "none"}, "GAV201"), ({"weighting": (0.3, 0.2, 0.25, 0.25)}, "GAV202")]
)
def test_a_control_that_runs_out_of_memory_keeps_the_finding(options: dict[str, Any], code: str) -> None:
    told: list[str] = []
    problem = problems_weights.mean_loss()
    inner = problem.loss

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if any(what.startswith("control:") for what in told):
            raise torch.OutOfMemoryError("no room for a control")
        return inner(model, batch)

    problem.loss = loss
    verdict = gaverify.verify(problem, steps=4, progress=lambda what, *_: told.append(what), **options)
    assert fault_codes(verdict) == {code}
    (finding,) = [finding for finding in verdict.findings if finding.code == code]
    assert not finding.proven
    assert any("no control run was possible (out of memory on cpu" in e.statement for e in finding.evidence), finding
