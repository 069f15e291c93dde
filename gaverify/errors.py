"""Errors that gaverify raises on purpose; the command line turns each into a sentence and an exit code."""

from __future__ import annotations

from collections.abc import Sequence


class GaverifyError(Exception):
    """Any condition that gaverify foresees. `exit_code` is what the command line leaves with."""

    exit_code = 2


class SpecError(GaverifyError):
    """A spec or an option is wrong.

    Args:
        problems: One sentence per problem, each naming its place (`$.steps`, `--steps`). All are reported at once.
        source: The file (or "command line") that the problems stand in.
    """

    def __init__(self, problems: Sequence[str] | str, source: str = "command line") -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        self.source = source
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))


class ProblemError(GaverifyError):
    """The user's model, loss, batch or factory does not do what a verification needs; the message says what, where."""


class InternalError(GaverifyError):
    """A fault in gaverify itself."""

    exit_code = 70
