"""The kinds of options that an audit takes: how a file's value becomes words, and words a field of `Request`.

The command line and TOML files give the same words; a request is made of them in one place, with all problems at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gaverify.errors import SpecError


@dataclass(frozen=True)
class Kind:
    """What an option is given: here one text, in the classes below flags, numbers, words and pairs."""

    metavar: str
    """How the help page shows it."""
    completes: Literal["", "file", "dir"] = ""
    """What the shell completes; empty: nothing."""

    @property
    def missing(self) -> Any:
        """The words of an option that is left out."""
        return None

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Returns the words that stand for a value of a TOML file; a sentence about a wrong one goes to `problems`."""
        if isinstance(value, list) and all(map(_is_plain, value)):
            return shlex.join(map(_word, value))
        if _is_plain(value):
            return _word(value)
        problems.append(f"$.{key}: must be text, a number or a list of them")
        return None

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the value of a request's field; a sentence about words that spell none goes to `problems`."""
        return words

    def check(self, flag: str, value: Any) -> str:
        """Returns what is wrong with a field's value; empty: nothing."""
        return ""


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    metavar: str = ""

    @property
    def missing(self) -> Any:
        """Off."""
        return False

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Returns the value itself: the command line gives no word for a flag, either."""
        if not isinstance(value, bool):
            problems.append(f"$.{key}: must be true or false")
        return value


@dataclass(frozen=True, kw_only=True)
class Number(Kind):
    """A number."""

    example: int
    """A right number, which messages offer."""
    accepts: Callable[[float], bool]
    """Whether a number is right."""
    limits: str
    """What is wrong with a number that is not."""
    convert: Callable[[str], int | float] = int
    wanted: str = "a whole number"
    """What is wanted in place of a word that is no number."""

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the number."""
        try:
            return None if words is None else self.convert(words)
        except ValueError:
            problems.append(f"{flag} {words!r} is not {self.wanted}; write `{flag} {self.example}`")
            return None

    def check(self, flag: str, value: Any) -> str:
        """Returns what is wrong with a number that was given; empty: nothing."""
        if value is None or self.accepts(value):
            return ""
        return f"{flag} {f'{value:g}' if isinstance(value, float) else value}: {self.limits}"


@dataclass(frozen=True)
class Arguments(Kind):
    """The words behind the options, each by itself."""

    @property
    def missing(self) -> Any:
        """No word."""
        return ()

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Splits a text as a shell does."""
        if isinstance(value, list) and all(map(_is_plain, value)):
            return tuple(map(_word, value))
        text = super().words_of(key, value, problems)
        try:
            return tuple(shlex.split(text or ""))
        except ValueError as error:
            problems.append(f"$.{key}: {text!r} cannot be split into arguments: {error}")
            return ()


@dataclass(frozen=True)
class Quoted(Kind):
    """Words in one quoted text, such as the arguments of one run."""

    empty: str = ""
    """What is wrong with a text without words; empty: nothing."""

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the words; None where the option is left out."""
        if words is None:
            return None
        # An empty text is right for `--full` (no more arguments), but no command for `--launcher`.
        if self.empty and not words.strip():
            problems.append(f"{flag} is empty; {self.empty.format(flag=flag)}")
        try:
            return split_words(words, flag)
        except SpecError as error:
            problems += error.problems
            return ()


@dataclass(frozen=True)
class Assignments(Kind):
    """NAME=VALUE, repeatable; a table in files."""

    example: str = ""

    @property
    def missing(self) -> Any:
        """No pair."""
        return ()

    def words_of(self, key: str, value: object, problems: list[str]) -> Any:
        """Returns a word for each entry of the table."""
        if not isinstance(value, dict) or not all(map(_is_plain, value.values())):
            problems.append(f"$.{key}: must be a table of names and values; write `{key} = {{ NAME = 4 }}`")
            return ()
        return tuple(f"{name}={_word(item)}" for name, item in value.items())

    def read(self, flag: str, words: Any, problems: list[str]) -> Any:
        """Returns the pairs."""
        pairs: dict[str, str] = {}
        for word in words:
            name, sign, value = word.partition("=")
            if not sign or not name or "\0" in word:  # no variable of a process may hold a zero byte
                problems.append(f"{flag} {word!r} has no name and value; write `{flag} {self.example}`")
            # The later value would win without a word, and the run would not be the one that was meant.
            elif name in pairs:
                problems.append(f"{flag} gives `{name}` twice: {pairs[name]!r} and {value!r}")
            else:
                pairs[name] = value
        return tuple(pairs.items())


class Option(NamedTuple):
    """What is known of one field of `Request`.

    Args:
        kind: What it is given.
        help: What the help page says.
        flags: How the command line calls it; empty: an argument of the command.
    """

    kind: Kind
    help: str
    flags: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The name that messages use; empty for an argument."""
        return self.flags[-1] if self.flags else ""


def option(kind: Kind, help: str, *flags: str, default: Any = None) -> Any:
    """Returns a field of `Request` that the command line and files can set."""
    return field(default=default, metadata={"option": Option(kind, help, flags)})


def split_words(text: str, flag: str) -> tuple[str, ...]:
    """Returns the arguments that a quoted string holds, as a shell would split it.

    Raises:
        SpecError: A quote is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SpecError(f"{flag} {text!r} cannot be split into arguments: {error}") from error


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int, float))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)  # TOML writes `true`, Python `True`
