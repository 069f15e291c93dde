"""Numbers that may be NaN or infinite, and how documents write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any


class _NullInJson:
    """Tells pydantic that null stands for a number; records load pydantic only when a document is read."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(lambda number: math.nan if number is None else number, handler(source))

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        description = "A finite number; null stands for NaN or an infinity."
        return {"anyOf": [{"type": "number"}, {"type": "null"}], "description": description}


Number = Annotated[float, _NullInJson()]
"""A float that may be NaN or infinite. JSON has neither: null is written for both, and read as NaN."""
