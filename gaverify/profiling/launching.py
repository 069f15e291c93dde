"""Runs each row in a fresh process and gathers what it reports; no torch here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gaverify.children.group import Group, open_group
from gaverify.children.last_words import Ended
from gaverify.errors import GaverifyError, InternalError
from gaverify.records.comparison import Outcome
from gaverify.records.profile import LABELS, Plan, Profile, Row, Seconds, Setting, Status

if TYPE_CHECKING:
    from gaverify.spec import Spec

Progress = Callable[[str, int, int], None]

# Half of glibc's own threshold, which besides grows up to 32 MiB by itself unless it is set.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}
"""Makes glibc return freed tensors to the system at once, see mallopt(3). By default much of it stays with the process,
more or less by chance, and the high-water mark then tells of the allocator's habits rather than of the tensors."""


class Job(NamedTuple):
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
                job = Job(replace(spec, steps=plan.steps, strategy=strategy), plan, repeats, optimizer)
                messages = run_job(group, job, _reporter(progress, label, len(rows), len(plans)))
                rows.append(row_from(plan, messages))
                # A row that ran out of memory while it loaded has none, and all others have the same.
                setting = setting or messages.get("setting")
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    # After Ctrl-C the table still shows all that was asked for.
    rows += [Row(plan.strategy, plan.steps, "not-run") for plan in plans[len(rows) :]]
    return Profile(setting, tuple(rows), tuple(steps), interrupted, spec.to_dict())


def _reporter(progress: Progress, label: str, done: int, total: int) -> Callable[[str], None]:
    return lambda stage: progress(f"{label}: {stage}", done, total)


def run_job(group: Group, job: Job, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns everything that a process reported of one job, its messages laid over each other, and how it ended.

    Keys are those of the worker's messages; `ended` and `stderr` (its last lines) are added.
    """
    messages: dict[str, Any] = {}
    # A file, because nobody reads stderr while the process runs, and a full pipe would stop it.
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as stderr:
        process = group.start_module("gaverify.profiling.worker", ENVIRONMENT, stderr=stderr)
        process.send(job)
        while "ended" not in messages:
            news = group.receive()
            assert news is not None
            message: dict[str, Any] = {"ended": news[1]} if isinstance(news[1], Ended) else news[1]
            if "stage" in message:
                report(message["stage"])
            messages |= message
        stderr.seek(0)
        # A traceback ends with what was raised; a model that logs a lot would bury it.
        messages["stderr"] = stderr.read()[-2000:]
    return messages


def row_from(plan: Plan, messages: dict[str, Any]) -> Row:
    """Returns the row that a child's messages make.

    Raises:
        Refused: The child could not load the problem.
        InternalError: It met a fault in gaverify.
    """
    status, message = _end(messages)
    times, verdict = messages.get("seconds"), messages.get("verdict", {})
    outcome = verdict.get("outcome")
    if status != "measured" and messages.get("activation_bytes") is not None:
        # everything was measured, and only the comparison failed: verifying needs more memory than training
        status, outcome = "measured", Outcome.INCONCLUSIVE
        message = f"not compared with the full batch: {message}"
    return Row(
        plan.strategy,
        plan.steps,
        status,
        message,
        tuple(messages.get("micro_batches", ())),
        messages.get("activation_bytes"),
        messages.get("memory"),
        Seconds.of(times) if times else None,
        outcome,
        verdict.get("relative_difference"),
        verdict.get("method"),
    )


def _end(told: dict[str, Any]) -> tuple[Status, str]:
    """How a child ended: the status of its row, and the sentence."""
    error = told.get("error")
    if error is None and told.get("done"):
        return "measured", ""
    if error is None:
        return _explain_death(told["ended"], told["stderr"], told.get("stage", "starting"))
    kind, message = error["kind"], error["message"]
    if kind == "refused":
        raise Refused(message)
    if kind == "internal":
        raise InternalError(f"{message}\n{told['stderr'].strip()}")
    return kind, message


def _explain_death(ended: Ended, stderr: str, stage: str) -> tuple[Status, str]:
    """Returns the status and the sentence for a process that said nothing of its end."""
    sentence = f"the process {ended}{_during(stage)}"
    if ended.code < 0:
        return "out-of-memory" if ended.is_killed else "failed", sentence
    last = stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    return "failed", f"{sentence}: {last[0]}"


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
