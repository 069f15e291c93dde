"""What is wrong with a spec, as sentences: what was expected, what stands there, what to write."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gaverify.errors import SpecError, nearest
from gaverify.spec.fields import Spec


def sentence(field: str, key: str, kind: str, value: Any, *, option: bool) -> str:
    """Returns what is wrong with a value and what to write instead.

    Args:
        field: The field of `Spec`.
        key: The model argument, where one is wrong and not the whole field.
        kind: Pydantic's kind of error, or a whole sentence already.
        value: What was written.
        option: Whether it stands on the command line.
    """
    if " " in kind:
        return kind
    advice = f"write `{example(field, option=option)}`"
    if kind == "missing":
        return f"is missing; {advice}"
    table = field == "model_args" and not key
    expected = "a table of names and values" if table else Spec.model_fields[field].description or ""
    words = re.findall(r'"([^"]+)"', expected)
    near = nearest(value.lower(), words, 0.5) if isinstance(value, str) else ""
    return f"must be {expected}, got {_shown(value)}; " + (f'did you mean "{near}"?' if near else advice)


def _shown(value: Any) -> str:
    """The value as TOML or JSON would write it, cut to what fits a line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def option_name(field: str) -> str:
    """Returns the command line's name of a field."""
    if field == "model_args":
        return "--model-arg"
    return "--" + field.replace("_", "-")


def example(field: str, *, option: bool) -> str:
    """Returns the field's first example as TOML, or as an option."""
    value = (Spec.model_fields[field].examples or [""])[0]
    if not option:
        name = field.replace("_", "-")
        inline = ", ".join(f"{key} = {_shown(item)}" for key, item in value.items()) if isinstance(value, dict) else ""
        return f"{name} = {{ {inline} }}" if inline else f"{name} = {_shown(value)}"
    if isinstance(value, bool):
        return option_name(field)
    if isinstance(value, dict):
        return f"{option_name(field)} " + " ".join(f"{key}={item}" for key, item in value.items())
    return f"{option_name(field)} " + (",".join(map(str, value)) if isinstance(value, tuple) else str(value))


def joined(problems: Sequence[tuple[str, list[str]]]) -> SpecError:
    """One error for the problems of several sources; its text has a line each, with the source in front."""
    several = [SpecError(sentences, source) for source, sentences in problems if sentences]
    if len(several) == 1:
        return several[0]
    lines = "\n".join(map(str, several)).splitlines()
    error = SpecError(lines, f"{len(several)} sources")
    error.args = ("\n".join(lines),)
    return error
