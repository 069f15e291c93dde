"""Runs each row in a fresh process and gathers what it reports; no torch here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gaverify.children.group import Group, open_group
from gaverify.children.last_words import Ended
from gaverify.errors import GaverifyError, InternalError
from gaverify.records.answers import Environment
from gaverify.records.outcomes import Outcome
from gaverify.records.profile import LABELS, Plan, Profile, Row, Setting, Status

if TYPE_CHECKING:
    from gaverify.spec import Spec

Progress = Callable[[str, int, int], None]

# Half of glibc's own threshold, which besides grows up to 32 MiB by itself unless it is set.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}
"""Makes glibc return freed tensors to the system at once, see mallopt(3). By default much of it stays with the process,
more or less by chance, and the high-water mark then tells of the allocator's habits rather than of the tensors."""


class RowJob(NamedTuple):
    """One row to measure.

    Args:
        spec: The problem, with the K and the strategy of the row.
        plan: The row.
        repeats: Updates whose time is taken.
        optimizer: Include this optimizer's step in every update; None: no step.
    """

    spec: Spec
    plan: Plan
    repeats: int
    optimizer: str | None


class RowEnd(NamedTuple):
    """How a row ended, as its process says.

    Args:
        kind: The row's status; or `refused`: no row can run, or `internal`: a fault of gaverify.
        message: Why; empty for a row that was measured.
    """

    kind: Status | Literal["refused", "internal"]
    message: str = ""


class Refused(GaverifyError):
    """The problem could not be loaded; no row can run."""


def profile_spec(
    spec: Spec,
    plans: Sequence[Plan],
    *,
    repeats: int = 10,
    optimizer: str | None = None,
    steps: Sequence[int] = (),
    progress: Progress = lambda *_: None,
) -> Profile:
    """Measures every plan of a spec, one fresh process after the other.

    Args:
        spec: The problem; its `steps` and `strategy` do not count.
        plans: The rows.
        repeats: Updates whose time is taken.
        optimizer: Include this optimizer's step in every update.
        steps: Every K that was asked for.
        progress: Called as `progress(description, done, total)`.

    Returns:
        The profile. Ctrl-C ends it early, with the rows that are done.

    Raises:
        Refused: The problem cannot be loaded.
        InternalError: A fault in gaverify's own code in a child.
        KeyboardInterrupt: Ctrl-C before the first row was done.
    """
    rows: list[Row] = []
    setting: Setting | None = None
    interrupted = False
    try:
        with open_group("gaverify-profile-") as group:
            for plan in plans:
                strategy = "accumulate" if plan.strategy == "full-batch" else plan.strategy
                label = f"{LABELS[plan.strategy]}, K = {plan.steps}"
                job = RowJob(replace(spec, steps=plan.steps, strategy=strategy), plan, repeats, optimizer)
                row, its_setting = measure_row(group, job, _reporter(progress, label, len(rows), len(plans)))
                rows.append(row)
                # A row that ran out of memory while it loaded has none, and all others have the same.
                setting = setting or its_setting
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    # After Ctrl-C the table still shows all that was asked for.
    rows += [Row(plan.strategy, plan.steps, "not-run") for plan in plans[len(rows) :]]
    environment = Environment(setting.torch) if setting else Environment()
    return Profile(setting, tuple(rows), tuple(steps), interrupted, spec.to_dict(), environment=environment)


def _reporter(progress: Progress, label: str, done: int, total: int) -> Callable[[str], None]:
    return lambda stage: progress(f"{label}: {stage}", done, total)


def measure_row(group: Group, job: RowJob, report: Callable[[str], None]) -> tuple[Row, Setting | None]:
    """Returns a row that a fresh process measures, and where it did.

    Raises:
        Refused: The process could not load the problem.
        InternalError: It met a fault in gaverify.
    """
    row, stage = Row(job.plan.strategy, job.plan.steps, "measured"), "starting"
    setting: Setting | None = None
    conclusion: RowEnd | None = None
    # A file, because nobody reads stderr while the process runs, and a full pipe would stop it.
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as stderr:
        group.start_module("gaverify.profiling.worker", ENVIRONMENT, stderr=stderr).send(job)
        while not isinstance(message := _receive(group), Ended):
            if isinstance(message, str):
                stage = message
                report(stage)
            elif isinstance(message, Row):  # as far as it has come
                row = message
            elif isinstance(message, Setting):
                setting = message
            else:
                conclusion = message
        stderr.seek(0)
        # A traceback ends with what was raised; a model that logs a lot would bury it.
        last_output = stderr.read()[-2000:].strip()
    kind, why = conclusion or _explain_death(message, last_output, stage)
    if kind == "refused":
        raise Refused(why)
    if kind == "internal":
        raise InternalError(f"{why}\n{last_output}")
    if kind != "measured" and row.activation_bytes is not None:
        # everything was measured, and only the comparison failed: verifying needs more memory than training
        return replace(row, outcome=Outcome.INCONCLUSIVE, message=f"not compared with the full batch: {why}"), setting
    return replace(row, status=kind, message=why), setting


def _receive(group: Group) -> Any:
    news = group.receive()
    assert news is not None  # it waits for as long as it takes
    return news[1]


def _explain_death(ended: Ended, last_output: str, stage: str) -> RowEnd:
    """Returns the conclusion for a process that said nothing of its end."""
    sentence = f"the process {ended}{_during(stage)}"
    if ended.code < 0:
        return RowEnd("out-of-memory" if ended.is_killed else "failed", sentence)
    last = last_output.splitlines()[-1:] or ["it printed nothing"]
    return RowEnd("failed", f"{sentence}: {last[0]}")


def _during(stage: str) -> str:
    """A stage of the worker as the end of a clause."""
    clauses = {
        "loading": "the model was loaded",
        "memory": "its peak was measured",
        "verdict": "gradients were compared",
        "activations": "activations were counted",
        "starting": "it started",
    }
    return f" while {clauses.get(stage, 'its time was taken')}"
