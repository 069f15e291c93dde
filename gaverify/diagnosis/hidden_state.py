"""GAV403 hidden-state."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.state_changed_by_forward import evidence_for, location_of, remedy_for
from gaverify.diagnosis.unrepeatable_backward import REPEATS
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV403", "hidden-state"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where state outside parameters and buffers decides the difference."""
    state, twice = measured.state, measured.repeatability
    blamed = [change for change in state.blamed if change.place in ("attribute", "closure")] if state else []
    if state is not None and blamed:
        names = ", ".join(f"`{change.name}`" for change in blamed)
        yield Finding(
            CODE, NAME, "fault", f"the forward changes {names}, outside of parameters and buffers, and reads it again",
            location=location_of(blamed[0]), evidence=evidence_for(measured, state, blamed),
            remedy=remedy_for(state), proven=state.control is not None and state.control.rounding,
        )  # fmt: skip
    elif twice is not None and twice.forward > REPEATS:
        yield Finding(
            CODE, NAME, "fault", "the same batch gives another loss when it is run again with all known state restored",
            evidence=(Evidence("repeatability", "measured", f"the loss differs by {twice.forward:.1e}",
                               {"forward": twice.forward, "backward": twice.backward}),),
            remedy="look for state that lives outside the model (files, global objects, generators of its own, clocks)",
        )  # fmt: skip
