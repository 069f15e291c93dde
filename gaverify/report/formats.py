"""The one table of formats: how each is called, which file ending asks for it, who renders it; and writing to files.

A new format is a module with a function of a `Report`, and a row here. The functions are named, not imported: a command
that writes JSON does not pay for what draws pictures. A file is written whole or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TextIO

from gaverify.errors import SpecError
from gaverify.report.pages import Report


@dataclass(frozen=True)
class Format:
    """One way to write a report.

    Args:
        name: What `--format` takes.
        ending: The file ending that asks for it, lower case, with its dot; "" where only `--format` does.
        renderer: `module:function` in this package; the function takes a `Report` and returns the text.
    """

    name: str
    ending: str
    renderer: str

    def render(self, report: Report) -> str:
        """Returns the whole report, ended by a newline."""
        module, _, function = self.renderer.partition(":")
        text: str = getattr(import_module(f"gaverify.report.{module}"), function)(report)
        return text


FORMATS: tuple[Format, ...] = (
    Format("text", ".txt", "text:text"),
    Format("json", ".json", "documents:report_text"),
    Format("junit", ".xml", "ci:junit_text"),
    Format("svg", ".svg", "card:svg"),
    Format("html", ".html", "html:html_text"),
    Format("sarif", ".sarif", "ci:sarif_text"),
    Format("markdown", ".md", "markdown:markdown_text"),
    Format("github", "", "ci:annotations_text"),
)


def format_named(name: str) -> Format:
    """Returns the format of that name.

    Raises:
        SpecError: An unknown one; the message names the known ones.
    """
    for form in FORMATS:
        if form.name == name:
            return form
    raise SpecError(f"`{name}` is not a format; known are {', '.join(form.name for form in FORMATS)}")


def format_for(path: str | os.PathLike[str]) -> Format:
    """Returns the format that the ending of `path` asks for.

    Raises:
        SpecError: The ending is none of the known ones; the message names them.
    """
    ending = Path(path).suffix.lower()
    for form in FORMATS:
        if ending and form.ending == ending:
            return form
    endings = ", ".join(form.ending for form in FORMATS if form.ending)
    raise SpecError(f"`{os.fspath(path)}` has no ending that says which report to write; known are {endings}")


def check_writable(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Checks every path before anything runs, so that a long run does not end without its report.

    Raises:
        SpecError: With a sentence for each path that has an unknown ending, cannot be written or is named twice.
    """
    problems: list[str] = []
    names_seen: set[str] = set()
    for path in map(Path, paths):
        problems += _problems(path)
        real = os.path.realpath(path)  # Path.resolve raises on links that lead to each other
        if real in names_seen:
            problems.append(f"`{path}` is named twice: one report would overwrite the other")
        names_seen.add(real)
    if problems:
        raise SpecError(problems)


def _problems(path: Path) -> list[str]:
    problems: list[str] = []
    try:
        format_for(path)
    except SpecError as error:
        problems += error.problems
    try:
        status = _status(path)
    except OSError as error:  # a name that is too long, or links that lead to each other
        return [*problems, f"`{path}` cannot be written: {error.strerror}"]
    if status is not None and stat.S_ISDIR(status.st_mode):
        problems.append(f"`{path}` is a folder, not a file to write a report to")
    elif status is not None and (stat.S_ISBLK(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        problems.append(f"`{path}` is a disk or a socket, not a file to write a report to")
    elif status is not None and not os.access(path, os.W_OK):
        problems.append(f"`{path}` may not be written")
    if status is not None and not _is_replaced(status):
        return problems  # what the folder allows does not matter
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        problems.append(f"`{path}` cannot be written: there is no folder `{folder}`")
    elif not os.access(folder, os.W_OK | os.X_OK):
        problems.append(f"`{path}` cannot be written: no permission to write in `{folder}`")
    return problems


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` as UTF-8 so that `path` holds the old content or the new, never a part, even after Ctrl-C.

    The new content is written under a random name that must not exist yet, so that nobody who may write in the folder
    can have put a link there. A file that is replaced keeps its owner and mode; a new one gets what the umask leaves.
    A device, a pipe and a file with several names or with an owner that cannot be kept are written into instead.

    Raises:
        SpecError: The folder is gone, full or may not be written.
    """
    target = Path(os.path.realpath(path))  # through a symbolic link to the file it names, as a plain write would
    temporary = ""
    try:
        status = _status(path)
        if status is not None and not _is_replaced(status):
            _write_into(path, text)
            return
        descriptor, temporary = tempfile.mkstemp(prefix=".gaverify-", suffix=".tmp", dir=target.parent)
        with _open_text(descriptor) as stream:
            stream.write(text)
        if status is not None:
            try:
                os.chown(temporary, status.st_uid, status.st_gid)
            except PermissionError:  # the file belongs to somebody else, and shall go on to
                _write_into(path, text)
                return
        os.chmod(temporary, _new_mode() if status is None else stat.S_IMODE(status.st_mode))
        os.replace(temporary, target)
    except OSError as error:
        why = "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror or error
        raise SpecError(f"`{os.fspath(path)}` could not be written: {why}") from error
    finally:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Returns what the system says about a file, through links; None where there is none yet."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_replaced(status: os.stat_result) -> bool:
    """Whether a new file may stand in the place of this one: a device, a pipe and a second name would be lost."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _write_into(path: str | os.PathLike[str], text: str) -> None:
    # Without waiting: a pipe that nobody reads would never open.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with _open_text(descriptor) as stream:
        stream.write(text)


def _open_text(descriptor: int) -> TextIO:
    # The command line, which reports show, may hold a file name that is no UTF-8.
    return open(descriptor, "w", encoding="utf-8", errors="replace", newline="\n")


def _new_mode() -> int:
    """The permissions that a plain write would give a new file."""
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    return 0o666 & ~mask
