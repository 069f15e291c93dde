"""Proposes patches for the findings of an audit, the likeliest first.

Each code of a finding has functions that know shapes of source in which this fault occurs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

from gaverify.errors import ProblemError
from gaverify.patches.candidates import Candidate
from gaverify.patches.frameworks import guard_by_accelerator, tell_steps
from gaverify.patches.layers import replace_batch_norm, replace_layers
from gaverify.patches.loop import LoopModel
from gaverify.patches.placement import (
    repair_boundary,
    repair_clearing,
    repair_clipping,
    repair_counter,
    repair_scaler,
    repair_schedule,
    repair_step,
    repair_tail,
)
from gaverify.patches.scale import repair_factor
from gaverify.patches.sources import Context, apply, encode_source, render_diff
from gaverify.patches.weights import repair_shares
from gaverify.records.findings import Finding
from gaverify.records.patch import Patch

Recogniser = Callable[[LoopModel, Finding], Iterator[Candidate]]
RECOGNISERS: Mapping[str, tuple[Recogniser, ...]] = {
    "GAV201": (repair_factor,),
    "GAV202": (repair_shares, repair_factor),
    "GAV203": (repair_shares,),
    "GAV101": (replace_layers, replace_batch_norm),
    "GAV601": (tell_steps, guard_by_accelerator, repair_boundary, repair_step, repair_clearing),
    "GAV602": (repair_clearing, repair_tail, repair_boundary),
    "GAV603": (guard_by_accelerator, repair_clearing, repair_step, repair_boundary),
    "GAV604": (repair_tail, repair_boundary),
    "GAV605": (repair_tail,),
    "GAV606": (
        guard_by_accelerator,
        repair_clipping,
    ),
    "GAV607": (
        guard_by_accelerator,
        repair_schedule,
    ),
    "GAV608": (repair_scaler, repair_clipping),
    "GAV609": (repair_counter, repair_schedule),
}
"""The repairs that may fit a finding, by its code."""


def propose(findings: Sequence[Finding], context: Context) -> Iterator[Patch]:
    """Yields patches that may repair the faults, the likeliest first; none where the shape of the source is unknown."""
    model = LoopModel(context)
    texts = {file: source.text for file, source in context.sources.items()}
    # A user who accepted a fault wants to keep it.
    faults = [finding for finding in findings if finding.severity == "fault" and not finding.accepted]
    proposed: set[tuple[tuple[str, str], ...]] = set()
    # A proven cause is repaired first: a suspected one may be none.
    for finding in sorted(faults, key=lambda finding: not finding.proven):
        for recogniser in RECOGNISERS.get(finding.code, ()):
            for candidate in recogniser(model, finding):
                patch = patch_of(candidate, finding.code, context, texts)
                if patch is None:
                    continue
                # Different recognisers may make the same text; a trial costs whole runs of the script.
                changed = tuple(sorted(apply(patch, texts).items()))
                if changed not in proposed:
                    proposed.add(changed)
                    yield patch


def patch_of(candidate: Candidate, code: str, context: Context, texts: Mapping[str, str]) -> Patch | None:
    """Returns a candidate as a patch; None where it changes nothing or the result does not parse."""
    digests = {edit.file: context.sources[edit.file].digest for edit in candidate.edits}
    patch = Patch(candidate.edits, (code,), candidate.title, "", candidate.unsafe, digests)
    try:
        after = apply(patch, texts)
        # Edits of unusual source may break it. The bytes are parsed, because Python reads a declared encoding.
        for text in after.values():
            ast.parse(encode_source(text))
    except (ProblemError, SyntaxError, ValueError):
        return None
    diff = render_diff(texts, after)
    return Patch(candidate.edits, (code,), candidate.title, diff, candidate.unsafe, digests) if diff else None
