"""Records that are derived: totals of a verdict, and whose passes and partners an update has."""

from __future__ import annotations

import math

import pytest

from gaverify import Outcome
from gaverify.records.comparison import Method, ParameterComparison, outcome_of, relative_total, resolution_of, together
from gaverify.records.events import Event
from gaverify.records.experiment import WeightFit
from gaverify.records.stages import Foreign, Partner, foreign_passes, partners_of, reached_by
from gaverify.records.windows import Window, common_rounds, numbered, windows_of

# --- Whose gradients a step uses, and which partner a loss met: loops of two networks, as events ---------------------


CRITIC, GENERATOR = 0, 1
MODELS = {CRITIC: frozenset({0}), GENERATOR: frozenset({1})}


def loop(text: str) -> list[Event]:
    """`C` the critic's pass, `G` the generator's through the critic, `c` and `g` their steps.

    `f` is a forward of the generator, on whose result the next `R` goes on: its pass through the critic.
    """
    events: list[Event] = []
    update, stepped, number, made = 1, False, 0, 0
    for letter in text.replace(" ", ""):
        if letter == "f":
            update, stepped = update + stepped, False
            number = made = number + 1
            events.append(Event("forward", update, values={"rows": 2, "model": 1, "number": number}))
        elif letter in "CGR":
            update, stepped = update + stepped, False
            models = [1, 0] if letter == "G" else [0]
            for model in models:
                number += 1
                events.append(Event("forward", update, values={"rows": 2, "model": model, "number": number}))
            numbers = [*[made] * (letter == "R"), *range(number - len(models) + 1, number + 1)]
            touched = [CRITIC] if letter == "C" else [CRITIC, GENERATOR]
            events.append(Event("backward", update, values={"touched": touched, "forwards": numbers}))
        else:
            events.append(Event("step", update, values={"optimizer": "cg".index(letter), "inside": False}))
            stepped = True
    return events


def fit(*right: float, residual: float = 1e-7) -> WeightFit:
    return WeightFit(right, residual, True, used=(1.0,) * len(right))


def windows(full: str, accumulated: str) -> tuple[list[Event], list[Event], dict[int, Window], dict[int, Window]]:
    both = loop(full), loop(accumulated)
    numbers = numbered(common_rounds(*both))
    found = [{window.number: window for window in windows_of(events, numbers)} for events in both]
    return *both, *found


class TestForeignPasses:
    WINDOW = windows("Cc Gg Cc Gg", "CGCG cg CGCG cg")[3][1]

    def test_passes_without_weight_that_reach_another_optimizer(self) -> None:
        assert foreign_passes(self.WINDOW, CRITIC, fit(1.0, 0.0, 1.0, 1e-6), [GENERATOR]) == Foreign(
            CRITIC, (1, 3), 1e-7
        )

    def test_an_optimizer_of_the_same_parameters_has_no_loss_of_its_own(self) -> None:
        assert foreign_passes(self.WINDOW, CRITIC, fit(1.0, 0.0, 1.0, 1e-6), []) is None

    @pytest.mark.parametrize("right", [fit(1.0, 1.0, 1.0, 1.0), fit(0.0, 1.0, 0.0, 1.0), fit(1.0, 0.0, residual=0.3)])
    def test_what_counts_or_is_its_own_is_not_foreign(self, right: WeightFit) -> None:
        assert foreign_passes(self.WINDOW, CRITIC, right, [GENERATOR]) is None

    def test_the_forwards_of_the_others_are_left(self) -> None:
        assert [event.values["model"] for event in reached_by(self.WINDOW, (1, 3))] == [0, 0]


class TestPartners:
    def test_a_partner_that_has_stepped_in_one_run_only(self) -> None:
        full, accumulated, whole, part = windows("Cc Gg Cc Gg", "CGCG cg CGCG cg")
        assert partners_of(full, accumulated, (whole[2], part[2]), MODELS) == (Partner(CRITIC, 1, 0),)

    def test_a_result_that_was_made_before_the_partners_step_meets_it_after(self) -> None:
        """One forward of the generator serves both losses, as in a DCGAN."""
        full, accumulated, whole, part = windows("fCcRg fCcRg", "fCRfCcRg fCRfCcRg")
        assert partners_of(full, accumulated, (whole[2], part[2]), MODELS) == (Partner(CRITIC, 1, 0),)
        full, accumulated, whole, part = windows("fCcRg fCcRg", "fCfCcRRg fCfCcRRg")
        assert partners_of(full, accumulated, (whole[2], part[2]), MODELS) == ()

    def test_the_same_order_in_both_runs(self) -> None:
        full, accumulated, whole, part = windows("Cc Gg Cc Gg", "CCc GGg CCc GGg")
        assert partners_of(full, accumulated, (whole[2], part[2]), MODELS) == ()

    def test_a_network_that_the_loss_never_meets_is_no_partner(self) -> None:
        full, accumulated, whole, part = windows("Gg Cc Gg Cc", "GCGC gc GCGC gc")
        assert partners_of(full, accumulated, (whole[2], part[2]), MODELS) == ()

    def test_a_step_that_one_run_never_makes_is_no_other_order(self) -> None:
        full, accumulated, whole, part = windows("Cc Gg Cc Gg", "CGCG g CGCG g")
        assert partners_of(full, accumulated, (whole[2], part[2]), MODELS) == ()


# --- What rows say together ------------------------------------------------------------------------------------------


SAME, FAULT, OPEN = Outcome.EQUIVALENT, Outcome.DIVERGENT, Outcome.INCONCLUSIVE


def row(outcome: Outcome, reference: float = 1.0, allowed: float = 1e-6, method: str = "working-precision"):  # type: ignore[no-untyped-def]
    return ParameterComparison(
        "w",
        (1,),
        outcome,
        method,
        reference,
        reference,
        0.0,
        allowed,
        0.0,
        None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [((), OPEN), ((SAME,), SAME), ((SAME, OPEN), OPEN), ((SAME, OPEN, FAULT), FAULT), ((SAME, FAULT), FAULT)],
)
def test_several_outcomes_together(outcomes: tuple[Outcome, ...], expected: Outcome) -> None:
    assert together(outcomes) is expected
    assert outcome_of([row(outcome) for outcome in outcomes]) is expected


def test_gradients_of_zero_agree_whatever_accumulation_does() -> None:
    assert outcome_of([row(SAME, 0.0)]) is OPEN
    assert outcome_of([row(SAME, math.nan)]) is OPEN, "unused parameters alone"
    assert outcome_of([row(SAME, 0.0), row(SAME)]) is SAME
    assert outcome_of([row(FAULT, math.nan)]) is FAULT, "a gradient on one side only"


@pytest.mark.parametrize(("allowed", "expected"), [(0.09, SAME), (0.11, OPEN)])
def test_what_rounding_may_hide_is_no_agreement(allowed: float, expected: Outcome) -> None:
    small = row(SAME, 0.01, allowed=0.01)
    assert outcome_of([row(SAME, allowed=allowed), small]) is expected
    few = row(SAME, allowed=allowed, method=Method.FEW_SAMPLES)
    assert outcome_of([few, few._replace(reference_norm=0.0)]) is expected, "decided together: of the whole, once"
    assert outcome_of([row(FAULT, allowed=allowed)]) is FAULT
    assert outcome_of([row(SAME, allowed=allowed, method=Method.TOLERANCE)]) is SAME, "as it was asked for"


def test_relative_total() -> None:
    assert relative_total([(3.0, 30.0), (4.0, 40.0)]) == pytest.approx(0.1)
    assert relative_total([(0.0, 0.0)]) == relative_total([]) == 0.0
    assert relative_total([(1e-30, 0.0)]) == math.inf
    assert relative_total([(math.nan, math.nan), (1.0, 2.0)]) == 0.5
    assert relative_total([(1e-200, 1e-200)]) == 1.0, "squares of these would be zero"


def test_resolution_counts_no_gradient_that_is_rounding() -> None:
    assert resolution_of([row(SAME), row(SAME, 1e-8)]) == pytest.approx(1e-6)
    assert resolution_of([row(SAME), row(SAME, 2e-6)]) == pytest.approx(0.5), "above rounding, and hardly seen"
    assert math.isnan(resolution_of([row(SAME, 0.0, 0.0)]))
    asked = row(SAME, 1e-8, method="tolerance")
    assert resolution_of([asked]) == pytest.approx(100.0), "tolerances that were asked for hide what they hide"
