"""Amounts of memory in words, the straight line, and what it predicts; no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import B, failing, profile, row

from gaverify.amounts import bytes_text, parse_bytes, seconds_text
from gaverify.records.comparison import Outcome
from gaverify.records.prediction import NoPrediction, Prediction, activation_line, fit, peak_line, predict
from gaverify.records.profile import Memory, Plan, Profile, Row, Seconds, plans


@pytest.mark.parametrize(
    ("word", "amount"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        (" 1.5 gb ", 1_500_000_000),
        ("500 MB", 500 * 10**6),
        ("80kib", 80 * 1024),
        ("12B", 12),
        (".5TB", 5 * 10**11),
    ],
)
def test_memory_with_a_unit(word: str, amount: int) -> None:
    assert parse_bytes(word) == amount


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("24", "has no unit, got `24`; write `24GB` or `24GiB`"),
        ("24G", "has the unknown unit `G`, got `24G`; write `24GB` or `24GiB`"),
        ("8k", "has the unknown unit `k`, got `8k`; write `8kB` or `8KiB`"),
        ("24 apples", "has the unknown unit `apples`, got `24 apples`; write `24GB` or `24GiB`"),
        ("lots", "must be an amount of memory with its unit, got `lots`; write `24GB` or `24GiB`"),
        ("-3GB", "must be an amount of memory with its unit, got `-3GB`; write `24GB` or `24GiB`"),
        ("0GB", "must be more than nothing, got `0GB`; write `24GB` or `24GiB`"),
    ],
)
def test_memory_without_a_unit_says_what_to_write(word: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_bytes(word)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (516, "516 B"),
        (1234, "1.23 kB"),
        (999_999, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (-2000, "-2.00 kB"),
        (3.2e9, "3.20 GB"),
        (7e12, "7.00 TB"),
    ],
)
def test_bytes_in_words(amount: float, text: str) -> None:
    assert bytes_text(amount) == text


@given(st.integers(min_value=1000, max_value=10**15))
def test_bytes_in_words_can_be_read_back(amount: int) -> None:
    assert parse_bytes(bytes_text(amount)) == pytest.approx(amount, rel=0.006)


@pytest.mark.parametrize(("seconds", "text"), [(8.5e-4, "850 µs"), (0.00123, "1.23 ms"), (12.34, "12.3 s")])
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_the_spread_is_the_quartiles_or_all_there_is() -> None:
    assert Seconds.of([3.0, 1.0, 2.0]) == Seconds(2.0, 1.0, 3.0, 1.0, 3.0, 3)
    assert Seconds.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Seconds(3.0, 2.0, 4.0, 1.0, 5.0, 5)


def test_one_micro_batch_is_the_full_batch() -> None:
    everything = plans(("full-batch", "summed-loss", "accumulate"), [4, 1, 2, 4])
    assert everything == (
        Plan("full-batch", 1),
        Plan("summed-loss", 2),
        Plan("summed-loss", 4),
        Plan("accumulate", 2),
        Plan("accumulate", 4),
    )
    assert plans(("accumulate",), [1, 2]) == (Plan("accumulate", 1), Plan("accumulate", 2))


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.sets(st.integers(1, 4096), min_size=2, max_size=8))
def test_a_line_is_found_again(intercept: int, slope: int, sizes: set[int]) -> None:
    line = fit([(n, intercept + slope * n) for n in sizes])
    assert line is not None and line.usable
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-2)
    assert line.residual is None if len(sizes) == 2 else line.residual == pytest.approx(0, abs=1e-3 * intercept + 1e-3)


def test_one_size_is_no_line() -> None:
    assert fit([(8, 100), (8, 101)]) is None


def test_a_limit_holds_what_the_line_says() -> None:
    prediction = predict(profile())
    assert isinstance(prediction, Prediction)
    assert (prediction.basis, prediction.largest_micro_batch) == ("peak", 349)  # 300 MB + 350 × 2 MB = 1 GB, less
    # what a batch of more than 32 samples takes itself: 318 × 100 bytes
    assert (prediction.wanted_batch, prediction.smallest_steps, prediction.extrapolated) == (1024, 3, True)


def test_the_residual_is_kept_free() -> None:
    noisy = profile(rows=(*profile().rows[:-1], above(profile().rows[-1], 1_000_000)))
    line, prediction = peak_line(noisy.rows), predict(noisy)
    assert line is not None and line.residual is not None and 0 < line.residual < 1_000_000
    assert isinstance(prediction, Prediction)
    assert line.at(prediction.largest_micro_batch) + line.residual <= 1e9
    assert line.at(prediction.largest_micro_batch + 1) + line.residual > 1e9


def above(sample: Row, more: int) -> Row:
    """The row with so much more at its peak."""
    memory = sample.memory
    assert memory is not None
    return replace(sample, memory=replace(memory, peak=memory.peak + more))


def test_the_full_batch_holds_no_gradients_yet_and_does_not_tilt_the_line() -> None:
    rows = (above(profile().rows[0], -40_000_000), *profile().rows[1:])
    line = peak_line(rows)
    assert line is not None and line.slope == pytest.approx(2_000_000)
    assert [n for n, _ in line.points] == [16, 8, 4]
    two = peak_line((rows[0], row("accumulate", 2)))  # without it there would be one size only
    assert two is not None and [n for n, _ in two.points] == [B, 16]


def test_differences_that_may_be_chance_are_no_line() -> None:
    sizes = {2: 300_000_000, 4: 299_500_000, 8: 299_250_000}
    resident = peak_line([row("accumulate", k, memory=Memory("resident", 1, peak)) for k, peak in sizes.items()])
    counted = peak_line([row("accumulate", k, memory=Memory("cuda-allocated", 1, peak)) for k, peak in sizes.items()])
    assert resident is not None and counted is not None
    assert not resident.usable and counted.usable


def flat() -> Profile:
    rows = tuple(replace(r, memory=Memory("resident", 290_000_000, 300_000_000)) for r in profile().rows)
    return profile(rows=rows)


def test_where_peaks_do_not_tell_the_activations_do() -> None:
    prediction = predict(flat())
    assert isinstance(prediction, Prediction)
    assert prediction.basis == "activations"
    assert prediction.rest == 300_000_000 - 4000
    assert prediction.largest_micro_batch == 636_370  # (1 GB − 300 MB + 4 kB + 32 × 100 B) / (1 kB + 100 B)


def test_not_even_one_sample_fits() -> None:
    prediction = predict(profile(memory_limit=100_000_000))
    assert isinstance(prediction, Prediction)
    assert (prediction.largest_micro_batch, prediction.smallest_steps) == (0, None)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param(profile(steps=(4,)), "one K only", id="one K"),
        pytest.param(profile(memory_limit=None), "`--memory 24GB`", id="no limit"),
        pytest.param(profile(rows=(row("full-batch", 1), row("summed-loss", 2))), "accumulation", id="no accumulation"),
        pytest.param(profile(rows=(row("accumulate", 2),)), "fewer than two sizes", id="one row left"),
    ],
)
def test_no_prediction_says_why(case: Profile, words: str) -> None:
    reason = predict(case)
    assert isinstance(reason, NoPrediction) and words in f"no prediction{reason.value}"


def test_the_summed_loss_has_no_part_in_the_line() -> None:
    line = activation_line(profile().rows)
    assert line is not None
    assert [n for n, _ in line.points] == [B, 16, 8, 4]


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((Outcome.EQUIVALENT, Outcome.EQUIVALENT), 0),
        ((Outcome.EQUIVALENT, Outcome.DIVERGENT), 1),
        ((Outcome.EQUIVALENT, Outcome.INCONCLUSIVE), 3),
        ((None, None), 3),
    ],
)
def test_exit_codes(outcomes: tuple[Outcome | None, ...], code: int) -> None:
    rows = tuple(row("accumulate", 2, outcome=outcome) for outcome in outcomes)
    assert profile(rows=rows).exit_code == code


def test_what_a_row_ran_into_is_no_divergence() -> None:
    rows = failing().rows
    assert profile(rows=rows).exit_code == 1  # one row diverges
    assert profile(rows=rows[2:]).exit_code == 2  # the user's code raised
    agree = row("accumulate", 2)
    assert profile(rows=(agree, rows[0], rows[4])).exit_code == 0  # out of memory and a K that does not fit
