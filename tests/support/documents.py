"""Documents of a command, and answers of any content."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from gaverify.report.documents.reading import answer_of


def only_answer(text: str) -> dict[str, Any]:
    """Returns the verdict, audit or profile of a document that holds one; it can be read."""
    document = json.loads(text)
    (answer,) = document["answers"]
    answer_of(answer)
    return answer  # type: ignore[no-any-return]


def records_of(kind: Any, numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    """Returns values of the type of a record or of a field, with any content that its types allow."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return records_of(parts[0], numbers)
    if origin is Mapping:
        values = _plain_values(numbers) if parts[1] is Any else records_of(parts[1], numbers)
        return st.dictionaries(records_of(parts[0], numbers), values, max_size=2)
    if origin is tuple:
        return st.lists(records_of(parts[0], numbers), max_size=2).map(tuple)
    if parts and origin is not Literal:
        return st.one_of(*(records_of(part, numbers) for part in parts))
    if kind is float:
        return numbers
    names = kind.__dict__.get("_fields", ()) if not dataclasses.is_dataclass(kind) else _written_fields(kind)
    if not names:
        return st.from_type(kind)
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: st.deferred(lambda of=hints[name]: records_of(of, numbers)) for name in names})


def _written_fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in kind.unwritten]


def _plain_values(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | numbers | st.text()
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2), max_leaves=3
    )
