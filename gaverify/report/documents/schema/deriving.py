"""Shapes of documents out of records, and documents out of records and back by their shapes.

A key has the type that the record's field or property has, as JSON writes it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field

from gaverify.report.documents.encoding import fields_of

Number = Annotated[float | None, Field(description="A finite number; null stands for NaN or an infinity.")]


@dataclass(frozen=True)
class Of:
    """Where a record holds the value of a key, if not in the attribute of that name.

    Args:
        source: A path of attributes, "" for the record itself, whose fields a document groups, or a function of it.
    """

    source: str | Callable[[Any], Any]


class Shape(BaseModel):
    """A JSON object with exactly these keys; one with a default may be missing, as older documents lack it."""

    # Strict and closed: a key that is new, missing or of another type must change the version or fail the tests.
    # What a class states is only read: validators are built of the shapes that are used.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


Derived = TypeVar("Derived", bound=Shape)
_SHAPES: dict[Any, type[Shape]] = {}


def derive_shape(
    record: Any, keys: str = "", older: str = "", *, finite: bool = False
) -> Callable[[type[Derived]], type[Derived]]:
    """Gives a shape the keys of a record; those that the class itself states are taken as it states them.

    Args:
        record: A dataclass or a NamedTuple. Where another record has it for a field, this shape stands in its document.
        keys: The keys in their order, `key=path.of.attributes` where the record calls it otherwise; "" for its fields.
        older: Keys that older documents lack: they get the record's default.
        finite: Numbers of this record are never NaN or infinite.
    """

    def add_keys(shape: type[Derived]) -> type[Derived]:
        stated = get_type_hints(shape, include_extras=True)
        annotations: dict[str, Any] = {}
        space: dict[str, Any] = {"__doc__": shape.__doc__, "__module__": shape.__module__}
        for word in keys.split() or fields_of(record):
            key, _, source = word.partition("=")
            if key in shape.model_fields:
                annotations[key], info = stated[key], shape.model_fields[key]
                space |= {} if info.is_required() else {key: info}
                continue
            kind = _of_path(record, source or key, finite)
            annotations[key] = Annotated[kind, Of(source)] if source else kind
            if key in older.split():
                space[key] = _default(record, source or key)
        full_shape = types.new_class(
            shape.__name__, (Shape,), {}, lambda names: names.update(space, __annotations__=annotations)
        )
        _SHAPES[record] = full_shape
        return full_shape  # type: ignore[return-value]  # with the keys that the class states, and more

    return add_keys


def _default(record: Any, path: str) -> Any:
    *owners, name = path.split(".")
    for owner in owners:
        record = fields_of(record)[owner]
    field = record.__dataclass_fields__[name]
    value = field.default_factory() if callable(field.default_factory) else field.default
    if isinstance(value, (tuple, dict)):
        return Field(default_factory=dict if isinstance(value, dict) else list)
    return value.value if isinstance(value, Enum) else value


def _of_path(record: Any, path: str, finite: bool) -> Any:
    """The type of what a path of attributes leads to; None where one on the way is None."""
    kind, optional = record, False
    for name in path.split("."):
        owner = _present(kind)
        optional = optional or owner is not kind
        owner_fields = fields_of(owner)
        kind = owner_fields[name] if name in owner_fields else get_type_hints(getattr(owner, name).fget)["return"]
    json_type = _as_json(kind, finite)
    return json_type | None if optional and json_type is not Number else json_type


def _present(kind: Any) -> Any:
    """A type without None."""
    parts = get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)
    return next(part for part in parts if part is not types.NoneType)


def _as_json(kind: Any, finite: bool) -> Any:
    origin, inner, present = get_origin(kind), get_args(kind), _present(kind)
    if present is not kind:
        json_type = _as_json(present, finite)
        return json_type if json_type is Number else json_type | None
    if kind is float:
        return float if finite else Number
    if origin is tuple and inner[-1] is ...:
        return list[_as_json(inner[0], finite)]  # type: ignore[misc]  # made at run time
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, _as_json(inner[1], finite)]  # type: ignore[misc]  # made at run time
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Literal[tuple(member.value for member in kind)]
    return _SHAPES.get(kind, kind)


class _Key(NamedTuple):
    """A key of a document, where a record holds its value, and the shape of that value, or of each item of a list."""

    name: str
    source: str | Callable[[Any], Any]
    inner: type[Shape] | None
    listed: bool


def encode_record(shape: type[Shape], record: Any) -> dict[str, Any]:
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
    return [encode_record(key.inner, item) for item in record] if key.listed else encode_record(key.inner, record)


def decode_document(shape: type[Shape], document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a document under the names that the records have; computed ones are left out."""
    values: dict[str, Any] = {}
    for key in _keys(shape):
        if key.name not in document or callable(key.source):
            continue
        value = document[key.name]
        if key.inner is not None and value is not None:
            inner = key.inner
            value = [decode_document(inner, item) for item in value] if key.listed else decode_document(inner, value)
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
    source = next((annotation.source for annotation in metadata if isinstance(annotation, Of)), name)
    parts = (kind, *get_args(kind))
    inner = next((part for part in parts if isinstance(part, type) and issubclass(part, Shape)), None)
    return _Key(name, source, inner, get_origin(kind) is list)
