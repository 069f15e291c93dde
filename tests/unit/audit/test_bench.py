"""What the bench of a script says of the controls that it makes, and where it stops."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audits import audit, gaverify
from forking import can_fork, forked_runs
from recorded import numbers, run_of
from updates import update_of

from gaverify.audit.bench import ControlledRuns, ScriptBench
from gaverify.audit.flow import Comparer
from gaverify.audit.job import DisableCompilation, PinModules, UseEvaluationMode, WatchModules, merge_changes
from gaverify.audit.request import Request
from gaverify.audit.running import Runner
from gaverify.records.audit import Record, RowCheck
from gaverify.records.comparison import comparison_of
from gaverify.records.events import ControlSummary
from gaverify.records.experiment import ControlRun
from gaverify.records.outcomes import Method, Outcome, ParameterComparison
from gaverify.rules import findings_for
from gaverify.search.bench import Intervention

CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"

CAPPED = """
import sys
import torch

size, accum, cap = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
targets = torch.ones(16, 1)
targets[[0, 1, 12, 13, 14, 15]] = 3.0
model = torch.nn.Linear(6, 1)
with torch.no_grad():
    model.weight.mul_(0.01)
    model.bias.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(16, 6)
for _ in range(2):
    for x, y in zip(inputs.split(size), targets.split(size)):
        ((model(x) - y).square().mean().clamp(max=cap) / accum).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(not can_fork(), reason="the runs have to know the example, so that they are forked")
def test_the_question_that_contributing_shows_is_asked_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Intervention" in code]
    (tmp_path / "caps_example.py").write_text(code, encoding="utf-8")
    (tmp_path / "train.py").write_text(CAPPED, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "caps_example", raising=False)
    caps_example = importlib.import_module("caps_example")

    def record_with(cap: str) -> Record:
        full, accumulated = ("16", "1", cap), ("4", "4", cap)
        request = Request(script=str(tmp_path / "train.py"), full=full, accumulated=accumulated, updates=1)
        runner = Runner(request, tmp_path / f"runs-{cap}", lambda *_: None)
        comparison = Comparer(request, runner)._compare(*runner.make_first("full"))
        return caps_example.control_caps(comparison.trial, comparison.record)  # type: ignore[no-any-return]

    with forked_runs("caps_example"):
        assert record_with("60").agrees
        record = record_with("6")
    (finding,) = [finding for finding in findings_for(comparison_of(record)) if finding.severity == "fault"]
    assert (finding.code, finding.proven) == ("GAV103", True)
    (evidence,) = [evidence for evidence in finding.evidence if evidence.label == "control"]
    assert "caps on the loss left out" in evidence.statement
    (control,) = [cause.control for cause in record.controls.coupling]
    assert control is not None and control.values_differed and control.interventions == (caps_example.WITHOUT_CAPS,)


@pytest.mark.parametrize(
    ("script", "common", "code"),
    [("loops_coupled.py", "--loop chained", ""), ("loops_scale.py", "--loop division_forgotten", "GAV201")],
)
def test_a_time_limit_ends_the_search_and_not_the_verdict(script: str, common: str, code: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    stopped = audit(script, common=common, options=("--time-limit", "0.001", "--keep", str(kept)))
    assert (stopped.code, stopped.outcome) == (1, "divergent")
    assert "the time limit of 0.001 s ended the search for the cause" in stopped.text("GAV000")
    assert stopped.faults == {code} - {""} and not any(stopped.finding(each)["proven"] for each in stopped.faults)
    assert len(stopped.document["runs"]) == 3, "without the limit more are made"
    again = gaverify(["audit", "--from", str(kept), "--format", "json"])
    assert again.document["findings"] == stopped.document["findings"]


STATE = """
import sys
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 1)
        self.count, self.scale, self.seen = 0, 1.0, 0.0

    def forward(self, x):
        hidden = self.inner(x)
        self.count += 1
        self.scale *= 1.5
        self.seen = float(hidden.detach().abs().mean())
        if reads:
            hidden = hidden * (1 + 0.1 * self.count) + 0.05 * self.scale
        return self.out(hidden.tanh())


size, accum, reads = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "read"
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(32, 6)
for step, (inputs, targets) in enumerate(zip(x.split(size), x.sum(1, keepdim=True).split(size))):
    ((model(inputs) - targets).square().mean() / accum).backward()
    if (step + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_values_that_are_needed_beside_each_other_are_blamed_and_what_changes_beside_them_is_not(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STATE, encoding="utf-8")
    answer = audit(script, "16 1 read", "4 4 read")
    assert answer.faults == {"GAV403"} and answer.finding("GAV403")["proven"]
    text = answer.text("GAV403")
    assert "`count`" in text and "`scale`" in text and "`seen`" not in text
    assert audit(script, "16 1 unread", "4 4 unread").code == 0


PINNED = Intervention("a value replaced", changes=(DisableCompilation(),))
RIGHT, ZERO_BIAS, WRONG = numbers(1.0, 2.0, 3.0, 4.0, 5.0), numbers(1.0, 2.0, 3.0, 4.0, 0.0), numbers(2, 2, 3, 4, 5)


def bench_of() -> ScriptBench:
    """Of an update in which a bias differs, without a script."""
    row = ParameterComparison("bias", (1,), Outcome.DIVERGENT, Method.NOISE_FLOOR, 5.0, 1.0, 4.0, 0.0, 4.0, None)
    update = update_of(1, outcome=Outcome.DIVERGENT, judged=True, parameters=(row,), data=RowCheck(4, 4))
    trial: Any = SimpleNamespace(failures={}, rounds=(((0, 1),),))
    return ScriptBench(trial, Record(updates=(update,)), update)


def control_of(
    folder: Path, gradient: torch.Tensor, full: torch.Tensor = RIGHT, differed: bool | None = None, **changed: Any
) -> ControlRun:
    """Of two runs that leave these gradients."""
    told = {"control": ControlSummary(values_differed=differed)}
    runs = [run_of(folder / "full", full, full, role="full"), run_of(folder / "own", gradient, gradient, told=told)]
    return bench_of().compare(ControlledRuns((replace(PINNED, **changed),), *runs))


@pytest.mark.parametrize(
    ("gradients", "differed", "in_reference", "rounding", "proves"),
    [
        ((RIGHT, RIGHT), True, True, True, True),
        ((WRONG, RIGHT), None, True, False, False),
        ((RIGHT, RIGHT), False, True, True, False),
        ((ZERO_BIAS, ZERO_BIAS), None, True, True, False),
        ((ZERO_BIAS, ZERO_BIAS), None, False, True, True),
    ],
    ids=["rounding", "a difference", "values that did not differ", "no gradient of what differed", "a repair"],
)
def test_a_control_proves_what_it_changed_where_rounding_is_left(
    tmp_path: Path, gradients: Any, differed: bool | None, in_reference: bool, rounding: bool, proves: bool
) -> None:
    control = control_of(tmp_path, *gradients, differed, in_reference=in_reference)
    assert (control.rounding, control.proves) == (rounding, proves)
    assert control.left == pytest.approx(0.0 if rounding else 1 / 55**0.5)
    assert control.cut_off == (("bias",) if gradients[0] is ZERO_BIAS and in_reference else ())
    assert control.interventions == (replace(PINNED, in_reference=in_reference),)


def test_what_no_run_of_a_script_can_change_is_told_and_not_asked() -> None:
    bench = bench_of()
    assert bench.attempt("a probe", lambda: bench.run(Intervention("a layer pinned"))) is None
    assert bench.trial.failures == {"a probe": "no run of a script can be made with a layer pinned"}


def test_later_pins_join_earlier_ones_and_other_changes_replace_them() -> None:
    first, second = PinModules(("a", "b"), blamed="gradients"), PinModules(("b", "c"))
    evaluated = UseEvaluationMode(("0:x",)), UseEvaluationMode(("0:y",))
    watched = WatchModules(("a",)), WatchModules()
    assert merge_changes([first, evaluated[0], watched[0]], [second, evaluated[1], watched[1]]) == (
        PinModules(("a", "b", "c")),
        UseEvaluationMode(("0:x", "0:y")),
        WatchModules(),
    )
