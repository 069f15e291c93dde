"""gaverify proves whether gradient accumulation computes the gradient of the full batch.

Public names are resolved on first use (PEP 562): `import gaverify` does not pay for `import torch`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gaverify.records.answers import Answer, AnswerWriter
from gaverify.version import __version__

if TYPE_CHECKING:
    from gaverify import remedies as remedies
    from gaverify.errors import GaverifyError as GaverifyError
    from gaverify.errors import ProblemError as ProblemError
    from gaverify.errors import SpecError as SpecError
    from gaverify.passes.batching import Problem as Problem
    from gaverify.records.findings import Finding as Finding
    from gaverify.records.outcomes import Outcome as Outcome
    from gaverify.records.outcomes import ParameterComparison as ParameterComparison
    from gaverify.records.verdict import Verdict as Verdict
    from gaverify.tracebacks import fill_in as fill_in
    from gaverify.verification import assert_equivalent as assert_equivalent
    from gaverify.verification import verify as verify

_HOMES = {
    "GaverifyError": "gaverify.errors",
    "ProblemError": "gaverify.errors",
    "SpecError": "gaverify.errors",
    "Problem": "gaverify.passes.batching",
    "Finding": "gaverify.records.findings",
    "Outcome": "gaverify.records.outcomes",
    "ParameterComparison": "gaverify.records.outcomes",
    "Verdict": "gaverify.records.verdict",
    "assert_equivalent": "gaverify.verification",
    "fill_in": "gaverify.tracebacks",
    "verify": "gaverify.verification",
}

_ROOMS = ("remedies",)

__all__ = ["__version__", *_HOMES, *_ROOMS]


def _load_writer() -> AnswerWriter:
    from gaverify import report

    return report


# Records lie below the report, and may not import it to print themselves.
Answer.load_writer = staticmethod(_load_writer)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"gaverify.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'gaverify' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
