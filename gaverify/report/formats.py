"""The one table of formats: how each is called, which file ending asks for it, and who renders it.

A new format is a module with a function of a `Report`, and a row here. The functions are named, not imported: a command
that writes JSON does not pay for what draws pictures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from gaverify.errors import SpecError
from gaverify.report.stories import Report


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
    Format("text", ".txt", "terminal:text"),
    Format("json", ".json", "documents:report_text"),
    Format("junit", ".xml", "junit:junit_text"),
    Format("svg", ".svg", "terminal:svg"),
    Format("html", ".html", "page.rendering:html_text"),
    Format("sarif", ".sarif", "sarif:sarif_text"),
    Format("markdown", ".md", "markdown:markdown_text"),
    Format("github", "", "github:annotations_text"),
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
    known = ", ".join(form.ending for form in FORMATS if form.ending)
    raise SpecError(f"`{os.fspath(path)}` has no ending that says which report to write; known are {known}")
