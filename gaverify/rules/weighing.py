"""What the accumulated run with the right weights of its micro-batches showed: a run and an audit fill one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gaverify.records.audit import Record
from gaverify.records.experiment import ControlRun
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence
from gaverify.rules.controls import beside
from gaverify.rules.rule import control_evidence
from gaverify.rules.wording import word_trial

NOT_ENOUGH = (
    "other weights alone do not repair it: look for what else changes the gradients between the micro-batches "
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


def trial_in_run(facts: Facts) -> WeightsTrial:
    """Returns what both strategies showed with other weights; causes named beside them may explain what is left."""
    run = facts.window.remedy
    if run is None:
        return WeightsTrial(failure=facts.window.failure)
    return WeightsTrial(
        run,
        result=_word_result(facts, run),
        proven=run.rounding or (facts.weights_first and facts.cleared),
        refuted=not (run.rounding or facts.cleared or facts.weights_first),
        tested=f": {word_trial(run, beside(facts))}" if run.rounding else "",
    )


def _word_result(facts: Facts, run: ControlRun) -> str:
    if run.rounding:
        return f"the difference is {run.left:.0e}: proven"
    text = f"a difference of {run.left:.0e} is left"
    if not facts.weights_first:
        return text
    remainder = "the causes named beside it make that" if facts.cleared else "another cause is left"
    share = run.left / facts.compared.total  # 0 where there was no number
    return f"{text}{f', {share:.1g} of what it was' if share else ''}: {remainder}"


def trial_in_loop(loop: Record, number: int, *, means: bool = True) -> WeightsTrial:
    """Returns what a script's own loop showed with the right weights of an update.

    Args:
        loop: What was recorded.
        number: The update.
        means: Whether the weights stand for something; others make up for a number that moves as well.
    """
    update, run = loop.divergent, loop.controls.weighed
    if loop.ranks > 1:  # the fit alone tells: its weights are those of the passes of all ranks
        return WeightsTrial(proven=means)
    if update is None or run is None or update.number != number:
        return WeightsTrial()
    proven = run.rounding and means
    meaning = ": proven" if proven else "" if run.rounding else ": another cause is left"
    return WeightsTrial(
        run,
        probe="control",
        result=f"the difference is {run.left:.0e}{meaning}",
        proven=proven,
        refuted=means and not run.rounding,
        tested=": tested, equivalent" if run.rounding else "",
    )
