"""How records become objects of JSON documents and are read back: by pydantic, which loads when it is needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T", bound=type)


def _object_schema(record: Any, _: Any, handler: Any) -> Any:
    """Returns how pydantic writes, reads and describes the object of a dataclass or NamedTuple."""
    from pydantic_core import core_schema

    hints = get_type_hints(record, include_extras=True)
    defaults = _defaults_of(record)
    unwritten, written = (getattr(record, attribute, ()) for attribute in ("unwritten", "written"))
    fields = {name: handler.generate_schema(hints[name]) for name in defaults if name not in unwritten}
    types = {name: _type_of(record, name, hints) for name in written if name not in defaults}
    properties = {name: handler.generate_schema(kind) for name, kind in types.items()}
    field = core_schema.typed_dict_field
    # They are computed again, whatever is read.
    read = {name: field(schema, required=False) for name, schema in properties.items()}
    read |= {name: field(schema, required=defaults[name]) for name, schema in fields.items()}
    names = {name: (properties | fields)[name] for name in (*written, *fields)}
    # The reference makes one definition of all uses in the schema of a document.
    described = core_schema.typed_dict_schema(
        {name: field(schema) for name, schema in names.items()},
        ref=f"{record.__module__}.{record.__qualname__}:{id(record)}",
        extra_behavior="forbid",
    )
    return core_schema.no_info_after_validator_function(
        lambda values: record(**{name: value for name, value in values.items() if name in fields}),
        core_schema.typed_dict_schema(read, extra_behavior="forbid"),
        serialization=core_schema.plain_serializer_function_ser_schema(
            lambda instance: {name: getattr(instance, name) for name in names}, return_schema=described
        ),
    )


class JsonRecord:
    """A record whose JSON object has exactly these keys: some properties, then its fields.

    The properties are written for readers of the document, and computed again when it is read. A field with a default
    may be missing in a document that is read.
    """

    written: ClassVar[tuple[str, ...]] = ()
    """Names of the keys that come first: properties and constants, and fields for the sake of their place."""
    unwritten: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are not: each has a default."""

    __get_pydantic_core_schema__ = classmethod(_object_schema)


def json_object(*written: str) -> Callable[[T], T]:
    """Decorates a NamedTuple, which has no other base: its JSON object is that of such a record, and no list."""

    def decorate(record: T) -> T:
        for name, value in (("written", written), ("__get_pydantic_core_schema__", classmethod(_object_schema))):
            setattr(record, name, value)
        return record

    return decorate


@cache
def adapter_of(record: Any) -> TypeAdapter[Any]:
    """Returns what reads, writes and describes a record, or one of several."""
    # Loads pydantic, which only documents need.
    from pydantic import TypeAdapter

    return TypeAdapter(record)


def as_json(record: Any) -> dict[str, Any]:
    """Returns the JSON object of a record."""
    # Pydantic writes a value of another type than the field's as what it is, and one that it does not know as its text.
    serializer = adapter_of(cast(Any, type(record))).serializer
    document: dict[str, Any] = serializer.to_python(record, mode="json", warnings=False, fallback=str)
    return document


def _defaults_of(record: Any) -> dict[str, bool]:
    """Returns the fields of a record, and whether each must be given."""
    if dataclasses.is_dataclass(record):
        missing = dataclasses.MISSING
        return {
            field.name: field.default is missing and field.default_factory is missing
            for field in dataclasses.fields(record)
        }
    return {name: name not in record._field_defaults for name in record._fields}


def _type_of(record: Any, name: str, hints: Mapping[str, Any]) -> Any:
    """Returns the type of a property or of a constant of the class."""
    attribute = getattr(record, name)
    if isinstance(attribute, property):
        return get_type_hints(attribute.fget, include_extras=True)["return"]
    return get_args(hints[name])[0] if get_origin(hints[name]) is ClassVar else hints[name]


# Values of any type: specs and evidence may hold anything.


class _AnyInJson:
    """Tells pydantic to write a mapping with values of any type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return handler(source) | {"serialization": core_schema.plain_serializer_function_ser_schema(plain_value)}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": True}


JsonObject = Annotated[Mapping[str, Any], _AnyInJson()]
"""Names and values of any type, which documents write in terms of JSON."""


def plain_value(value: Any) -> Any:
    """Returns any value in terms of JSON: NaN and infinities, which JSON lacks, as None, and others as their text."""
    if isinstance(value, Mapping):
        return {str(plain_value(key)): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain_value(item) for item in value), key=str)
    if isinstance(value, Enum):
        return plain_value(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # A subclass, such as a number of NumPy, may print in its own way.
    kind = next((kind for kind in (int, float) if isinstance(value, kind)), str)
    return kind(value)
