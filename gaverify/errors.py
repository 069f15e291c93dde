"""Errors that gaverify raises on purpose; the command line turns each into a sentence and an exit code."""

from __future__ import annotations

import difflib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Words of torch's allocators; the CPU's raises a plain RuntimeError."""

_NO_SUCH_SIZE = (
    "Storage size calculation overflowed",
    "numel: integer multiplication overflow",
    "Overflow when unpack",
)
"""Words of torch about a shape whose number of bytes does not even fit an integer."""


LONGEST_TEXT = 2_000  # characters of an exception
_OF_THE_USER = {
    errno.ENAMETOOLONG: "the file name is too long",
    errno.EBADF: "the user's code closed a file descriptor that is not its own (`os.closerange`?)",
    errno.EMFILE: "too many files are open; raise the limit, which `ulimit -n` shows",
    errno.ENFILE: "too many files are open on this machine; close some",
}
"""Errors of the system that no code of gaverify can be the reason of."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SPACE_OF_TORCH = ("iostream error", "file write failed")

USAGE = 2
INTERNAL = 70
INTERRUPTED = 130


def worst_exit_code(codes: Iterable[int]) -> int:
    """Returns the code that weighs most: an error before any outcome, divergent before inconclusive; 0 for none."""
    present = set(codes)
    return next((code for code in (INTERRUPTED, INTERNAL, USAGE, 1, 3) if code in present), 0)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the known word that is most alike, the first of equals, for "did you mean"; "" where none is enough."""
    likeness = {candidate: difflib.SequenceMatcher(None, candidate, word).ratio() for candidate in known}
    near = max(likeness, key=lambda candidate: likeness[candidate], default="")
    return near if near and likeness[near] >= cutoff else ""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Returns the sentence for a key of a file that nothing reads; keys are told with hyphens."""
    keys = [name.replace("_", "-") for name in known]
    near = nearest(key.lower().replace("_", "-"), keys)
    return "unknown key; " + (f"did you mean `{near}`?" if near else f"the keys are {', '.join(keys)}")


def cut_text(text: str) -> str:
    """Returns the text, or its beginning where it is longer than anybody reads: a tensor in it may have megabytes."""
    text = text.strip()
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text):,} characters)"


def text_of(error: BaseException) -> str:
    """Returns `str(error)`, cut; or what stands for it where the exception cannot print itself."""
    try:
        return cut_text(str(error))
    except Exception as broken:
        return f"(its own text cannot be read: {type(broken).__name__})"


def kind_of_value(value: object) -> str:
    """Returns the type of a value with its article, for sentences: `an int`, `a Linear`; `None` for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


class HardExit(SystemExit):
    """Stands for a call of `os._exit` by the user's code, which would end the process without a verdict."""


def exit_call(error: SystemExit) -> str:
    """Returns the call by which the user's code wanted to leave Python."""
    return f"{'os._exit' if isinstance(error, HardExit) else 'sys.exit'}({error.code!r})"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, on any device, also behind another error; a shape too large for any memory counts."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        # a shape beyond 64 bits is a TypeError or an OverflowError, an allocator's refusal a RuntimeError
        if isinstance(error, RuntimeError | TypeError | OverflowError | ValueError):
            said = text_of(error)
            if any(words in said for words in _NO_MEMORY) and isinstance(error, RuntimeError):
                return True
            if any(words in said for words in _NO_SUCH_SIZE):
                return True
        error = error.__cause__
    return False


def is_out_of_space(error: BaseException | None) -> bool:
    """Whether a full disk, a quota or a limit of file sizes is behind an error; torch's writer has no errno."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        if isinstance(error, RuntimeError) and any(words in text_of(error) for words in _NO_SPACE_OF_TORCH):
            return True
        error = error.__cause__ or error.__context__
    return False


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

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[str, ...], str]]:
        return type(self), (self.problems, self.source)  # `Exception` would send the joined text as the problems


class ProblemError(GaverifyError):
    """The user's model, loss, batch or factory does not do what a verification needs; the message says what, where."""


class Uncompared(ProblemError):
    """A script's runs hold nothing that could be compared, although the script trains: its audit has no answer."""


class MissingPackage(ProblemError):
    """A package that the model needs is not installed: a spec is skipped for that."""


class TimeUp(BaseException):
    """Ends a search whose time is over: no error of anybody's, so that nobody takes it for one."""


@dataclass
class TimeLimit:
    """Seconds since an answer was asked for, None for no limit; only a search is ended by it, never a verdict."""

    seconds: float | None = None
    begun: float = field(default_factory=time.monotonic)
    has_ended: bool = False
    """Whether it has ended a search."""
    _searching: bool = False

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Ends with `TimeUp` what runs in it when the time is over."""
        self._searching = True
        try:
            yield
        finally:
            self._searching = False

    def check(self) -> None:
        """Raises `TimeUp` where a search has had its time."""
        if self._searching and self.seconds is not None and time.monotonic() - self.begun >= self.seconds:
            self.end()

    def end(self) -> None:
        """Ends the search."""
        self.has_ended = True
        raise TimeUp


class HiddenDraw(BaseException):
    """Ends a recording at its first draw inside a kernel: it is made again where draws show, and this one is no use."""


class Agreed(ProblemError):
    """The error that ended a verification on all ranks of a launcher; each of them knows it, and the first tells it."""


class NoMemory(ProblemError):
    """Memory ran out during a pass; one over the full batch may be run in a way that needs less."""


class BrokenTorch(GaverifyError):
    """Torch, or a package that it imports, raises at its import."""

    def __init__(self, error: BaseException) -> None:
        said = f"{type(error).__name__}: {text_of(error) or 'no message'}"
        super().__init__(f"torch cannot be imported: {said}; `python -c 'import torch'` has to work first")

    def __reduce__(self) -> tuple[type[GaverifyError], tuple[str]]:
        return GaverifyError, (str(self),)  # to another process as its sentence


class InternalError(GaverifyError):
    """A fault in gaverify itself."""

    exit_code = 70


def explain_users_fault(error: BaseException) -> str:
    """Returns the sentence for an error of the system that no code of gaverify can be the reason of; "" for others."""
    if not isinstance(error, OSError) or error.errno not in _OF_THE_USER:
        return ""
    name = "" if error.filename is None else f"`{cut_text(os.fsdecode(error.filename))}`: "
    return f"{name}{_OF_THE_USER[error.errno]}"


def as_foreseen(error: BaseException) -> GaverifyError | None:
    """Returns the error as one that gaverify foresees, or None if it is a fault."""
    if isinstance(error, GaverifyError):
        return error
    if is_out_of_memory(error):
        said = text_of(error).splitlines()[:1]
        detail = f" ({said[0].rstrip()})" if said else ""
        return GaverifyError(f"out of memory{detail}; try a smaller `--batch-size`, a smaller model or another device")
    if isinstance(error, SystemExit):
        # user code that exits with 0 would otherwise read as "equivalent"
        return GaverifyError(f"the model's code called {exit_call(error)}; nothing was compared")
    if not isinstance(error, Exception | KeyboardInterrupt):
        # no code of gaverify's lets one of another kind go as far as here
        return GaverifyError(f"the model's code raised {type(error).__name__}: {text_of(error) or 'no message'}")
    users_fault = explain_users_fault(error)
    if users_fault:
        return GaverifyError(users_fault)
    if is_out_of_space(error):
        return GaverifyError(_cannot_write(error))
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in text_of(error):
        return GaverifyError(
            "no folder for temporary files can be written (no space left?); set TMPDIR to one on a larger disk"
        )
    if isinstance(error, FileNotFoundError) and current_folder() is None:
        return GaverifyError("the folder that this was started in has been removed; change to another one")
    return None


def _cannot_write(error: BaseException) -> str:
    """The sentence for a disk that is full, with the file where Python knows it."""
    if not isinstance(error, OSError):
        return "no space left to write temporary files; free some, or set TMPDIR to a larger disk"
    if error.filename is None:
        return f"cannot write: {error.strerror}"
    why = "no space left" if error.errno == errno.ENOSPC else str(error.strerror).lower()
    return f"{why} to write `{error.filename}`; free some, or set TMPDIR to a larger disk"


def current_folder() -> str | None:
    """Returns the current folder; None where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None
