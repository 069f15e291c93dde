"""Which part of the full batch's draws and samples a micro-batch is given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from gaverify.audit.recording.dealing import Counterparts, LoopDraw, Share, Unalignable
from gaverify.audit.recording.rows import input_rows
from gaverify.audit.recording.samples import GivenSamples, KeptSamples
from gaverify.audit.same_data import check_rows


def draws(*shapes: tuple[int, ...], steps: tuple[int, ...] = (), intervals: tuple[int, ...] = ()) -> list[LoopDraw]:
    """Draws of one place; a window and a backward pass each, where nothing else is said."""
    numbers = range(len(shapes))
    return [
        LoopDraw("here", steps[at] if steps else at, intervals[at] if intervals else at, "randn", shape, at)
        for at, shape in zip(numbers, shapes, strict=True)
    ]


def taken(found: Counterparts, steps: int, shape: tuple[int, ...]) -> tuple[Any, int, int]:
    part = found.find("here", steps, "randn", shape)
    return part.draw.value, part.start, part.dim


class TestDraws:
    def test_rows_follow_each_other(self) -> None:
        found = Counterparts(draws((8, 3), (8, 3)), {}, 4)
        given = [taken(found, at // 4, (2, 3)) for at in range(8)]
        assert given == [(at // 4, at % 4 * 2, 0) for at in range(8)]

    def test_a_batch_that_is_drawn_ahead(self) -> None:
        """The first window draws its own batch and the next one's."""
        found = Counterparts(draws((8,), (8,), (8,), steps=(0, 0, 1), intervals=(0, 0, 1)), {}, 4)
        assert [taken(found, 0, (2,)) for _ in range(5)] == [(0, 0, 0), (0, 2, 0), (0, 4, 0), (0, 6, 0), (1, 0, 0)]

    def test_two_views_at_one_line(self) -> None:
        found = Counterparts(draws((8,), (8,), steps=(0, 0), intervals=(0, 0)), {0: 8}, 4)
        assert [taken(found, 0, (4,)) for _ in range(4)] == [(0, 0, 0), (1, 0, 0), (0, 4, 0), (1, 4, 0)]

    def test_a_draw_for_the_whole_batch_is_repeated(self) -> None:
        found = Counterparts(draws((), ()), {}, 2)
        assert [taken(found, at // 2, ())[0] for at in range(4)] == [0, 0, 1, 1]

    def test_several_windows_of_the_full_batch_between_two_steps(self) -> None:
        found = Counterparts(draws((), (), steps=(0, 0), intervals=(0, 1)), {}, 2)
        assert [taken(found, 0, ())[0] for _ in range(4)] == [0, 0, 1, 1]

    def test_one_by_one(self) -> None:
        found = Counterparts(draws(*[()] * 4, steps=(0,) * 4, intervals=(0,) * 4), {0: 4}, 2)
        assert [taken(found, 0, ())[0] for _ in range(4)] == [0, 1, 2, 3]

    def test_another_dimension(self) -> None:
        found = Counterparts(draws((3, 8)), {}, 4)
        assert [taken(found, 0, (3, 2)) for _ in range(2)] == [(0, 0, 1), (0, 2, 1)]

    @pytest.mark.parametrize(
        ("operation", "shape", "steps"),
        [("rand", (2, 3), 0), ("randn", (2,), 0), ("randn", (2, 2), 0), ("randn", (8, 3), 3)],
        ids=["another operation", "fewer dimensions", "two dimensions follow", "another window"],
    )
    def test_what_has_no_counterpart(self, operation: str, shape: tuple[int, ...], steps: int) -> None:
        with pytest.raises(Unalignable):
            Counterparts(draws((8, 3)), {}, 4).find("here", steps, operation, shape)

    @pytest.mark.parametrize(
        ("turns", "first", "second"),
        [(False, [(0, 1), (4, 5)], [(2, 3), (6, 7)]), (True, [(0, 2), (4, 6)], [(1, 3), (5, 7)])],
    )
    def test_ranks_share_the_rows_that_follow(
        self, turns: bool, first: list[tuple[int, ...]], second: list[tuple[int, ...]]
    ) -> None:
        for rank, rows in enumerate((first, second)):
            found = Counterparts(draws((8, 3), (8, 3)), {}, 2)
            given = [found.find("here", at // 2, "randn", (2, 3), Share(rank, 2, turns)) for at in range(4)]
            assert [(part.draw.value, tuple(part.rows)) for part in given] == [
                (0, rows[0]),
                (0, rows[1]),
                (1, rows[0]),
                (1, rows[1]),
            ]

    def test_numbers_for_each_sample_are_not_dealt_to_ranks(self) -> None:
        found = Counterparts(draws(*[()] * 4, steps=(0,) * 4, intervals=(0,) * 4), {0: 4}, 2)
        with pytest.raises(Unalignable):
            found.find("here", 0, "randn", (), Share(1, 2, True))

    def test_more_rows_than_were_drawn(self) -> None:
        found = Counterparts(draws((4,)), {}, 2)
        for _ in range(2):
            taken(found, 0, (2,))
        with pytest.raises(Unalignable):
            taken(found, 0, (2,))


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


class TestLoaders:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_another_order_becomes_the_same(self, tmp_path: Path, workers: int) -> None:
        data = list(range(12))
        full = DataLoader(data, 6, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=workers)
        order = [value for batch in _ORIGINAL(full) for value in batch.tolist()]
        full = DataLoader(data, 6, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=workers)
        other = DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(2), num_workers=workers)
        given = replayed(tmp_path, full, other, 3)
        assert given == [order[at : at + 2] for at in range(0, 12, 2)]

    def test_each_pass_is_its_own(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        full = DataLoader(list(range(4)), 4, shuffle=True, generator=generator)
        other = DataLoader(list(range(4)), 2)
        given = replayed(tmp_path, full, other, 2, passes=2)
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

    def test_both_runs_saw_the_same(self) -> None:
        assert check_rows([self._rows(5, 3, 7, 4)], [self._rows(5, 3), self._rows(7, 4)]).same

    def test_another_label_is_another_sample(self) -> None:
        assert not check_rows([self._rows(5, 3, 7, 4)], [self._rows(5, 3), self._rows(7, 4, seed=1)]).same
