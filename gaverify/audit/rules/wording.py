"""Sentences and places that several rules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gaverify.audit.events import Event
from gaverify.audit.records import Record, UpdateComparison
from gaverify.audit.windows import Window
from gaverify.results import Evidence, Location
from gaverify.tracebacks import shown

_SHOWN = 6  # windows whose counts are listed


def place(event: Event | None) -> Location | None:
    """Returns file and line of an event as people write them."""
    if event is None or event.file is None:
        return None
    return Location(file=shown(event.file), line=event.line)


def located(events: Iterable[Event]) -> Location | None:
    """Returns the place of the first event whose line is known."""
    return place(next((event for event in events if event.file is not None), None))


def backward_place(window: Window | None) -> Location | None:
    """Returns the line of a window's last backward pass: where its loss is put together."""
    return located(reversed(window.of("backward"))) if window is not None else None


def window_of(record: Record, number: int) -> Window | None:
    """Returns the window of an update of the accumulated run."""
    return next((window for window in record.windows if window.number == number), None)


def counts(windows: Sequence[Window]) -> str:
    """Returns backward : step : zero_grad of the windows in words, runs of equal ones together."""
    parts: list[tuple[str, int, int]] = []
    for window in windows:
        text = f"{len(window.of('backward'))} : {len(window.steps)} : {window.zero_grads}"
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1], window.number)
        else:
            parts.append((text, window.number, window.number))
    named = [f"{text} in {_updates(first, last)}" for text, first, last in parts[:_SHOWN]]
    return f"backward : step : zero_grad = {', '.join(named)}" + (", …" if len(parts) > _SHOWN else "")


def counted(windows: Sequence[Window], label: str = "measured") -> Evidence:
    """Returns the counts of the windows as evidence."""
    values = {
        "counts": [[len(window.of("backward")), len(window.steps), window.zero_grads] for window in windows],
        "updates": [window.number for window in windows],
    }
    return Evidence("events", label, counts(windows), values)


def updates(numbers: Iterable[int]) -> str:
    """Returns `update 2`, `updates 1 to 3`, `updates 1, 4`."""
    known = sorted(set(numbers))
    if len(known) > 1 and known == list(range(known[0], known[-1] + 1)):
        return f"updates {known[0]} to {known[-1]}"
    return ("update " if len(known) == 1 else "updates ") + ", ".join(map(str, known))


def passes(count: int) -> str:
    """Returns `1 backward pass`, `3 backward passes`."""
    return f"{count} backward {'pass' if count == 1 else 'passes'}"


def times(count: int) -> str:
    """Returns `once`, `4 times`."""
    return "once" if count == 1 else f"{count} times"


def weights_text(weights: Sequence[float]) -> str:
    """Returns weights in a row, equal ones once."""
    if len(weights) > 1 and len({f"{weight:.4g}" for weight in weights}) == 1:
        return f"{weights[0]:.4g} each"
    shown_weights = [f"{weight:.4g}" for weight in weights[:12]]
    return ", ".join(shown_weights) + (", …" if len(weights) > 12 else "")


def difference(update: UpdateComparison) -> str:
    """Returns the largest difference of an update, and the ratio of the norms."""
    row = update.largest
    if row is None:
        return "no finite difference"
    text = f"relative difference {row.relative_difference:.1e} in `{row.name}`"
    return f"{text}; all parameters together {update.relative_difference:.1e}, norm ratio {update.norm_ratio:.3g}"


def _updates(first: int, last: int) -> str:
    return f"update {first}" if first == last else f"updates {first} to {last}"
