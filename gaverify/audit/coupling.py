"""Where samples of a micro-batch first part from themselves in the full batch: in a module, or in the loss.

Shapes: n rows of a micro-batch, which lie at n places among the N rows of a forward of the full-batch run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gaverify.audit.reading import Run
from gaverify.audit.recording.matching import Matcher
from gaverify.records.operations import Operation, Suspect

_COMPUTED = 1e-4  # two computations of the same row differ by rounding, rows in other company by far more
_ROUNDINGS = 64.0  # in coarse arithmetic that many roundings count as the same

Forward = dict[str, Any]
Pair = tuple[Forward, Forward, Sequence[int]]
"""A forward of the full-batch run, one of a micro-batch, and the places of its rows in the first."""


def pairs_of(full: Run, accumulated: Run) -> list[Pair]:
    """Returns every forward of the accumulated run's first update with the one of the full batch that holds its rows.

    Empty where the rows of any of them are not found.
    """
    whole, part = outputs_of(full), outputs_of(accumulated)
    matcher = Matcher(full.rows(1))
    pairs: list[Pair] = []
    for prints, forward in zip(accumulated.rows(1), part, strict=False):
        names = {call["path"] for call in forward["calls"]}
        among = [at for at, other in enumerate(whole) if {call["path"] for call in other["calls"]} == names]
        spot = matcher.find(among, prints)
        if spot is None or len(spot.places) != forward["rows"]:
            return []
        pairs.append((whole[spot.forward], forward, spot.places))
    return pairs


def outputs_of(run: Run) -> list[Forward]:
    """Returns what the modules of a run's first update gave."""
    path = run.folder / "outputs.pt"
    return torch.load(path, weights_only=True) if path.exists() else []  # type: ignore[no-any-return]


def first_module(pairs: Sequence[Pair], unit: float) -> Suspect | None:
    """Returns the first call whose inputs agree row by row and whose outputs do not; None where there is none.

    Calls are in the order in which they end, so that a module comes before the one around it. A call that agrees for
    the first micro-batch and only later parts depends on what was there before, and not on who sits beside a row.
    """
    allowed = _allowed(unit)
    parted: dict[tuple[str, int], tuple[float, int, dict[str, Any]]] = {}
    agreed_first: set[tuple[str, int]] = set()
    for number, pair in enumerate(pairs):
        for key, whole, part in _calls(pair):
            inputs = _apart(pair, whole["inputs"], part["inputs"])
            outputs = _apart(pair, whole["outputs"], part["outputs"])
            if outputs is None or (inputs is not None and float(inputs.max()) > allowed):
                continue
            apart = float(outputs.max())
            if apart <= allowed:
                agreed_first |= {key} if number == 0 else set()
                continue
            most, samples, _ = parted.get(key, (0.0, 0, whole))
            parted[key] = max(most, apart), samples + int((outputs > allowed).sum()), whole
    for key, (apart, samples, call) in parted.items():
        if key not in agreed_first:
            file, line = call["place"] or (None, None)
            operation = Operation(call["kind"], call["path"], call["kind"], file=file, line=line)
            return Suspect("rows", operation, None, apart, samples, True, bool(call["scales"]))
    return None


def agree(pairs: Sequence[Pair], unit: float) -> bool:
    """Whether what the models hand out was seen for every micro-batch and is the full batch's, row by row."""
    for pair in pairs:
        last = [(whole, part) for _, whole, part in _calls(pair)][-1:]
        apart = [_apart(pair, whole["outputs"], part["outputs"]) for whole, part in last]
        if not apart or apart[0] is None or float(apart[0].max()) > _allowed(unit):
            return False
    return bool(pairs)


def loss_apart(pairs: Sequence[Pair], unit: float) -> float:
    """Returns what a loss gives back for the rows of a micro-batch against the full batch's, but for one factor.

    Relative to the norm of the latter, for the micro-batch where that is largest; 0 where it is rounding for the first.
    """
    found = [_left(pair) for pair in pairs]
    if not found or not found[0] > _allowed(unit):
        return 0.0
    return max(found)


def feels_the_rest(full: Sequence[Forward], moved: Sequence[Forward], unit: float) -> bool:
    """Whether what the loss gives back for the first half of the rows changes with the values of the other half."""
    for whole, other in zip(full, moved, strict=False):
        half = range(whole["rows"] // 2)
        if len(half) and _left((whole, other, half)) > _allowed(unit):
            return True
    return False


def writers_of(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    """Returns the buffers that modules write in their own forward, by the path of the module."""
    calls = [call for whole, _, _ in pairs for call in whole["calls"] if call["changed"]]
    return {call["path"]: call["changed"] for call in calls}


def _allowed(unit: float) -> float:
    return max(_COMPUTED, _ROUNDINGS * unit)


def _calls(pair: Pair) -> Iterator[tuple[tuple[str, int], dict[str, Any], dict[str, Any]]]:
    """The calls of both forwards that belong together: the how-manieth of a module in each."""
    seen: Counter[str] = Counter()
    known: dict[tuple[str, int], dict[str, Any]] = {}
    for call in pair[0]["calls"]:
        seen[call["path"]] += 1
        known[call["path"], seen[call["path"]]] = call
    seen.clear()
    for call in pair[1]["calls"]:
        seen[call["path"]] += 1
        key = call["path"], seen[call["path"]]
        if key in known:
            yield key, known[key], call


def _apart(pair: Pair, whole: dict[str, Any], part: dict[str, Any]) -> torch.Tensor | None:
    """How far the rows of some tensors are apart, relative to the largest row, shape (n,); None where nothing tells."""
    worst: torch.Tensor | None = None
    for path in whole.keys() & part.keys():
        both = _rows(pair, whole[path], part[path])
        if both is None:
            continue
        a, b = both
        scale = a[..., 2].abs().max().clamp_min(1e-300)
        apart = ((a - b).abs() / scale).flatten(1).amax(1).nan_to_num(math.inf)
        worst = apart if worst is None else torch.maximum(worst, apart)
    return worst


def _left(pair: Pair) -> float:
    """What one factor leaves between the gradients of the same rows, over all that a model hands out."""
    whole, part = pair[0]["gradients"], pair[1]["gradients"]
    found = [_rows(pair, whole[path], part[path]) for path in sorted(whole.keys() & part.keys())]
    pieces = [(a[..., :2].flatten(), b[..., :2].flatten()) for a, b in filter(None, found)]
    if not pieces:
        return 0.0
    a, b = (torch.cat(side) for side in zip(*pieces, strict=True))
    size = float(a.norm())
    factor = (a * b).sum() / b.square().sum().clamp_min(1e-300)
    return float((a - factor * b).norm()) / size if size else 0.0


def _rows(pair: Pair, whole: dict[str, Any], part: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What was kept of the same rows in both forwards, shape (n, entries, 3); None where no dimension holds rows."""
    (full, micro, places), (wide, narrow) = pair, (whole["shape"], part["shape"])
    for dim in range(min(len(wide), len(narrow), 2)):
        entries = wide[dim] // full["rows"] if full["rows"] else 0
        rest = [(*shape[:dim], *shape[dim + 1 :]) for shape in (wide, narrow)]
        if (
            entries
            and rest[0] == rest[1]
            and (wide[dim], narrow[dim])
            == (
                entries * full["rows"],
                entries * micro["rows"],
            )
        ):
            there = whole["along"][dim].reshape(full["rows"], entries, 3)[list(places)]
            here = part["along"][dim].reshape(micro["rows"], entries, 3)
            return there, here[: len(there)]
    return None
