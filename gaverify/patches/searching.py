"""Searches the patch that makes an audit's runs equivalent: tries proposals, and repairs faults that one leaves.

A script may have several faults. A proposal that removes one of them changes what the audit finds in the copy; the
search then goes on from that copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal, Protocol

from gaverify.patches.proposing import propose
from gaverify.patches.sources import Context, Source, apply, render_diff, split_lines
from gaverify.records.audit import Record
from gaverify.records.audit_report import Audit
from gaverify.records.findings import Finding
from gaverify.records.outcomes import Outcome
from gaverify.records.patch import Edit, Patch

Patches = Literal["none", "safe", "unsafe"]
"""Which patches are tried: none, those that keep the model and the meaning of hyperparameters, or all."""

_TRIALS = 12
"""Audits of patched sources that are made at most."""
_RESCALES = "the learning rate means something else: the full batch's gradient becomes"
_DEPTH = 3
"""Faults of one script that are repaired one after the other."""


@dataclass(frozen=True)
class TrialResult:
    """The outcome of an audit of patched sources."""

    is_equivalent: bool
    """Whether every update agrees."""
    findings: tuple[Finding, ...] = ()
    """The findings in them."""
    record: Record | None = None
    """The record of its runs; None where a run failed."""
    factor: float = math.nan
    """The full batch's gradient as a multiple of the unpatched one's: 1 where it stayed; NaN for none or not asked."""


class PatchTrial(Protocol):
    """Makes the audit again with patched sources."""

    def __call__(self, texts: Mapping[str, str], *, safe: bool) -> TrialResult:
        """Returns what it finds; `safe`: the full batch's gradient is compared with the unpatched one's."""


def explain_no_trial(report: Audit, *, events_only: bool) -> str:
    """Says why no patch is looked for where an audit shows no difference; "" where nothing is wrong."""
    if events_only:
        return "without gradients no patch can be tried: leave out `--events-only`"
    if report.outcome is Outcome.EQUIVALENT:
        return ""
    return "the audit shows no difference that a patch could be tried against"


def search_patch(
    findings: Sequence[Finding], context: Context, trial: PatchTrial, *, allow_unsafe: bool
) -> tuple[Patch | None, str]:
    """Returns the first patch that makes the runs equivalent, or None and a sentence why there is none.

    Args:
        findings: The findings of the unpatched audit.
        context: Its record and the sources.
        trial: Makes the audit again with patched sources.
        allow_unsafe: Whether a patch may change the model, or the meaning of a hyperparameter.
    """
    search = _Search(context, trial, allow_unsafe)
    patch = search.repair(findings, context, ())
    # A patch that rescales is the last choice, although it makes both runs agree: it changes the learning rate.
    if patch is None and allow_unsafe:
        patch = next(iter(search.rescaling), None)
    if patch is not None:
        return patch, ""
    if search.unsafe_titles:
        return None, f"the only patch is unsafe and printed only with `--unsafe`: {search.unsafe_titles[0]}"
    if not search.trials:
        return None, "the source has none of the shapes that gaverify can patch; the finding says what to change"
    count = f"{search.trials} patches were" if search.trials > 1 else "1 patch was"
    return None, f"{count} tried on copies and did not make the runs equivalent; the finding says what to change"


class _Search:
    """Tries proposals, depth first: where one changes which faults there are, what is left is repaired next."""

    def __init__(self, context: Context, trial: PatchTrial, allow_unsafe: bool) -> None:
        self._context, self._trial, self._allow_unsafe = context, trial, allow_unsafe
        self.trials = 0
        self.unsafe_titles: list[str] = []
        self.rescaling: list[Patch] = []  # that make another multiple of the full batch's gradient
        self._seen: set[tuple[tuple[str, str], ...]] = set()

    def repair(self, findings: Sequence[Finding], context: Context, before: tuple[Patch, ...]) -> Patch | None:
        """Returns the patch that repairs what was found in sources that hold the patches `before`."""
        unfinished: list[tuple[tuple[Patch, ...], TrialResult, Context]] = []
        texts = {file: source.text for file, source in context.sources.items()}
        for patch in propose(findings, context):
            if patch.unsafe and not self._allow_unsafe:
                self.unsafe_titles.append(patch.title)
                continue
            patches = (*before, patch)
            # Against the user's own text: a patch may undo what an earlier one changed.
            patched = {**texts, **apply(patch, texts)}
            changed = {file: text for file, text in patched.items() if text != self._context.sources[file].text}
            safe = not any(each.unsafe for each in patches)
            result = self._try(changed, safe=safe)
            if result is None:
                continue
            # Losses of zero agree as well. A safe patch has to leave the full batch's gradient as it was.
            if result.is_equivalent and (not safe or result.factor == 1):
                return self._join_patches(patches, changed)
            if result.is_equivalent:
                self._note_rescaling(self._join_patches(patches, changed), result.factor)
            # The same faults as before show no progress; other ones may be left by a repair of the first.
            elif result.record is not None and _list_faults(result.findings) != _list_faults(findings):
                sources = {file: Source(text, context.sources[file].digest) for file, text in patched.items()}
                unfinished.append((patches, result, replace(context, record=result.record, sources=sources)))
        # Siblings are tried before children, because most scripts have one fault.
        branches = unfinished if len(before) + 1 < _DEPTH else []
        repaired = (self.repair(result.findings, sources, patches) for patches, result, sources in branches)
        return next(filter(None, repaired), None)

    def _try(self, changed: Mapping[str, str], *, safe: bool) -> TrialResult | None:
        """Tries sources; None where they were tried before, change nothing, or no trial is left."""
        key = tuple(sorted(changed.items()))
        if not changed or key in self._seen or self.trials >= _TRIALS:
            return None
        self._seen.add(key)
        self.trials += 1
        return self._trial(changed, safe=safe)

    def _note_rescaling(self, patch: Patch, factor: float) -> None:
        """Keeps a patch that is unsafe only because it makes another multiple of the full batch's gradient."""
        if math.isnan(factor):  # the patched gradient is none of the unpatched one's multiples: nothing is repaired
            return
        self.rescaling.append(replace(patch, unsafe=f"{_RESCALES} {factor:.4g} times as large"))
        self.unsafe_titles.append(patch.title)

    def _join_patches(self, patches: tuple[Patch, ...], changed: Mapping[str, str]) -> Patch:
        """Returns patches that were made one upon the other as one of the user's sources."""
        if len(patches) == 1:
            return patches[0]
        originals = {file: self._context.sources[file] for file in changed}
        # Each patch counts lines in the text that the one before left, so their edits cannot be put together.
        return Patch(
            tuple(edit for file, text in changed.items() for edit in _line_edits(file, originals[file].text, text)),
            tuple(dict.fromkeys(code for patch in patches for code in patch.codes)),
            " ".join(patch.title for patch in patches),
            render_diff({file: source.text for file, source in originals.items()}, changed),
            " ".join(filter(None, (patch.unsafe for patch in patches))),
            {file: source.digest for file, source in originals.items()},
        )


def _list_faults(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """The faults by code and sentence."""
    return sorted((finding.code, finding.summary) for finding in findings if finding.severity == "fault")


def _line_edits(file: str, before: str, after: str) -> Iterator[Edit]:
    """Yields edits of whole lines that make one text of the other."""
    old, new = split_lines(before), split_lines(after)
    for tag, first, last, new_first, new_last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield Edit(file, first + 1, 0, last + 1, 0, "".join(new[new_first:new_last]))
