"""The one answer in the document of a command."""

from __future__ import annotations

import json
from typing import Any


def only_answer(text: str) -> dict[str, Any]:
    """Returns the verdict, audit or profile of a document that holds one."""
    document = json.loads(text)
    (answer,) = document["verdicts"] + document["audits"] + document["profiles"]
    return answer  # type: ignore[no-any-return]
