"""GAV609 step-settings-differ: the same update is made with another learning rate, momentum, decay or step count.

What it finds

An optimizer whose settings, or whose own step, are not those of the full batch's run when the same update is made.

Why gradients diverge

They need not: the gradient may be right and the update wrong. A counter that advances with every micro-batch runs
through a schedule K times too fast; a decay that is computed from it too.

Signature in the numbers

A number of a parameter group (`lr`, `momentum`, `weight_decay`, a beta) or the optimizer's own count of steps that
differs between the runs at the same update; the same of the decay by which a moving average of the weights is updated
(`torch.optim.swa_utils.AveragedModel`, or one that is kept by hand); or weights that change otherwise although the
optimizer was given the full batch's own gradients.

Example

    for i, (x, y) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(i)  # counts micro-batches
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(i // K)  # counts updates
        (criterion(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the settings are meant to differ between the two runs that were compared; give both the same.

References

karpathy/nanoGPT (a rate that is set by hand), pytorch/pytorch `torch.optim.lr_scheduler`
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.events import Event
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.stages import AVERAGE, SettingDifference, Stage
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import located, told_apart

RULE = Rule("GAV609", "step-settings-differ")
_SHOWN = 4  # settings that are listed
_BY_MICRO_BATCH = "count updates, not micro-batches: advance what the setting is computed from once per optimizer step"
_BY_LENGTH = (
    "the schedule advances once per update, as in the full-batch run: give its length (`T_max`, `total_steps`) "
    "in updates, the number of micro-batches divided by K"
)
_BY_RANK = "give every rank the same settings: replicas that step differently drift apart"


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding at the first update that is made with other settings, or by another step."""
    loop = facts.loop
    for update in loop.updates if loop is not None else ():
        if loop is None or not update.judged or update.step_takes_factor:
            continue
        settings = _unexplained(loop, update)
        changed = any(stage.stage is Stage.CHANGE and stage.outcome is Outcome.DIVERGENT for stage in update.stages)
        if settings or (changed and not loop.inside("scheduler")):
            yield _finding(loop, update, settings)
            return


def _unexplained(loop: Record, update: UpdateComparison) -> list[SettingDifference]:
    """The settings that differ, without rates where a scheduler that steps inside windows is found as such."""
    rates = bool(loop.inside("scheduler"))
    return [setting for setting in update.settings if not (rates and setting.name.endswith("lr"))]


def _finding(loop: Record, update: UpdateComparison, settings: list[SettingDifference]) -> Finding:
    names = ", ".join(dict.fromkeys(f"`{setting.name}`" for setting in settings[:_SHOWN]))
    what = f"is made with another {names}" if settings else "makes something else of the same gradient"
    shown = [
        "`{}` {}{}, in the full-batch run {}".format(setting.name, *_beside(setting)) for setting in settings[:_SHOWN]
    ]
    moved = [stage for stage in update.stages if stage.stage is Stage.CHANGE]
    shown += [
        f"with the full batch's own gradients the weights change by {stage.norm_ratio:.4g} of what they do there"
        for stage in moved
        if stage.outcome is Outcome.DIVERGENT and math.isfinite(stage.norm_ratio)
    ]
    values = {"update": update.number, "settings": [vars(setting) for setting in settings]}
    return RULE.finding(
        f"update {update.number} {what}",
        measured("comparison", "; ".join(shown), **values),
        location=located(_writers(loop, update, settings)),
        remedy=_remedy(loop, update, settings),
        proven=True,
    )


def _remedy(loop: Record, update: UpdateComparison, settings: list[SettingDifference]) -> str:
    """What to do: a schedule that has taken as many steps in both runs and gives another rate has another length."""
    if any(setting.rank for setting in settings):
        return _BY_RANK
    taken = [
        sum(len(window.of("scheduler")) for window in windows if window.number < update.number)
        for windows in (loop.windows, loop.full_windows)
    ]
    rates = bool(settings) and all(setting.name.endswith("lr") for setting in settings)
    return _BY_LENGTH if rates and taken[0] == taken[1] > 0 else _BY_MICRO_BATCH


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
