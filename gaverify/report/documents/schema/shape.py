"""Shapes: what the JSON object of a record looks like, where it differs from the record's own fields.

A record without a shape is written as its fields. Pydantic checks both and makes the schema of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Of:
    """Annotates a key that a record does not hold in an attribute of the same name.

    Args:
        source: A path of attributes, such as "window.sizes", or a function of the record.
    """

    source: str | Callable[[Any], Any]


class Shape(BaseModel):
    """A JSON object with exactly these keys; a key with a default is missing in older documents."""

    # A key that is new, missing or of another type must change the version or fail the tests.
    # Validators are built when they are used: to write a document takes none.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    record: ClassVar[Any] = None
    """The dataclass or NamedTuple that fills the object; None where the answer's document groups values in it."""

    def __init_subclass__(cls, record: Any = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.record = record
        if record is not None:
            _SHAPES[record] = cls

    def to_record(self) -> Any:
        """Returns the record that this object was written of; keys that an older document lacks have its defaults."""
        values = _Group()
        for key, source in _sources(type(self)).items():
            *groups, name = (source if isinstance(source, str) else key).split(".")
            # A record computes the keys that it has no field for.
            if key in self.model_fields_set and (groups or [name])[0] in _field_types(self.record):
                place = values
                for group in groups:
                    place = place.setdefault(group, _Group())
                place[name] = to_record(getattr(self, key))
        return _build(self.record, values)


_SHAPES: dict[Any, type[Shape]] = {}


class _Group(dict[str, Any]):
    """Values of the fields of a record that lies inside another and has no JSON object of its own."""


def as_json(value: Any) -> Any:
    """Returns any value in terms of JSON: records as their objects, NaN and infinities, which JSON lacks, as None.

    Evidence and specs may hold anything.
    """
    if (shape := _SHAPES.get(type(value))) is not None:
        return {key: as_json(_read(value, source)) for key, source in _sources(shape).items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(_scalar(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=str)
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, Enum):
        return as_json(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # A subclass, such as a number of NumPy, may print in its own way.
    kind = next((kind for kind in (int, float) if isinstance(value, kind)), str)
    return kind(value)


def _read(record: Any, source: str | Callable[[Any], Any]) -> Any:
    if callable(source):
        return source(record)
    for name in source.split("."):
        record = None if record is None else getattr(record, name)
    return record


def to_record(value: Any) -> Any:
    """Returns a value of a checked document with the record of each object in it."""
    if isinstance(value, tuple):
        return tuple(map(to_record, value))
    return value.to_record() if isinstance(value, Shape) else value


def _build(record: Any, values: _Group) -> Any:
    """Returns a record of the values of its fields; a group without any value leaves its field at the default."""
    arguments = {}
    for name, value in values.items():
        if not isinstance(value, _Group):
            arguments[name] = value
        elif any(part is not None for part in value.values()):
            arguments[name] = _build(_present(_field_types(record)[name]), value)
    return record(**arguments)


def _present(kind: Any) -> Any:
    """A type without None."""
    return next((part for part in get_args(kind) if part is not NoneType), kind)


_field_types = cache(get_type_hints)


@cache
def _sources(shape: type[Shape]) -> dict[str, str | Callable[[Any], Any]]:
    """Returns key → where a record holds its value."""
    return {
        key: next((note.source for note in field.metadata if isinstance(note, Of)), key)
        for key, field in shape.model_fields.items()
    }
