"""What the accumulated run with the right weights of its micro-batches showed: a run and an audit fill one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gaverify.records.experiment import ControlRun
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence
from gaverify.rules.controls import word_other_fixes
from gaverify.rules.rule import control_evidence
from gaverify.rules.wording import word_trial

NOT_ENOUGH = (
    "other micro-batch weights alone do not repair it: look for what else changes the gradients between micro-batches "
    "(cleared gradients, state, a step)"
)
"""The remedy of weights that fit and whose control run came out otherwise."""


@dataclass(frozen=True)
class WeightsTrial:
    """The run with the right weights, and what it says of weights and of repairs by them."""

    run: ControlRun | None = None
    """The run; None where none was made."""
    failure: str = ""
    """Why none could be made; empty where one was made, or nobody asked for it."""
    probe: str = "micro-batch-weights"
    """What made it."""
    result: str = ""
    """What it left, in words."""
    proven: bool = False
    """Whether the weights are proven to be wrong, by this run or by what needs none."""
    refuted: bool = False
    """Whether it left a difference that no cause beside the weights explains."""
    tested: str = ""
    """`: tested, equivalent` and the like, behind a repair by these weights; empty where the run left something."""

    def evidence(self, what: str = "", more: str = "", **values: Any) -> tuple[Evidence, ...]:
        """Returns the evidence of the run, or why there is none; empty where nobody asked for it.

        Args:
            what: With what it was made, where that is not the run's own name.
            more: What the sentence adds to what was left.
            values: Numbers behind the sentence, beside what was left.
        """
        if self.run is not None:
            text = f"with {what or self.run.what} {self.result}{more}"
            return (control_evidence(self.probe, text, left=self.run.left, **values),)
        text = f"no control run was possible ({self.failure}): suspected, not proven"
        return (control_evidence(self.probe, text),) if self.failure else ()

    def replace_refuted(self, remedy: str) -> str:
        """Returns the remedy, or where else to look if the run shows that weights do not repair it."""
        return NOT_ENOUGH if self.refuted else remedy


def read_trial(facts: Facts, number: int | None = None, *, means: bool = True) -> WeightsTrial:
    """Returns what the accumulated run with the right weights of an update's micro-batches showed.

    Args:
        facts: What was measured.
        number: The update; None: the one that was compared.
        means: Whether the weights stand for something; others make up for a number that moves as well.
    """
    loop, run = facts.loop, facts.weights_run
    if loop is not None and loop.ranks > 1:  # the fit alone tells: its weights are those of the passes of all ranks
        return WeightsTrial(proven=means)
    differing = loop.divergent if loop is not None else None
    # weights of another update were not tried
    if loop is not None and (differing is None or differing.number != (number or facts.compared.update)):
        return WeightsTrial()  # an audit makes this run of the first update that differs only
    if run is None:
        return WeightsTrial(failure=facts.window.failure)
    # A search adds up the repairs that it finds, and tries weights beside them; every control of an audit runs alone.
    is_explained = loop is None and (facts.cleared or facts.weights_first)
    return WeightsTrial(
        run,
        # The names under which documents show this evidence are public.
        probe="micro-batch-weights" if loop is None else "control",
        result=_word_result(facts, run, means=means),
        proven=means and (run.rounding or (facts.weights_first and facts.cleared)),
        refuted=means and not (run.rounding or is_explained),
        tested=f": {word_trial(run, word_other_fixes(facts) if loop is None else '')}" if run.rounding else "",
    )


def _word_result(facts: Facts, run: ControlRun, *, means: bool) -> str:
    if run.rounding:
        return f"the difference is {run.left:.0e}" + (": proven" if means else "")
    if facts.loop is not None:
        return f"the difference is {run.left:.0e}: another cause remains"
    text = f"a difference of {run.left:.0e} is left"
    if not facts.weights_first:
        return text
    remainder = "the other causes listed explain it" if facts.cleared else "another cause remains"
    share = run.left / facts.compared.total  # 0 where there was no number
    return f"{text}{f', {share:.1g} of what it was' if share else ''}: {remainder}"
