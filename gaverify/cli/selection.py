"""Which of the specs a run takes: the expression of `-k`, in the words of pytest."""

from __future__ import annotations

import re
from collections.abc import Callable

from gaverify.errors import SpecError

Choice = Callable[[str], bool]
_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")


def read_expression(text: str) -> Choice:
    """Returns whether a name is chosen by an expression of words, `and`, `or`, `not` and parentheses.

    A word chooses the names that contain it, in capitals or not.

    Raises:
        SpecError: It is no such expression.
    """
    tokens = _TOKEN.findall(text)
    try:
        choice = _read_or(tokens)
    except IndexError:  # a word was missing, or stood where none of its kind may stand
        tokens = ["its end"]
    if tokens or not text.strip():
        raise SpecError(
            f"-k: `{text}` cannot be read{f' at {tokens[0]}' if tokens else ''}; write words with `and`, `or`, `not` "
            "and parentheses, such as -k 'cnn and not slow'"
        )
    return choice


# One function for each level of precedence, as in Python: `or` binds weakest, then `and`, then `not`. Each takes its
# tokens off the front of the list.
def _read_or(tokens: list[str]) -> Choice:
    choices = [_read_and(tokens)]
    while tokens and tokens[0] == "or":
        tokens.pop(0)
        choices.append(_read_and(tokens))
    return lambda name: any(choice(name) for choice in choices)


def _read_and(tokens: list[str]) -> Choice:
    choices = [_read_word(tokens)]
    while tokens and tokens[0] == "and":
        tokens.pop(0)
        choices.append(_read_word(tokens))
    return lambda name: all(choice(name) for choice in choices)


def _read_word(tokens: list[str]) -> Choice:
    word = tokens.pop(0)
    if word == "not":
        choice = _read_word(tokens)
        return lambda name: not choice(name)
    if word == "(":
        choice = _read_or(tokens)
        if tokens.pop(0) != ")":
            raise IndexError
        return choice
    if word in (")", "and", "or"):
        raise IndexError
    return lambda name: word.lower() in name.lower()
