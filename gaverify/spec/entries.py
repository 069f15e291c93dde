"""Entries that accept a known divergence: what a spec, `pyproject.toml` or an audit's options say, checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from datetime import date
from functools import cache
from importlib.resources import files as resources
from typing import Any

from gaverify.errors import nearest
from gaverify.spec.options import explain_values, option, options_of, read_table
from gaverify.spec.values import DATE, FLAG, TEXT

EXAMPLE = '{ code = "GAV101", location = "backbone.*", reason = "ghost batch norm on purpose" }'
_UNEXPLAINED = "GAV000"


@dataclass(frozen=True)
class Accept:
    """A divergence that is known and wanted.

    `location` is a pattern (`*`, `?`, `[…]`) for the module's path (`(root)` for the model itself), the file or
    `file:line`; `suspected` accepts a cause that no control run proved, too. After the day `until` it accepts nothing.
    """

    code: str = option(TEXT, "", MISSING, "GAV101")
    location: str = option(TEXT, "", MISSING, "backbone.*")
    reason: str = option(TEXT, "", MISSING, "ghost batch norm on purpose")
    suspected: bool = option(FLAG, "", False, True)
    until: str = option(DATE, "", "", "2027-03-01")

    @property
    def is_expired(self) -> bool:
        """Whether the last day on which it accepts is over."""
        return bool(self.until) and date.today() > date.fromisoformat(self.until)

    def __str__(self) -> str:
        """How sentences call the entry."""
        return f"{self.code} at `{self.location}`"


_OPTIONS = options_of(Accept)


@cache
def rule_codes() -> frozenset[str]:
    """Returns the codes of all rules: each has a page of its name, which need not be read for that."""
    pages = resources("gaverify") / "rules" / "pages"
    return frozenset(page.name.removesuffix(".md") for page in pages.iterdir() if page.name.endswith(".md"))


def code_problems(codes: Iterable[str]) -> list[str]:
    """Returns a sentence for each word that begins no rule's code."""
    return [
        f"no rule's code begins with `{code}`; `gaverify rules` lists all, such as GAV301 or GAV4 for a group"
        for code in codes
        if not any(rule_code.startswith(code) for rule_code in rule_codes())
    ]


def read_entries(value: Any, place: str, problems: list[str]) -> tuple[Accept, ...]:
    """Returns the entries of a list of tables.

    Args:
        value: The list.
        place: Where it stands, for messages.
        problems: Gets a sentence for everything that is wrong; then there are no entries.
    """
    if not isinstance(value, list | tuple):
        problems.append(f"{place}: must be a list of tables; write `accept = [{EXAMPLE}]`")
        return ()
    sentences = [text for at, entry in enumerate(value) for text in _entry_problems(entry, f"{place}[{at}]")]
    problems += sentences
    return () if sentences else tuple(Accept(**read_table(_OPTIONS, entry, [])[0]) for entry in value)


def _entry_problems(entry: Any, place: str) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{place}: must be a table; write `{EXAMPLE}`"
        return
    problems: list[str] = []
    values, places = read_table(_OPTIONS, entry, problems, place)
    yield from (*problems, *explain_values(_OPTIONS, values, places))
    code = values.get("code", "")
    if TEXT.fits(code):
        if not re.fullmatch(r"GAV\d{3}", code):
            yield f"{place}.code: must be a code such as GAV101, got `{code}`; `gaverify rules` lists all"
        # A code that no rule has would never accept anything, and nobody would notice.
        elif code not in rule_codes():
            near = nearest(code, sorted(rule_codes()))
            yield f"{place}.code: there is no rule {code}; did you mean {near}? `gaverify rules` lists all"
        elif code == _UNEXPLAINED:
            yield (
                f"{place}.code: {code} means that no cause was found, and an unexplained divergence cannot be accepted"
            )
