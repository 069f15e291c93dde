"""What an audit is asked to do, in words and numbers; no torch."""

from __future__ import annotations

import importlib.util
import os
import shlex
from dataclasses import dataclass, field

from gaverify.errors import SpecError


@dataclass(frozen=True)
class Request:
    """A script, and the arguments of its two runs.

    Args:
        script: Path of the script, or the name of a module where `module` is set.
        full: Arguments of the full-batch run alone.
        accumulated: Arguments of the accumulated run alone.
        common: Arguments of both, before the others.
        module: Run as `python -m script`.
        updates: M, the optimizer updates that are recorded; 0 with `events_only` lets the script run to its end.
        events_only: One run, with the common arguments, whose calls are checked and whose gradients are not.
        steps: K, where the user says it: backward passes that each update should have.
        timeout: Seconds after which a run is ended.
    """

    script: str
    full: tuple[str, ...] = ()
    accumulated: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    module: bool = False
    updates: int = 2
    events_only: bool = False
    steps: int | None = None
    timeout: float = 3600.0
    problems: tuple[str, ...] = field(default=(), compare=False)

    def command(self, arguments: tuple[str, ...]) -> str:
        """Returns the command that a run stands for."""
        head = ["python", "-m", self.script] if self.module else ["python", self.script]
        return shlex.join([*head, *arguments])

    def check(self) -> None:
        """Raises `SpecError` with every problem of the request."""
        problems = [*self.problems, *self._script_problems()]
        if self.updates < (0 if self.events_only else 1):
            problems.append(f"--updates {self.updates}: record at least one update")
        if self.steps is not None and self.steps < 1:
            problems.append(f"--steps {self.steps}: K is at least 1")
        if not self.timeout > 0:
            problems.append(f"--timeout {self.timeout:g}: give a positive number of seconds")
        if problems:
            raise SpecError(problems)

    def _script_problems(self) -> list[str]:
        if self.module:
            try:
                found = self.script and importlib.util.find_spec(self.script.split(".")[0]) is not None
            except (ImportError, ValueError):
                found = False
            here = os.path.join(os.getcwd(), *self.script.split("."))
            if found or os.path.exists(here + ".py") or os.path.isdir(here):
                return []
            return [f"there is no module `{self.script}`; `-m` looks in `{os.getcwd()}` and in what is installed"]
        if os.path.isfile(self.script):
            return []
        if os.path.isdir(self.script) and os.path.exists(os.path.join(self.script, "__main__.py")):
            return []
        kind = "a folder without `__main__.py`" if os.path.isdir(self.script) else "not there"
        return [f"the script `{self.script}` is {kind}; name the file as for `python FILE`, or use `-m package.module`"]


def words(text: str, option: str) -> tuple[str, ...]:
    """Returns the arguments that a quoted string holds, as a shell would split it.

    Raises:
        SpecError: A quote is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SpecError(f"{option} {text!r} cannot be split into arguments: {error}") from error
