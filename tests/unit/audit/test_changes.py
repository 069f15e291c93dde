"""Runs and their changes: what a process reads is what the audit planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaverify.audit.job import (
    AlignState,
    Change,
    ClearGradients,
    Command,
    ComputeInFloat32,
    DifferentiateGathers,
    DifferentiateTerm,
    DisableCompilation,
    Job,
    LeadSteps,
    PerturbWeights,
    PinArguments,
    PinModules,
    ReplayData,
    RestoreState,
    Run,
    ScaleLosses,
    SynchroniseGradients,
    TraceScript,
    UndoSteps,
    UseEvaluationMode,
    UseMathKernels,
    WatchModules,
    WeightMicroBatches,
    merge_changes,
)
from gaverify.audit.recording.script_calls import PinnedCall

EVERY_CHANGE = (
    PerturbWeights(2.0**-24, 3, at_optimizer=True),
    LeadSteps(),
    UndoSteps(),
    ScaleLosses(-0.5),
    WeightMicroBatches(((0.5, 2.0), (1.0,))),
    DifferentiateTerm(2),
    ClearGradients(),
    SynchroniseGradients(),
    DifferentiateGathers(),
    UseEvaluationMode(("0:1.running_mean",)),
    RestoreState(("0:count",)),
    AlignState(("0:bias",)),
    WatchModules(("(script)",)),
    PinModules(("1", ""), (((0, (1, 2)), None),), 2.0),
    TraceScript(),
    PinArguments((PinnedCall("mul", "train.py", 3, 1, 0, ("[0][1]",)),), ((4, (1, 2)),)),
    ReplayData("batches", 4, 2),
    UseMathKernels(),
    ComputeInFloat32(),
    DisableCompilation(),
)
COMMAND = Command("train.py", False, ("--accum", "4"), ("torchrun",), (("A", "1"),), (("K", "4"),), 7, 2)


def test_no_change_is_forgotten_here() -> None:
    known = {kind for kind in Change.__subclasses__() if kind.__module__ == Change.__module__}  # without an example's
    assert {type(change) for change in EVERY_CHANGE} == known


def test_a_process_reads_what_was_planned(tmp_path: Path) -> None:
    run = Run(COMMAND, "accumulated", 2, ("a", "b"), EVERY_CHANGE, "state")
    job = Job(**vars(run), folder=str(tmp_path), files="in-place", port=29500)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_a_later_change_replaces_one_of_its_class() -> None:
    merged = merge_changes([ReplayData("samples", 4), LeadSteps()], [ReplayData("samples", 1)])
    assert merged == (ReplayData("samples", 1), LeadSteps())


@pytest.mark.parametrize(
    ("changes", "kind"), [((), "full"), ((PerturbWeights(0.5),), "perturbed"), ((UndoSteps(),), "frozen")]
)
def test_what_reports_call_a_run(changes: tuple[Change, ...], kind: str) -> None:
    run = Run(COMMAND, "full", 2, changes=changes)
    assert (run.name, Run(COMMAND, "full", 2, changes=changes, shown_as="terms").name) == (kind, "terms")


def test_variables_of_changes_win_over_the_command_s() -> None:
    command = Command("train.py", environment=(("TORCH_COMPILE_DISABLE", "0"), ("A", "1")))
    run = Run(command, "full", 2, changes=(DisableCompilation(),))
    assert run.environment == {"TORCH_COMPILE_DISABLE": "1", "A": "1"}


def test_a_command_is_shown_as_a_shell_takes_it() -> None:
    assert str(COMMAND) == "A=1 torchrun train.py --accum 4 with K=4"
