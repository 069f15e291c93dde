"""Turns the words of an audit's options into numbers and settings; a word that cannot be read becomes a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from gaverify.audit.request import Setting

_Number = TypeVar("_Number", int, float)


def settings_of(
    full_script: str | None, given: dict[str, tuple[str, ...]], problems: list[str]
) -> tuple[Setting, Setting]:
    """What each run alone is given; a value for every run stands in both."""
    from gaverify.audit.request import Setting

    both = _pairs("--set", given["both_set"], problems)
    settings = []
    for run, script in (("full", full_script), ("accumulated", None)):
        variables = _pairs(f"--{run}-env", given[f"{run}_env"], problems)
        values = _pairs(f"--{run}-set", given[f"{run}_set"], problems)
        settings.append(Setting(script, variables, (*both, *values)))
    return settings[0], settings[1]


def _pairs(option: str, words: Sequence[str], problems: list[str]) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name or "\0" in word:
            example = "BATCH_SIZE=4" if option.endswith("set") else "CUDA_VISIBLE_DEVICES=0"
            problems.append(f"{option} {word!r} has no name and value; write `{option} {example}`")
        elif name in dict(pairs):
            problems.append(f"{option} gives `{name}` twice: {dict(pairs)[name]!r} and {value!r}")
        else:
            pairs.append((name, value))
    return tuple(pairs)


def whole(option: str, word: str | None, problems: list[str], instead: int) -> int:
    """Returns the whole number that a word spells; `instead` where there is no word, or none that is a number."""
    return number(option, word, problems, int, instead, f"a whole number; write `{option} {instead}`")


def number(
    option: str, word: str | None, problems: list[str], kind: type[_Number], instead: _Number, wanted: str
) -> _Number:
    """Returns the number of a kind that a word spells; the problem says what was `wanted`."""
    try:
        return instead if word is None else kind(word)
    except ValueError:
        problems.append(f"{option} {word!r} is not {wanted}")
        return instead
