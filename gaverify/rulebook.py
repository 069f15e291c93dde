"""The rule pages: what `gaverify explain` and `gaverify rules` print. Each is a file of `rules/pages/`.

A page starts with `# CODE name: one line.`, where `(note)` or `(fault or note)` behind the name tells the severity of
its findings (a fault where nothing is said). A line `Patch: ` tells whether `--diff` can repair the user's source. Then
come sections, each with a line `## HEADING` above it.
Indented lines are formulas and code. Where a code arises in runs and in audits, both examples stand under `Example`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources

from gaverify.errors import InternalError, SpecError, nearest

_RULES = resources("gaverify") / "rules"
_FOLDER = _RULES / "pages"
_ALIKE = 0.5  # of `difflib`'s ratio; below it a word is no typing mistake of a rule's name
_FIRST = re.compile(r"# (?P<code>GAV\d{3}) (?P<name>[a-z0-9-]+)(?: \((?P<severity>[a-z ]+)\))?: (?P<summary>.+)")

_TRIED = "tries a repair of your source on a copy and prints it as a patch"
_MEANING = "they change the model, or what a hyperparameter means"
PATCHES = {
    "safe": f"`gaverify audit … --diff` {_TRIED}; `--fix` writes it.",
    "unsafe": f"`gaverify audit … --diff --unsafe` {_TRIED}. Such repairs need `--unsafe`: {_MEANING}.",
    "safe or unsafe": f"`gaverify audit … --diff` {_TRIED}; `--fix` writes it. Some need `--unsafe`: {_MEANING}.",
    "none": "`--diff` has no repair of this: change the source by hand, as described below.",
}
"""The meaning of the words behind `Patch: `."""


@dataclass(frozen=True)
class RulePage:
    """One rule as people read it.

    Args:
        code: As in `GAV101`.
        name: As in `batch-statistics`.
        severity: "fault", "note" or "fault or note".
        summary: One line.
        patch: Which patches there are: "safe", "unsafe", "safe or unsafe", or "none".
        sections: The text under each heading, in the page's order.
    """

    code: str
    name: str
    severity: str
    summary: str
    patch: str
    sections: Mapping[str, str]


@cache
def rule_pages() -> tuple[RulePage, ...]:
    """Returns a page for every code, in the order of the codes."""
    files = sorted(_FOLDER.iterdir(), key=lambda file: file.name)
    return tuple(_page(file.read_text(encoding="utf-8"), file.name) for file in files if file.name.endswith(".md"))


def words_page() -> str:
    """Returns the page that introduces the words of reports."""
    return (_RULES / "words.md").read_text(encoding="utf-8").rstrip()


def find_page(wanted: str) -> RulePage:
    """Returns the page for a code or a name, however it is capitalised.

    Raises:
        SpecError: There is none; the sentence names the nearest.
    """
    pages = {page.code: page for page in rule_pages()}
    names = {page.name: page for page in rule_pages()}
    word = wanted.strip().lower().replace("_", "-").replace(" ", "-")
    code = re.fullmatch(r"(?:gav-?)?(\d{1,4})", word)
    exact_page = pages.get(f"GAV{code[1]}") if code else names.get(word)
    if exact_page is not None:
        return exact_page
    by_word = {key.lower(): page for key, page in (pages | names).items()}
    near = by_word.get(nearest(word, by_word, _ALIKE))
    if code:
        near = min(pages.values(), key=lambda page: abs(int(page.code[3:]) - int(code[1])))
    advice = f"did you mean {near.code} {near.name}?" if near else "`gaverify rules` lists all"
    raise SpecError(f"there is no rule `{wanted}`; {advice}", "explain")


def _page(text: str, file: str) -> RulePage:
    first, _, body = text.partition("\n")
    read = _FIRST.fullmatch(first)
    if read is None:
        raise InternalError(f"the page {file} starts with {first!r}, not with `# CODE name: one line.`")
    line, _, body = body.lstrip("\n").partition("\n")
    patch = line.removeprefix("Patch: ")
    if patch not in PATCHES:
        raise InternalError(f"the page {file} has the line {line!r}, not one of {', '.join(PATCHES)} behind `Patch: `")
    summary = read["summary"].rstrip(".")
    return RulePage(read["code"], read["name"], read["severity"] or "fault", summary, patch, _sections(body))


def _sections(text: str) -> dict[str, str]:
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("## "):
            lines = sections.setdefault(line.removeprefix("## "), [])
        else:
            lines.append(line.rstrip())
    return {heading: "\n".join(lines).strip("\n") for heading, lines in sections.items()}
