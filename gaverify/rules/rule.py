"""What all rules share: a code, a name and a judgement, and the parts of a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Generic, ParamSpec

from gaverify.records.audit import Record
from gaverify.records.facts import Facts
from gaverify.records.findings import ALSO, Evidence, Finding, Location, Severity
from gaverify.records.ranks import RankFacts

Asked = ParamSpec("Asked")


@dataclass(frozen=True)
class Rule(Generic[Asked]):
    """A code, its name, and the judgement that yields its findings; the words about it stand in `pages/CODE.md`."""

    code: str
    name: str
    judgement: Callable[Asked, Iterable[Finding]]

    def judge(self, *facts: Asked.args, **named: Asked.kwargs) -> Iterator[Finding]:
        """Yields the findings, which bear the rule's code and name."""
        for finding in self.judgement(*facts, **named):
            yield replace(finding, code=self.code, name=self.name)


def rule(code: str) -> Callable[[Callable[Asked, Iterable[Finding]]], Rule[Asked]]:
    """Makes a rule of a judgement; it is named as the function is."""
    return lambda judgement: Rule(code, judgement.__name__.replace("_", "-"), judgement)


def rule_of_loops(code: str) -> Callable[[Callable[[Facts, Record], Iterable[Finding]]], Rule[[Facts]]]:
    """The same for a judgement that needs the windows of a training loop: in a run it finds nothing."""

    def make_rule(judgement: Callable[[Facts, Record], Iterable[Finding]]) -> Rule[[Facts]]:
        @wraps(judgement)
        def judge(facts: Facts) -> Iterable[Finding]:
            return () if facts.loop is None else judgement(facts, facts.loop)

        return rule(code)(judge)

    return make_rule


def rule_of_ranks(code: str) -> Callable[[Callable[[Facts, RankFacts], Iterable[Finding]]], Rule[[Facts]]]:
    """The same for a judgement about several ranks: of one process it finds nothing."""

    def make_rule(judgement: Callable[[Facts, RankFacts], Iterable[Finding]]) -> Rule[[Facts]]:
        @wraps(judgement)
        def judge(facts: Facts) -> Iterable[Finding]:
            return () if facts.ranks is None else judgement(facts, facts.ranks)

        return rule(code)(judge)

    return make_rule


def finding_of(
    summary: str,
    *evidence: Evidence,
    remedy: str,
    proven: bool,
    location: Location | None = None,
    severity: Severity = "fault",
    together: Iterable[Location | None] = (),
) -> Finding:
    """Returns a finding; it is `proven` only where a control run, or the numbers alone, leave no doubt.

    The rule that yields it gives it its code and name. What it says holds of all places of `together`, `location`
    among them: its first evidence hands the others on, for who accepts some of them.
    """
    other_places = [place for place in dict.fromkeys(together) if place is not None and place != location]
    if other_places and evidence:
        also = [{"module": place.module, "file": place.file, "line": place.line} for place in other_places]
        evidence = (replace(evidence[0], values={**evidence[0].values, ALSO: also}), *evidence[1:])
    return Finding("", "", severity, summary, location, evidence, remedy, proven)


def measured_evidence(source: str, statement: str, /, **values: Any) -> Evidence:
    """Returns evidence that was measured, under the name of what measured it, with the numbers behind the sentence."""
    return Evidence(source, "measured", statement, values)


def control_evidence(source: str, statement: str, /, **values: Any) -> Evidence:
    """Returns the evidence of a control run."""
    return Evidence(source, "control", statement, values)


def word_control(
    source: str, what: str, left: float, proven: bool, otherwise: str = "another cause remains", **values: Any
) -> Evidence:
    """Returns the evidence of a control run that says which difference it leaves, and what that means.

    Args:
        source: What made the control run.
        what: What the difference was measured with.
        left: The relative difference.
        proven: Whether it is rounding.
        otherwise: What a difference that is more than rounding tells; "": nothing.
        values: Numbers behind the sentence, beside `left`.
    """
    meaning = "proven" if proven else otherwise
    return control_evidence(source, f"{what} is {left:.0e}" + (f": {meaning}" if meaning else ""), **values, left=left)
