"""From answers to documents: the shapes say which keys there are and where the records hold their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from gaverify.report.documents.schema.shared import Of, Shape


def encoded(shape: type[Shape], record: Any) -> dict[str, Any]:
    """Returns the document of this shape that a record fills, as plain containers, not yet fit for JSON."""
    return {key: take(record) for key, take in _takers(shape)}


@cache
def _takers(shape: type[Shape]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """For each key of a document, in order, the function that takes its value from a record."""
    return tuple((key, _taker(key, field)) for key, field in shape.model_fields.items())


def _taker(key: str, field: FieldInfo) -> Callable[[Any], Any]:
    kind = field.annotation
    if get_origin(kind) is Literal and len(get_args(kind)) == 1:  # a key that says the same in every document
        return lambda _: get_args(kind)[0]
    source = next((given.source for given in field.metadata if isinstance(given, Of)), key)
    find = source if callable(source) else _follow(source)
    inner = next((part for part in (kind, *get_args(kind)) if _is_shape(part)), None)
    if inner is None:
        return find
    if get_origin(kind) is list:
        return lambda record: [encoded(inner, item) for item in find(record)]
    return lambda record: None if (found := find(record)) is None else encoded(inner, found)


def _is_shape(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Shape)


def _follow(path: str) -> Callable[[Any], Any]:
    """A function from a record to the attribute at a path; None where a part of it is None, "" is the record itself."""
    names = path.split(".") if path else []

    def find(record: Any) -> Any:
        for name in names:
            record = None if record is None else getattr(record, name)
        return record

    return find
