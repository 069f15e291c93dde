"""Random draws, and what does not repeat itself: GAV301 to GAV303."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.controls import control, first_operation, left_by, proven, rest_of
from gaverify.rules.rule import controlled, finding_of, measured, rule
from gaverify.rules.telling import told
from gaverify.rules.wording import listed


@rule("GAV301")
def aligned_randomness(facts: Facts) -> Iterator[Finding]:
    """Yields a note where random draws were dealt out per sample, and one where a draw has no row per sample."""
    draws = facts.draws
    if draws.dealt > 0:
        were = "was" if draws.count == 1 else "were"
        yield told("GAV301.dealt", severity="note", proven=True, draws=draws.count, dealt=draws.dealt, were=were)
    # rows that are not the full batch's may be as many as those by chance: what could not be dealt out is no value
    shared = {name: place for name, place in draws.shared.items() if name not in draws.unaligned}
    if shared and facts.steps > 1:
        yield _shared(facts, shared)


def _shared(facts: Facts, draws: Mapping[str, tuple[str, int] | None]) -> Finding:
    """A value for the whole batch: K micro-batches draw K of them in training, and are given one and the same here."""
    places = {name: f"`{name}`" + (f" at {place[0]}:{place[1]}" if place else "") for name, place in draws.items()}
    return told(
        "GAV301.shared",
        severity="note",
        location=_first(draws.values()),
        proven=True,
        places=listed(list(places.values())),
        draw="draws" if len(draws) == 1 else "draw",
        steps=facts.steps,
        shared=list(draws),
    )


@rule("GAV302")
def unalignable_randomness(facts: Facts) -> Iterator[Finding]:
    """Yields a fault where a draw that cannot be dealt out decides the result, a note where something else does."""
    decisive = next((cause for cause in facts.forward.causes if cause.suspect.kind == "random"), None)
    if facts.loop is not None and facts.loop.agrees:
        return  # what was drawn made no difference that could be seen
    reasons = dict(facts.draws.unaligned)
    if facts.draws.foreign_differ:
        reasons["Python or NumPy generator"] = "how much is drawn depends on the batch"
    if not reasons and decisive is None:
        return
    text = "; ".join(f"`{name}`: {why}" for name, why in reasons.items())
    evidence = [measured("random-draws", text, **dict(reasons))] if reasons else []
    if decisive is not None:
        evidence += [first_operation(facts, decisive), control(facts, decisive)]
    still = facts.draws.control
    if still is not None:
        without = facts.draws.alone == 0  # measured, with the causes that are named neutralised
        rest = "the causes named beside it are left, and without them the draws make none" if without else ""
        text = left_by(still) + ("" if still.rounding else f": {rest or rest_of(facts, still)}")
        if facts.draws.alone > 0:
            text += f"; with the other causes neutralised the draws alone make {facts.draws.alone:.0e}: proven"
        evidence.append(controlled("random-draws", text, left=still.left))
    decides = decisive is not None or (still is not None and still.rounding) or facts.draws.alone > 0
    # An audit cannot hold a script's draws constant, so that it proves nothing by them: it leaves the question open.
    fault = facts.loop is None and bool(facts.compared.divergent) and (decides or not explained(facts))
    yield finding_of(
        "random draws could not be dealt out per sample",
        *evidence,
        severity="fault" if fault else "note",
        location=decisive.suspect.operation.location if decisive is not None else _first(facts.draws.places.values()),
        remedy="draw per sample (one value for each row of the batch), or once per forward"
        + (", or switch it off here" if facts.loop is not None else ""),
        proven=(decisive is not None and proven(facts, decisive))
        or (still is not None and still.rounding)
        or facts.draws.alone > 0,
    )


def _first(places: Iterable[tuple[str, int] | None]) -> Location | None:
    """Where the first draw was made whose line is known."""
    place = next(filter(None, places), None)
    return Location(file=place[0], line=place[1]) if place is not None else None


def explained(facts: Facts) -> bool:
    """Whether another cause was found."""
    state = facts.state is not None and bool(facts.state.blamed)
    return bool(facts.forward.causes) or facts.weights.blamed or state


@rule("GAV303")
def unrepeatable_backward(facts: Facts) -> Iterator[Finding]:
    """Yields a fault where two runs of one batch agree in the loss alone, a note where a script does not repeat."""
    # nothing is proven about accumulation where equal runs of a script differ: it may only want a seed
    updates = facts.loop.updates if facts.loop is not None else ()
    for update in [update for update in updates if update.unrepeatable][:1]:
        yield told("GAV303.script", severity="note", proven=True, update=update)
    twice = facts.repeatability
    if twice is None or not twice.backward > facts.repeats or twice.forward > facts.repeats:
        return
    yield told("GAV303.run", proven=True, **vars(twice))
