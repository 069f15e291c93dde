"""Settings of a step, and other optimizers beside it: GAV609 to GAV611."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.events import Event
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.stages import AVERAGE, SettingDifference, Stage
from gaverify.rules.rule import rule_of_loops
from gaverify.rules.telling import told
from gaverify.rules.wording import backward_place, located, told_apart

_SHOWN = 4  # settings that are listed


@rule_of_loops("GAV609")
def step_settings_differ(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding at the first update that is made with other settings, or by another step."""
    for update in loop.updates:
        if not update.judged or update.step_takes_factor:
            continue
        settings = _unexplained(loop, update)
        changed = any(stage.stage is Stage.CHANGE and stage.outcome is Outcome.DIVERGENT for stage in update.stages)
        if settings or (changed and not loop.inside("scheduler")):
            yield _made_otherwise(loop, update, settings)
            return


def _unexplained(loop: Record, update: UpdateComparison) -> list[SettingDifference]:
    """The settings that differ, without rates where a scheduler that steps inside windows is found as such."""
    rates = bool(loop.inside("scheduler"))
    return [setting for setting in update.settings if not (rates and setting.name.endswith("lr"))]


def _made_otherwise(loop: Record, update: UpdateComparison, settings: list[SettingDifference]) -> Finding:
    names = ", ".join(dict.fromkeys(f"`{setting.name}`" for setting in settings[:_SHOWN]))
    what = f"is made with another {names}" if settings else "makes something else of the same gradient"
    shown = [
        "`{}` {}{}, in the full-batch run {}".format(setting.name, *_beside(setting)) for setting in settings[:_SHOWN]
    ]
    moved = [stage for stage in update.stages if stage.stage is Stage.CHANGE]
    shown += [
        f"of the same gradients the weights change by {stage.norm_ratio:.4g} of what they do there"
        for stage in moved
        if stage.outcome is Outcome.DIVERGENT and math.isfinite(stage.norm_ratio)
    ]
    return told(
        f"GAV609.{_counted_by(loop, update, settings)}",
        location=located(_writers(loop, update, settings)),
        proven=True,
        what=what,
        shown="; ".join(shown),
        update=update.number,
        settings=[vars(setting) for setting in settings],
    )


def _counted_by(loop: Record, update: UpdateComparison, settings: list[SettingDifference]) -> str:
    """What is wrong: a schedule that has taken as many steps in both runs and gives another rate has another length."""
    if any(setting.rank for setting in settings):
        return "by-rank"
    taken = [
        sum(len(window.of("scheduler")) for window in windows if window.number < update.number)
        for windows in (loop.windows, loop.full_windows)
    ]
    rates = bool(settings) and all(setting.name.endswith("lr") for setting in settings)
    return "by-length" if rates and taken[0] == taken[1] > 0 else "by-micro-batch"


def _beside(setting: SettingDifference) -> tuple[str, str, str]:
    """The value, whose it is where that is not rank 0, and the full-batch run's value."""
    own, full = told_apart([setting.accumulated], [setting.full])
    return own, f" in rank {setting.rank}" if setting.rank else "", full


def _writers(loop: Record, update: UpdateComparison, settings: list[SettingDifference]) -> list[Event]:
    """The last events that set something before the update's step, latest first; then the step itself."""
    window = loop.window_of(update.number)
    if window is not None and settings and all(setting.name == AVERAGE for setting in settings):
        return [*reversed(window.of("average")), *(event for each in loop.windows for event in each.of("average"))]
    seen = [event for window in loop.windows if window.number <= update.number for event in window.events]
    setters = [event for window in loop.windows for event in window.of("settings") if event.file is not None]
    return [*setters[:1], *(event for event in reversed(seen) if event.kind in ("scheduler", "step"))]


@rule_of_loops("GAV610")
def foreign_gradients(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding at the first differing update whose step uses passes of another optimizer's loss."""
    uses = ((update, update.foreign) for update in loop.updates if update.foreign is not None and update.differs)
    update, foreign = next(uses, (None, None))
    if update is None or foreign is None:
        return
    window = loop.window_of(update.number)
    backwards = window.of("backward") if window is not None else ()
    yield told(
        "GAV610.foreign",
        location=located(backwards[at] for at in foreign.passes if at < len(backwards)),
        proven=True,
        update=update,
        count=len(foreign.passes),
        them="it" if len(foreign.passes) == 1 else "them",
        **vars(foreign),
    )


@rule_of_loops("GAV611")
def partner_at_other_weights(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding at the first differing update whose loss met another optimizer's model at other weights."""
    # where weights of the micro-batches explain an update, the partner made no difference
    open_ones = (each for each in loop.updates if each.fit is None or not each.fit.residual < loop.tolerance)
    update = next((each for each in open_ones if each.partners and each.differs), None)
    if update is None:
        return
    location = backward_place(facts, update.number)
    yield told("GAV611.partner", location=location, proven=False, update=update, **vars(update.partners[0]))
