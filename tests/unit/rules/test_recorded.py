"""What an audit's comparison says differently from a run's, by its fields. Imports no torch."""

from measured import SAME, norm, record
from updates import update_of

from gaverify.records.audit import Calls, ControlResults, Record, RowCheck
from gaverify.records.comparison import comparison_of
from gaverify.records.events import Backward, Forward, Step
from gaverify.records.outcomes import Outcome
from gaverify.records.windows import windows_of
from gaverify.rules.coupling import batch_statistics
from gaverify.rules.remainder import uninformative_batch
from gaverify.rules.state import aligned_randomness


def test_draws_that_an_audit_does_not_count_are_told_without_a_number() -> None:
    (finding,) = aligned_randomness.judge(comparison_of(Record(dealt=4)))
    assert "4 draws of the full batch, reused by the micro-batches" in finding.evidence[0].statement
    (finding,) = aligned_randomness.judge(record(draws=4, draws_sliced=16))
    assert "4 draws of the full batch, reused 16 times by the micro-batches" in finding.evidence[0].statement


def test_two_runs_that_split_alike_compare_nothing() -> None:
    events = (Forward(1, rows=8, model=0), Backward(1), Step(1, optimizer=0))
    calls = Calls(windows_of(events), full_windows=windows_of(events))
    update = update_of(1, data=RowCheck(8, 8), judged=True, outcome=Outcome.EQUIVALENT, parameters=SAME, steps=1)
    (finding,) = uninformative_batch.judge(comparison_of(Record(calls, (update,))))
    assert "both runs split the first update in the same way" in finding.summary


def test_only_an_audit_offers_a_layer_that_it_did_not_run() -> None:
    cause = norm()
    (of_script,) = batch_statistics.judge(comparison_of(Record(controls=ControlResults(coupling=(cause,)))))
    (of_model,) = batch_statistics.judge(record(causes=(cause,)))
    assert "gaverify did not run it" in of_script.remedy and "did not run it" not in of_model.remedy
