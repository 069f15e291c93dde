"""From answers to documents and back: the shapes say which keys there are, and where the records hold their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

from gaverify.report.documents.schema.deriving import Of, Shape


class _Key(NamedTuple):
    """A key of a document, where a record holds its value, and the shape of that value, or of each item of a list."""

    name: str
    source: str | Callable[[Any], Any]
    inner: type[Shape] | None
    listed: bool


def encoded(shape: type[Shape], record: Any) -> dict[str, Any]:
    """Returns the document of this shape that a record fills, as plain containers, not yet fit for JSON."""
    return {key.name: _value(key, record) for key in _keys(shape)}


def _value(key: _Key, record: Any) -> Any:
    if callable(key.source):
        record = key.source(record)
    else:
        for name in filter(None, key.source.split(".")):
            record = None if record is None else getattr(record, name)
    if key.inner is None or record is None:
        return record
    return [encoded(key.inner, item) for item in record] if key.listed else encoded(key.inner, record)


def decoded(shape: type[Shape], document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a document under the names that the records have; computed ones are left out."""
    values: dict[str, Any] = {}
    for key in _keys(shape):
        if key.name not in document or callable(key.source):
            continue
        value = document[key.name]
        if key.inner is not None and value is not None:
            inner = key.inner
            value = [decoded(inner, item) for item in value] if key.listed else decoded(inner, value)
        if not key.source:  # the document groups fields of the record itself
            values |= value or {}
            continue
        *path, last = key.source.split(".")
        place = values
        for name in path:
            place = place.setdefault(name, {})
        if value is not None or not path:
            place[last] = value
    return values


@cache
def _keys(shape: type[Shape]) -> tuple[_Key, ...]:
    return tuple(_key(name, field.annotation, field.metadata) for name, field in shape.model_fields.items())


def _key(name: str, kind: Any, metadata: list[Any]) -> _Key:
    constant = get_args(kind)
    if get_origin(kind) is Literal and len(constant) == 1:  # a key that says the same in every document
        return _Key(name, lambda _: constant[0], None, False)
    source = next((given.source for given in metadata if isinstance(given, Of)), name)
    parts = (kind, *get_args(kind))
    inner = next((part for part in parts if isinstance(part, type) and issubclass(part, Shape)), None)
    return _Key(name, source, inner, get_origin(kind) is list)
