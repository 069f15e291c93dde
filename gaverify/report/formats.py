"""The one table of formats: how each is called, which file ending asks for it, who renders it, and where it may go.

A new format is a module with a function of a `Report`, and a row here. The functions are named, not imported: a command
that writes JSON does not pay for what draws pictures.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from gaverify.errors import SpecError
from gaverify.report.pages import Report
from gaverify.text_files import is_replaced, status_of


@dataclass(frozen=True)
class Format:
    """One way to write a report.

    Args:
        name: The value of `--format` that chooses it.
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
        status = status_of(path)
    except OSError as error:  # a name that is too long, or links that lead to each other
        return [*problems, f"`{path}` cannot be written: {error.strerror}"]
    if status is not None and stat.S_ISDIR(status.st_mode):
        problems.append(f"`{path}` is a folder, not a file to write a report to")
    elif status is not None and (stat.S_ISBLK(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        problems.append(f"`{path}` is a disk or a socket, not a file to write a report to")
    elif status is not None and not os.access(path, os.W_OK):
        problems.append(f"`{path}` may not be written")
    if status is not None and not is_replaced(status):
        return problems  # what the folder allows does not matter
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        problems.append(f"`{path}` cannot be written: there is no folder `{folder}`")
    elif not os.access(folder, os.W_OK | os.X_OK):
        problems.append(f"`{path}` cannot be written: no permission to write in `{folder}`")
    return problems
