"""The search tries proposals in order, prints only what its trial accepts, and repairs faults one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
from recorded_loops import FILE, HEAD, LOOP, context_of, finding_of

from gaverify.patches.searching import TrialResult, search_patch
from gaverify.patches.sources import apply
from gaverify.records.findings import Finding
from gaverify.records.patch import Patch

RIGHT = HEAD + LOOP
UNDIVIDED = RIGHT.replace(" / accumulation_steps  #", "  #")
NOT_CLEARED = UNDIVIDED.replace("        optimizer.zero_grad()\n", "")
FACTOR = finding_of("GAV201", factor=4.0)


def search(
    text: str, findings: list[Finding], trial: Callable[[str], TrialResult], *, allow_unsafe: bool = False
) -> tuple[Patch | None, str]:
    def try_texts(texts: Mapping[str, str], *, safe: bool) -> TrialResult:
        return trial(texts[FILE])

    return search_patch(findings, context_of(text), try_texts, allow_unsafe=allow_unsafe)


def test_two_faults_are_repaired_one_after_the_other() -> None:
    def trial(text: str) -> TrialResult:
        divided, cleared = "(loss / accumulation_steps)" in text, "zero_grad" in text
        left = [*([] if divided else [FACTOR]), *([] if cleared else [finding_of("GAV602")])]
        return TrialResult(divided and cleared, tuple(left), context_of(text).record, factor=1.0)

    patch, refused = search(NOT_CLEARED, [FACTOR, finding_of("GAV602")], trial)
    assert patch is not None and not refused
    assert patch.codes == ("GAV201", "GAV602")
    repaired = UNDIVIDED.replace("loss.backward()", "(loss / accumulation_steps).backward()")
    expected = repaired.replace("        scheduler.step()\n        optimizer.zero_grad()\n", "")
    text = apply(patch, {FILE: NOT_CLEARED})[FILE]
    assert text.replace("        optimizer.zero_grad()\n", "").replace("        scheduler.step()\n", "") == expected


@pytest.mark.parametrize(("factor", "is_printed"), [(1.0, True), (math.nan, False), (0.5, False)])
def test_equivalent_runs_are_not_enough_without_the_full_batch(factor: float, is_printed: bool) -> None:
    patch, _ = search(UNDIVIDED, [FACTOR], lambda _: TrialResult(is_equivalent=True, factor=factor))
    assert (patch is not None) is is_printed


def test_another_multiple_of_the_full_batch_is_unsafe() -> None:
    patch, _ = search(UNDIVIDED, [FACTOR], lambda _: TrialResult(is_equivalent=True, factor=0.5), allow_unsafe=True)
    assert patch is not None and "0.5 times" in patch.unsafe


def test_trials_that_fail_are_counted() -> None:
    patch, refused = search(UNDIVIDED, [FACTOR], lambda _: TrialResult(is_equivalent=False))
    assert patch is None and "1 patch was tried" in refused
