"""Values as JSON. JSON cannot write NaN and infinity, so such numbers become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

VERSION = 1
"""Version of the documents; it grows when a reader of the older one would break."""


def dump_json(document: Mapping[str, Any]) -> str:
    """Returns a document as JSON text."""
    # ASCII escapes keep lone surrogates in names legal and make the bytes the same under every encoding.
    return json.dumps(plain(document), indent=2, ensure_ascii=True, allow_nan=False)


def plain(value: Any) -> Any:
    """Returns `value` in terms of JSON: evidence and specs may hold tuples, enumerations and numbers out of range."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return str(value)


@cache
def fields_of(record: Any) -> dict[str, Any]:
    """Returns the fields of a record with their types; NamedTuples and dataclasses keep them in the same place."""
    return get_type_hints(record)
