"""`--diff`, `--fix` and `--unsafe`: what is asked for of a patch, and what becomes of one that was tried."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gaverify.errors import ProblemError, SpecError
from gaverify.records.audit_report import AuditReport
from gaverify.records.patch import Patch
from gaverify.records.verdict import Verdict

if TYPE_CHECKING:
    from gaverify.patches.searching import Patches

Command = TypeVar("Command", bound=Callable[..., Any])
Answer = TypeVar("Answer", Verdict, AuditReport)
_SECONDS_OF_GIT = 10


class Wish(NamedTuple):
    """What the command line asks for."""

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
            raise SpecError(f"{self.flag}: {why}; leave it out")


def patch_options(command: Command) -> Command:
    """Adds `--diff`, `--fix` and `--unsafe`."""
    words = "With --diff or --fix: also try patches that change the model or what a hyperparameter means."
    command = click.option("--unsafe", is_flag=True, help=words)(command)
    words = "Print the repair and write it into your files; exit code 0 if that was done."
    command = click.option("--fix", is_flag=True, help=words)(command)
    return click.option("--diff", is_flag=True, help="Try a repair on a copy, and print it as a unified diff.")(command)


def settle_patch(answer: Answer, wish: Wish) -> Answer:
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


def _reason_to_keep_the_fault(answer: Verdict | AuditReport, patch: Patch) -> str:
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
