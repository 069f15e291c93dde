"""One way for every option: from a field to the words of a command line, the keys of a file, and the sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, NamedTuple

from gaverify.errors import nearest, unknown_key
from gaverify.spec.values import Kind


class Option(NamedTuple):
    """The description of one option.

    Args:
        name: The field.
        key: How files call it.
        flags: How the command line calls it; empty: an argument of the command, if it has a place there at all.
        kind: The kind of its values.
        help: Its line on the help page; "" where it has no place on the command line.
        example: A right value, which messages offer as the remedy; a text of several words where it is quoted.
        default: The value where it is left out, right in any case; MISSING: it has to be given.
    """

    name: str
    key: str
    flags: tuple[str, ...]
    kind: Kind
    help: str
    example: Any
    default: Any

    @property
    def flag(self) -> str:
        """How messages call it on the command line."""
        return self.flags[-1].partition("/")[0] if self.flags else self.kind.metavar


def option(
    kind: Kind, help: str, default: Any = None, example: Any = None, *, key: str = "", flags: str | None = None
) -> Any:
    """Returns a field that the command line and files can set.

    Args:
        kind: The kind of its values.
        help: Its line on the help page.
        default: Its value where it is left out; `dict` stands for an empty one.
        example: A right value; the default is one where none is given.
        key: How files call it; empty: as the field.
        flags: How the command line calls it, with spaces between; None: as files do.
    """
    metadata = {"kind": kind, "help": help, "example": default if example is None else example}
    metadata |= {"key": key, "flags": flags, "default": default}
    return (
        field(default_factory=dict, metadata=metadata) if default is dict else field(default=default, metadata=metadata)
    )


def options_of(record: type) -> dict[str, Option]:
    """Returns the options that the fields of a dataclass are, by their names."""
    options = {}
    for entry in fields(record):
        if entry.metadata:
            metadata = dict(entry.metadata)
            key = metadata.pop("key") or entry.name.replace("_", "-")
            flags = metadata.pop("flags")
            options[entry.name] = Option(
                entry.name, key, tuple(f"--{key}".split() if flags is None else flags.split()), **metadata
            )
    return options


def read_words(options: Mapping[str, Option], words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that the words of a command line spell; what cannot be read stays a word.

    Args:
        options: The options, by their names.
        words: The words, by the same names; None and () for what was not given, true or false for a flag.
    """
    typed = {name: word for name, word in words.items() if word is not None and word != ()}
    return {name: word if isinstance(word, bool) else options[name].kind.read(word) for name, word in typed.items()}


def pop_values(options: Mapping[str, Option], values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Takes what the command line says for some options out of all values, and returns it.

    Args:
        options: These options, by their names.
        values: The values of all options of a command.
        problems: Gets a sentence for each value that is none of its kind.
    """
    popped = {name: values.pop(name) for name in options if name in values}
    problems += explain_values(options, popped)
    return popped


def read_table(
    options: Mapping[str, Option], table: Mapping[str, Any], problems: list[str], place: str = "$"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what a table of a file says, and where each option stands in it or would, by the names of options.

    Args:
        options: The options, by their names.
        table: Their keys, with hyphens or underscores, and values.
        problems: Gets a sentence about each key that is unknown or is given twice.
        place: Where the table stands.
    """
    names = {option.key: name for name, option in options.items()}
    values: dict[str, Any] = {}
    places = {name: f"{place}.{option.key}" for name, option in options.items()}
    for key, value in table.items():
        name = names.get(key.replace("_", "-"))
        if name is None:
            # An option that has to be given and lacks is likelier than those that are there.
            missing = [
                option.key for option in options.values() if option.default is MISSING and option.key not in table
            ]
            likely = missing if nearest(key.lower(), missing, 0.8) else list(names)
            problems.append(f"{place}.{key}: {unknown_key(key, likely)}")
        elif name in values:
            problems.append(
                f"{place}.{key}: is given twice, also as `{places[name].removeprefix(f'{place}.')}`; keep one"
            )
        else:
            values[name], places[name] = options[name].kind.load(value), f"{place}.{key}"
    return values, places


def find_wrong(options: Mapping[str, Option], values: Mapping[str, Any]) -> Iterator[tuple[Option, str]]:
    """Yields each option whose value is none of its kind, or lacks; of a table each entry that is none, by its name."""
    for name, option in options.items():
        if name not in values:
            if option.default is MISSING:
                yield option, ""
        elif values[name] is option.default:
            continue
        elif not option.kind.fits(values[name]):
            yield option, ""
        elif option.kind.entry is not None:
            for key, value in values[name].items():
                if not option.kind.entry.fits(value):
                    yield option, key


def explain_values(
    options: Mapping[str, Option], values: Mapping[str, Any], places: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yields a sentence for each value that is none of its kind, with its place in front.

    Args:
        options: The options, by their names.
        values: Their values.
        places: Where each stands; None: all on the command line.
    """
    for option, entry in find_wrong(options, values):
        place = option.flag if places is None else places[option.name]
        sentence = _explain_wrong(option, entry, values, is_word=place == option.flag)
        yield f"{place}{f'.{entry}' if entry else ''}: {sentence}"


def _explain_wrong(option: Option, entry: str, values: Mapping[str, Any], *, is_word: bool) -> str:
    """Returns what is wrong with a value that is none of its kind, and what to write instead.

    Args:
        option: The option.
        entry: The entry of its table, where one is wrong and not the whole.
        values: The given values, by option.
        is_word: Whether it stands on the command line.
    """
    advice = f"write `{write_example(option, is_word=is_word)}`"
    if option.name not in values:
        return f"is missing; {advice}"
    value, kind = values[option.name], option.kind
    must = kind.must
    if kind.entry is not None:
        if entry:
            value, must = value[entry], kind.entry.must
        elif is_word:
            must = f"{kind.metavar}, each name once"
    near = ""
    if isinstance(value, str):
        guess = re.sub(r"\bgpu\b", "cuda", value.lower())  # its spelling is closer to "cpu", which it does not mean
        # 0.5, below the usual 0.6: these words are short, and one wrong letter counts much.
        near = guess if kind.words and kind.fits(guess) else nearest(guess, re.findall(r'"([^"]+)"', must), 0.5)
    return f"must be {must}, got {_write_value(value)}; " + (f'did you mean "{near}"?' if near else advice)


def write_example(option: Option, *, is_word: bool) -> str:
    """Returns the option's example as a word of the command line, or as a line of a file."""
    value = option.example
    if not is_word:
        inline = ""
        if isinstance(value, dict):
            inline = ", ".join(f"{key} = {_write_value(item)}" for key, item in value.items())
        return f"{option.key} = " + (f"{{ {inline} }}" if inline else _write_value(value))
    if isinstance(value, bool):
        return option.flag
    if isinstance(value, dict):
        return f"{option.flag} " + " ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, str) and " " in value:
        return f'{option.flag} "{value}"'
    return f"{option.flag} " + (",".join(map(str, value)) if isinstance(value, tuple) else str(value))


def _write_value(value: Any) -> str:
    """The value as TOML or JSON would write it, cut to what fits a line."""
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value):  # TOML writes a day without quotes
        return value
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
