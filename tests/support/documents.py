"""The one answer in the document of a command."""

from __future__ import annotations

import json
from typing import Any

from gaverify.report.documents.reading import answer_of


def only_answer(text: str) -> dict[str, Any]:
    """Returns the verdict, audit or profile of a document that holds one; it satisfies the schema and can be read."""
    document = json.loads(text)
    (answer,) = document["answers"]
    answer_of(answer)
    return answer  # type: ignore[no-any-return]
