"""Which part of the full batch's draws and samples a micro-batch is given; windows and stages of an update.

A loop is a letter per call: `F` and `G` backward passes of a first and a second model, `B` one that reaches both, `1`
and `2` the steps of their optimizers, `y` and `z` clear their gradients; `f` is a forward alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import numbers
from torch.utils.data import DataLoader, IterableDataset
from updates import update_of

from gaverify.audit.judgement import _find_drifted as drifted_in
from gaverify.audit.reading import Samples
from gaverify.audit.recording.loop import DealtLoopDraw, DrawingRank, LoopDealing, LoopDraw, LoopLedger
from gaverify.audit.recording.samples import GivenSamples, KeptSamples, input_rows
from gaverify.audit.same_data import StepSample, check_rows
from gaverify.passes.randomness import Refusal
from gaverify.records.audit import Calls, Record, RowCheck, SettingDifference, Stage, StageComparison, UpdateComparison
from gaverify.records.comparison import comparison_of
from gaverify.records.events import Backward, Event, Forward, Step, ZeroGrad, ledger_of
from gaverify.records.experiment import WeightFit
from gaverify.records.findings import Finding
from gaverify.records.outcomes import Method, Outcome, ParameterComparison
from gaverify.records.windows import Window, common_rounds, number_steps, rounds_of, windows_of
from gaverify.rules import findings_for


def draws(*shapes: tuple[int, ...], steps: tuple[int, ...] = (), intervals: tuple[int, ...] = ()) -> list[LoopDraw]:
    """Draws of one place; a window and a backward pass each, where nothing else is said."""
    numbers = range(len(shapes))
    return [
        LoopDraw("here", steps[at] if steps else at, intervals[at] if intervals else at, "randn", shape, at)
        for at, shape in zip(numbers, shapes, strict=True)
    ]


def dealing(draws: list[LoopDraw], rows: dict[int, int], parts: int) -> LoopDealing:
    return LoopDealing(LoopLedger(tuple(draws), rows), parts)


def taken(found: LoopDealing, steps: int, shape: tuple[int, ...]) -> tuple[Any, int, int]:
    part = found.deal("here", steps, "randn", shape)
    assert isinstance(part, DealtLoopDraw)
    return part.draw.value, part.rows.start, part.dimension


class TestDraws:
    def test_a_batch_that_is_drawn_ahead(self) -> None:
        """The first window draws its own batch and the next one's."""
        found = dealing(draws((8,), (8,), (8,), steps=(0, 0, 1), intervals=(0, 0, 1)), {}, 4)
        assert [taken(found, 0, (2,)) for _ in range(5)] == [(0, 0, 0), (0, 2, 0), (0, 4, 0), (0, 6, 0), (1, 0, 0)]

    def test_two_views_at_one_line(self) -> None:
        found = dealing(draws((8,), (8,), steps=(0, 0), intervals=(0, 0)), {0: 8}, 4)
        assert [taken(found, 0, (4,)) for _ in range(4)] == [(0, 0, 0), (1, 0, 0), (0, 4, 0), (1, 4, 0)]

    def test_a_draw_for_the_whole_batch_is_repeated(self) -> None:
        found = dealing(draws((), ()), {}, 2)
        assert [taken(found, at // 2, ())[0] for at in range(4)] == [0, 0, 1, 1]

    def test_several_windows_of_the_full_batch_between_two_steps(self) -> None:
        found = dealing(draws((), (), steps=(0, 0), intervals=(0, 1)), {}, 2)
        assert [taken(found, 0, ())[0] for _ in range(4)] == [0, 0, 1, 1]

    def test_one_by_one(self) -> None:
        found = dealing(draws(*[()] * 4, steps=(0,) * 4, intervals=(0,) * 4), {0: 4}, 2)
        assert [taken(found, 0, ())[0] for _ in range(4)] == [0, 1, 2, 3]

    def test_another_dimension(self) -> None:
        found = dealing(draws((3, 8)), {}, 4)
        assert [taken(found, 0, (3, 2)) for _ in range(2)] == [(0, 0, 1), (0, 2, 1)]

    @pytest.mark.parametrize(
        ("operation", "shape", "steps"),
        [("rand", (2, 3), 0), ("randn", (2,), 0), ("randn", (2, 2), 0), ("randn", (8, 3), 3)],
        ids=["another operation", "fewer dimensions", "two dimensions follow", "another window"],
    )
    def test_what_has_no_counterpart(self, operation: str, shape: tuple[int, ...], steps: int) -> None:
        assert isinstance(dealing(draws((8, 3)), {}, 4).deal("here", steps, operation, shape), Refusal)

    @pytest.mark.parametrize(
        ("turns", "first", "second"),
        [(False, [(0, 1), (4, 5)], [(2, 3), (6, 7)]), (True, [(0, 2), (4, 6)], [(1, 3), (5, 7)])],
    )
    def test_ranks_share_the_rows_that_follow(
        self, turns: bool, first: list[tuple[int, ...]], second: list[tuple[int, ...]]
    ) -> None:
        for rank, rows in enumerate((first, second)):
            found = dealing(draws((8, 3), (8, 3)), {}, 2)
            given = [found.deal("here", at // 2, "randn", (2, 3), DrawingRank(rank, 2, turns)) for at in range(4)]
            dealt = [part for part in given if isinstance(part, DealtLoopDraw)]
            assert [(part.draw.value, tuple(part.rows)) for part in dealt] == [
                (0, rows[0]),
                (0, rows[1]),
                (1, rows[0]),
                (1, rows[1]),
            ]

    def test_numbers_for_each_sample_are_not_dealt_to_ranks(self) -> None:
        found = dealing(draws(*[()] * 4, steps=(0,) * 4, intervals=(0,) * 4), {0: 4}, 2)
        assert isinstance(found.deal("here", 0, "randn", (), DrawingRank(1, 2, True)), Refusal)

    def test_more_rows_than_were_drawn(self) -> None:
        found = dealing(draws((4,)), {}, 2)
        for _ in range(2):
            taken(found, 0, (2,))
        assert isinstance(found.deal("here", 0, "randn", (2,)), Refusal)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def plain_loaders() -> Iterator[None]:
    original = DataLoader.__iter__
    yield
    DataLoader.__iter__ = original  # type: ignore[method-assign]


class Ragged(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = 0
        for size in self.sizes:
            yield torch.arange(start, start + size)
            start += size


def replayed(
    folder: Path, full: Any, accumulated: Any, parts: int, passes: int = 1, *, collated: bool = False
) -> list[list[int]]:
    KeptSamples(folder, quiet, collated=collated).install()
    for _ in range(passes):
        list(full)
    DataLoader.__iter__ = _ORIGINAL  # type: ignore[method-assign]
    GivenSamples(folder, parts, quiet, collated=collated).install()
    return [batch.tolist() for _ in range(passes) for batch in accumulated]


_ORIGINAL = DataLoader.__iter__


def shuffled(size: int, seed: int, count: int = 12, workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(list(range(count)), size, shuffle=True, generator=generator, num_workers=workers)


class TestLoaders:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_another_order_becomes_the_same(self, tmp_path: Path, workers: int) -> None:
        order = [value for batch in _ORIGINAL(shuffled(6, 1)) for value in batch.tolist()]
        given = replayed(tmp_path, shuffled(6, 1, workers=workers), shuffled(2, 2, workers=workers), 3)
        assert given == [order[at : at + 2] for at in range(0, 12, 2)]

    def test_each_pass_is_its_own(self, tmp_path: Path) -> None:
        given = replayed(tmp_path, shuffled(4, 1, count=4), DataLoader(list(range(4)), 2), 2, passes=2)
        assert [sorted(a + b) for a, b in zip(given[::2], given[1::2], strict=True)] == [[0, 1, 2, 3]] * 2
        assert given[:2] != given[2:]

    def test_batches_whose_sizes_do_not_fit_are_cut_evenly(self, tmp_path: Path) -> None:
        full, other = DataLoader(Ragged([9, 6]), batch_size=None), DataLoader(Ragged([2] * 9), batch_size=None)
        given = replayed(tmp_path, full, other, 3)
        assert [len(batch) for batch in given] == [3, 3, 3, 2, 2, 2]
        assert [value for batch in given for value in batch] == list(range(15))

    def test_a_pass_ends_where_the_full_batch_s_ended(self, tmp_path: Path) -> None:
        full, other = DataLoader(list(range(10)), 4, drop_last=True), DataLoader(list(range(10)), 2)
        assert len(replayed(tmp_path, full, other, 2)) == 4

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_collate_function_that_draws(self, tmp_path: Path, workers: int) -> None:
        """Its batches are cut as they were collated; their samples alone would be collated with other draws."""
        drawn = itertools.count(100, 10)

        def collate(samples: list[int]) -> torch.Tensor:
            return torch.tensor([int(sample) for sample in samples], device="cpu") + next(drawn)

        full = DataLoader(list(range(8)), 4, collate_fn=collate, num_workers=workers)
        other = DataLoader(list(range(8)), 2, collate_fn=collate)
        whole = [100, 101, 102, 103, 114, 115, 116, 117]
        assert [*itertools.chain(*replayed(tmp_path, full, other, 2, collated=True))] == whole
        assert [*itertools.chain(*replayed(tmp_path, full, other, 2))] != whole

    def test_a_short_last_batch_as_it_was_collated(self, tmp_path: Path) -> None:
        full, other = DataLoader(list(range(7)), 4), DataLoader(list(range(7)), 2)
        assert replayed(tmp_path, full, other, 2, collated=True) == [[0, 1], [2, 3], [4, 5], [6]]

    def test_samples_that_cannot_be_stored_stay_the_run_s_own(self, tmp_path: Path) -> None:
        full = DataLoader([lambda: 1, lambda: 2], 2, collate_fn=lambda samples: torch.tensor([s() for s in samples]))
        other = DataLoader([3, 4], 1)
        assert replayed(tmp_path, full, other, 2) == [[3], [4]]


class TestRaggedLabels:
    """S05: a decoder's inputs keep a row's last label only where a longer row stands beside it."""

    @staticmethod
    def _rows(*lengths: int, seed: int = 0) -> dict[str, Any]:
        longest = max(lengths)
        labels, inputs = torch.full((len(lengths), longest), -100), torch.zeros(len(lengths), longest, dtype=torch.long)
        for at, length in enumerate(lengths):
            row = torch.arange(1, length + 1) + 10 * length + seed
            labels[at, :length] = row
            inputs[at, 1 : length + 1] = row[: longest - 1]
        return input_rows((), {"decoder_input_ids": inputs, "labels": labels})

    @pytest.mark.parametrize(("seed", "same"), [(0, True), (1, False)])
    def test_another_label_is_another_sample(self, seed: int, same: bool) -> None:
        parts = [self._rows(5, 3), self._rows(7, 4, seed=seed)]
        assert check_rows([self._rows(5, 3, 7, 4)], parts).same is same


TOUCHED: dict[str, tuple[int, ...]] = {"F": (0,), "G": (1,), "B": (0, 1), "f": ()}


def loop(text: str) -> list[Event]:
    """Events of a loop; each backward pass follows a forward of two rows that it reaches."""
    events: list[Event] = []
    update, stepped, number = 1, False, 0
    for letter in text.replace(" ", ""):
        if letter in TOUCHED:
            update, stepped, number = update + stepped, False, number + 1
            events.append(Forward(update, rows=2, model=0, number=number))
            if letter != "f":
                events.append(Backward(update, optimizers=TOUCHED[letter], forwards=(number,)))
        elif letter in "12":
            events.append(Step(update, optimizer=int(letter) - 1))
            stepped = True
        else:
            events.append(ZeroGrad(update, optimizers=("yz".index(letter),)))
    return events


def counts(windows: tuple[Window, ...]) -> list[tuple[int, int]]:
    return [(window.backwards, window.rows) for window in windows if window.complete]


class TestRounds:
    def test_steps_of_one_update_are_compared_together(self) -> None:
        assert rounds_of(loop("BB12 BB12")) == (((0, 1), (1, 1)), ((0, 2), (1, 2)))

    def test_steps_that_the_runs_group_otherwise_are_compared_one_by_one(self) -> None:
        """The full batch's critic steps before the generator's loss; with accumulation both step at the end."""
        full, accumulated = loop("F1G2 F1G2"), loop("FGFG12 FGFG12")
        assert common_rounds(full, accumulated) == (((0, 1),), ((1, 1),), ((0, 2),), ((1, 2),))

    def test_an_optimizer_that_steps_in_one_run_only_stays_in_its_round(self) -> None:
        assert common_rounds(loop("B12 B12"), loop("BB1 BB1")) == rounds_of(loop("B12 B12"))


class TestWindowsOfSeveralOptimizers:
    def test_each_optimizer_has_its_own_passes_and_rows(self) -> None:
        """S11: two models that step at the end of their own windows."""
        events = loop("FGFGFGF1yG2z FGFGFGF1yG2z")
        assert counts(windows_of(events)) == [(4, 8)] * 4

    def test_a_window_that_spans_the_other_ones_step(self) -> None:
        events = loop("FF1yGG FF1yGG2z")
        assert counts(windows_of(events)) == [(2, 4), (2, 4), (4, 8)]

    def test_passes_that_the_other_optimizer_used_and_this_one_cleared_are_not_its_own(self) -> None:
        """A generator's loss reaches the critic's gradients, which are cleared before they are used."""
        events = loop("zFF1y zBB2 yFF1")
        assert counts(windows_of(events)) == [(2, 4), (2, 4), (2, 4)]

    def test_steps_are_numbered_as_the_full_batch_numbers_them(self) -> None:
        full, accumulated = loop("F1G2"), loop("FGFG12")
        rounds = common_rounds(full, accumulated)
        windows = windows_of(accumulated, number_steps(rounds))
        assert [window.number for window in windows] == [1, 2] and counts(windows) == [(2, 4), (2, 4)]


def update(number: int = 1, **fields: Any) -> UpdateComparison:
    row = ParameterComparison("weight", (4,), Outcome.EQUIVALENT, Method.NOISE_FLOOR, 1.0, 1.0, 0.0, 1e-5, 0.0, None)
    values: dict[str, Any] = {"judged": True, "data": RowCheck(8, 8), "steps": 4, "sizes": (2,) * 4}
    return update_of(number, **{"outcome": Outcome.EQUIVALENT, "parameters": (row,), **values, **fields})


def findings_of(text: str, *updates: UpdateComparison, full: str = "F1 F1") -> list[Finding]:
    events = loop(text)
    calls = Calls(windows_of(events), ledger_of(events), windows_of(loop(full)))
    return [*findings_for(comparison_of(Record(calls, updates)))]


def found(compared: UpdateComparison) -> list[Finding]:
    return [finding for finding in findings_of("FFFF1 FFFF1", compared) if finding.code == "GAV609"]


class TestSettings:
    RATE = SettingDifference(0, 0, "lr", 0.1, 0.09)

    def test_numbers_are_shown_with_the_digits_that_differ(self) -> None:
        (finding,) = found(update(settings=(SettingDifference(0, 0, "lr", 0.01, 0.0100002),)))
        assert "`lr` 0.0100002, in the full-batch run 0.01" in finding.evidence[0].statement

    def test_a_setting_of_another_rank_is_told_as_its(self) -> None:
        (finding,) = found(update(settings=(SettingDifference(0, 0, "lr", 0.1, 0.2, rank=1),)))
        assert "`lr` 0.2 in rank 1, in the full-batch run 0.1" in finding.evidence[0].statement
        assert "every rank" in finding.remedy

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"settings": (RATE,), "judged": False},
            {"settings": (RATE,), "takes_factor": True},  # S12: the sum is K times too large, the rate K times lower
            {"stages": (StageComparison(Stage.CHANGE, Outcome.EQUIVALENT, 0.75, 0.25),)},
        ],
        ids=["equal", "not judged", "takes the factor out", "the same change"],
    )
    def test_settings_that_are_right(self, fields: dict[str, Any]) -> None:
        assert found(update(**fields)) == []

    def test_a_step_that_makes_something_else_of_the_same_gradient(self) -> None:
        assert found(update(stages=(StageComparison(Stage.CHANGE, Outcome.DIVERGENT, 0.75, 0.25),)))


class TestMicroBatchesThatDropOut:
    """`if loss is bad: continue` leaves a forward without its backward pass."""

    @pytest.mark.parametrize(("text", "codes"), [("FfFF1y FFFF1y", []), ("FFF1y FFFF1y", ["GAV602"])])
    def test_a_pass_that_the_first_window_left_out_is_none_that_the_second_has_too_many(
        self, text: str, codes: list[str]
    ) -> None:
        assert [finding.code for finding in findings_of(text, full="")] == codes

    @pytest.mark.parametrize(
        ("text", "residual", "codes"),
        [("FFfF1y", 0.4, ["GAV203"]), ("FFfF1y", 1e-7, ["GAV202"]), ("FFF1y", 0.4, ["GAV000"])],
        ids=["drops out", "weights explain it", "none drops out"],
    )
    def test_it_is_named_where_no_weights_explain_the_difference(
        self, text: str, residual: float, codes: list[str]
    ) -> None:
        row = update().parameters[0]._replace(outcome=Outcome.DIVERGENT, difference_norm=0.4)
        fit = WeightFit((1.0, 1.2, 0.8), residual, used=(1.0,) * 3, factor=0.9, factor_residual=0.4)
        differs = update(fit=fit, outcome=Outcome.DIVERGENT, parameters=(row,))
        assert [finding.code for finding in findings_of(text, differs, full="F1y")] == codes


@pytest.mark.parametrize(
    ("name", "value", "drifted"),
    [("0:mask", 1.0, ()), ("0:inner.mask", 1.0, ()), ("0:inner.mask", 2.0, ("mask",)), ("0:other", 2.0, ())],
    ids=["as it is", "behind a wrapper", "changed behind a wrapper", "another one"],
)
def test_a_buffer_that_a_wrapper_calls_otherwise_has_not_drifted(name: str, value: float, drifted: tuple[str]) -> None:
    sides = [
        Samples({0: StepSample(*[numbers()] * 3, buffers={at: numbers(v)})})
        for at, v in (("0:mask", 1.0), (name, value))
    ]
    assert drifted_in(*sides, 2.0**-24) == drifted
