"""`--diff`, `--fix` and `--unsafe`: what is asked for of a patch, and what becomes of one that was tried."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gaverify.errors import GaverifyError, ProblemError, SpecError
from gaverify.records.answers import Answer
from gaverify.records.outcomes import Outcome
from gaverify.records.patch import Patch
from gaverify.records.verdict import Verdict
from gaverify.thresholds import SAME_NORM
from gaverify.tracebacks import Owner, owner_of

if TYPE_CHECKING:
    from gaverify.patches import Context
    from gaverify.patches.searching import Patches, TrialResult
    from gaverify.records.audit import Record
    from gaverify.spec import Spec

Command = TypeVar("Command", bound=Callable[..., Any])
AnyAnswer = TypeVar("AnyAnswer", bound=Answer)
_SECONDS_OF_GIT = 10


class Wish(NamedTuple):
    """The options of the command line about patches."""

    diff: bool = False
    """Print the diff."""
    fix: bool = False
    """Write the patch into the files."""
    unsafe: bool = False
    """Try patches as well that change the model or the meaning of a hyperparameter."""

    @property
    def patches(self) -> Patches:
        """Which patches are tried."""
        if not self.asks:
            return "none"
        return "unsafe" if self.unsafe else "safe"

    @property
    def asks(self) -> bool:
        """Whether a patch is asked for."""
        return self.diff or self.fix

    @property
    def flag(self) -> str:
        """The option that asks for a patch."""
        return "--fix" if self.fix else "--diff"

    def check(self) -> None:
        """Raises `SpecError` where the options do not go together."""
        if self.diff and self.fix:
            raise SpecError(
                "--diff and --fix: the first only prints the patch, the second prints and writes it; leave one out"
            )
        if self.unsafe and not self.asks:
            raise SpecError("--unsafe says which patches are tried; add --diff, which prints one, or --fix")

    def refuse(self, why: str) -> None:
        """Raises `SpecError` if a patch is asked for where none can be tried."""
        if self.asks:
            raise SpecError(f"{self.flag}: {why}; leave out {self.flag}")


def patch_options(command: Command) -> Command:
    """Adds `--diff`, `--fix` and `--unsafe`."""
    words = "With --diff or --fix: also try patches that change the model or what a hyperparameter means."
    command = click.option("--unsafe", is_flag=True, help=words)(command)
    words = "Print the repair and write it into your files; exit code 0 if that was done."
    command = click.option("--fix", is_flag=True, help=words)(command)
    return click.option("--diff", is_flag=True, help="Try a repair on a copy, and print it as a unified diff.")(command)


def try_patch(verdict: Verdict, spec: Spec, wish: Wish) -> Verdict:
    """Returns the verdict of a run with a patch of the user's source that makes both gradients agree, or why without.

    An audit tries its patches itself, where its runs are made.
    """
    # A divergence that is accepted or expected stays as it is.
    if not wish.asks or verdict.outcome is Outcome.EQUIVALENT or verdict.exit_code == 0:
        return verdict
    from gaverify.patches.searching import search_patch

    if verdict.outcome is Outcome.INCONCLUSIVE:
        return replace(verdict, patch_refused="the run shows no difference that a patch could be tried against")
    context = _read_sources(verdict, spec)
    if not context.sources:
        return replace(verdict, patch_refused=f"no file of yours was found that makes `{spec.model}`")
    trial = RunTrial(verdict, spec, context.record)
    patch, refused = search_patch(verdict.findings, context, trial, allow_unsafe=wish.unsafe)
    return replace(verdict, patch=patch, patch_refused=refused)


def _read_sources(verdict: Verdict, spec: Spec) -> Context:
    """Reads the user's file that makes the model, and those that findings name; a run has no calls of a loop."""
    from gaverify.loading.importing import NameKind, kind_of
    from gaverify.patches import Context, read_context
    from gaverify.records.audit import Record

    record = Record()
    place = spec.model.rpartition(":")[0] if kind_of(spec.model) is NameKind.FACTORY else ""
    files = [place] if place.endswith(".py") else []
    files += [where.file for finding in verdict.findings for where in finding.places if where and where.file]
    read = [read_context(file, record) for file in files if owner_of(os.path.realpath(file)) is Owner.USER]
    sources = {path: source for context in read for path, source in context.sources.items()}
    return Context(os.path.realpath(files[0]) if files else "", record, sources)


class RunTrial(NamedTuple):
    """Makes a run again with patched sources, in a process that has imported none of them."""

    verdict: Verdict
    spec: Spec
    record: Record

    def __call__(self, texts: Mapping[str, str], *, safe: bool) -> TrialResult:
        """Returns what the run of patched sources finds; `safe`: the full batch's gradient has to stay."""
        from gaverify.cli.workers import verify_in_worker
        from gaverify.patches.searching import TrialResult

        try:
            patched = verify_in_worker(self.spec, texts)
        except GaverifyError:
            return TrialResult(is_equivalent=False)
        is_right = patched.outcome is Outcome.EQUIVALENT and (not safe or self._keeps_gradient(patched))
        return TrialResult(is_right, patched.findings, self.record)

    def _keeps_gradient(self, patched: Verdict) -> bool:
        """Whether the full batch's loss and gradient stay as they were: a patch may not take the loss away."""
        before, after = (
            [verdict.run.losses.full, *(row.reference_norm for row in verdict.parameters)]
            for verdict in (self.verdict, patched)
        )
        return len(before) == len(after) and all(
            math.isclose(norm_before, norm_after, rel_tol=SAME_NORM, abs_tol=SAME_NORM * max(before))
            for norm_before, norm_after in zip(before, after, strict=True)
        )


def settle_patch(answer: AnyAnswer, wish: Wish) -> AnyAnswer:
    """Returns the answer with what becomes of its patch: it is dropped, stays to be printed, or is written as well."""
    patch = answer.patch
    if patch is None:
        return answer
    if why := _reason_to_keep_the_fault(answer, patch):
        return replace(answer, patch=None, patch_refused=why)
    if not wish.fix:
        return answer
    from gaverify.patches import write

    undo = _how_to_undo(patch)  # git is asked before the files change
    try:
        write(patch)
    except ProblemError as error:
        return replace(answer, patch_refused=str(error))
    return replace(answer, patch_written=undo)


def _reason_to_keep_the_fault(answer: Answer, patch: Patch) -> str:
    if answer.acceptance.expected is answer.outcome:
        return f'the outcome is as `expect = "{answer.outcome.value}"` says, and nothing is repaired'
    accepted = [finding for finding in answer.findings if finding.accepted and finding.code in patch.codes]
    if not accepted:
        return ""
    return f"the patch that was found would also repair {accepted[0].code}, which you accept: {accepted[0].accepted}"


def _how_to_undo(patch: Patch) -> str:
    files = [os.path.relpath(file) for file in dict.fromkeys(edit.file for edit in patch.edits)]
    named = " and ".join(f"`{file}`" for file in files)
    if all(map(_is_committed, files)):
        return f"into {named}; undo it with `git checkout -- {shlex.join(files)}`"
    return f"into {named}; to undo it, save the diff as `repair.diff` and run `git apply -R repair.diff`"


def _is_committed(file: str) -> bool:
    """Whether git has the file as it stands: a checkout loses no other change then."""
    words = ["git", "-C", os.path.dirname(file) or ".", "status", "--porcelain", "--ignored", "--"]
    try:
        run = subprocess.run(
            [*words, os.path.basename(file)],
            capture_output=True,
            timeout=_SECONDS_OF_GIT,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository
        return False
    return not run.stdout
