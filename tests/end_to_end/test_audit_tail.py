"""`--tail`: an epoch's short last window, which the first updates of a run never reach."""

from __future__ import annotations

import pytest
from audits import events_of

pytestmark = pytest.mark.slow
SCRIPT = "train_epochs.py"


def test_calls_alone_tell_a_division_that_stays_the_same() -> None:
    result = events_of(SCRIPT, "--batch-size 7 --accum 4 --end misscaled", ("--updates", "0"))
    assert (result.code, result.faults) == (1, {"GAV605"}), str(result)


def test_calls_alone_do_not_tell_a_short_window_s_scale() -> None:
    result = events_of(SCRIPT, "--batch-size 7 --accum 4 --end right", ("--updates", "0"))
    assert (result.code, result.faults) == (3, set()), str(result)
    assert "backward passes where others have 4" in result.document["reason"], str(result)
