"""Random draws: kept as they are made, selected, and dealt to the samples that they belong to.

Kernels that keep their draws to themselves: fused attention, and a stand-in for cuDNN's recurrent layers, whose dropout
between layers reads a buffer that was seeded once: no generator moves, and no mask comes out."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forwards import experiment_of
from torch import nn

import gaverify
from gaverify import Outcome, Problem
from gaverify.passes.randomness import Dealer, Dealing, DrawLedger, DrawRecorder, Reading, Recomputing, draw_mode
from gaverify.passes.randomness.draws import (
    LOOSE,
    Draw,
    GivenRows,
    Rows,
    are_rounded,
    fingerprint,
    have_other_contents,
    match_rows,
    rows_differ,
    select_by_contents,
    select_by_position,
    take_selection,
    tolerance_of,
)
from gaverify.passes.user_code import loss_of


def recorded(work: Callable[[], Any], size: int = 4) -> DrawLedger:
    """The draws of `work`, which is the full batch of `size` samples."""
    recorder = DrawRecorder()
    with recorder.watching(), draw_mode(recorder, packed=recorder.packed):
        _in_a_loss(work)
    return recorder.ledger


def dealt(
    dealing: Dealing,
    work: Callable[[], Any],
    start: int,
    stop: int,
    size: int = 4,
    order: tuple[int, ...] | None = None,
) -> Any:
    """What `work` returns when every draw is dealt the rows `start` to `stop - 1` of the ledger's, or `order`."""
    dealer = Dealer(dealing, start, stop, size, order)
    with dealer.watching(), draw_mode(dealer, packed=dealer.packed):
        result = _in_a_loss(work)
    dealer.finish()
    return result


def _in_a_loss(work: Callable[[], Any]) -> Any:
    """Draws are told apart by their place below the call of the user's loss."""
    results = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        results.append(work())
        return torch.ones((), requires_grad=True)

    model = nn.Identity()
    loss_of(experiment_of(model, problem=Problem(model, loss, None)), None, "the batch")
    return results[0]


# --- Micro-batches are dealt the full batch's draws; what cannot be dealt is said, never passed over -----------------


@pytest.mark.parametrize("orders", [((0,), (1, 2, 3)), ((0, 2), (3, 1))], ids=["one after the other", "by turns"])
@pytest.mark.parametrize(
    "draw",
    [
        lambda n: torch.rand(n, 3),
        lambda n: torch.randn(3, n),
        lambda n: torch.rand(3 * n, 2),  # three rows of each sample
        lambda n: torch.randint(0, 1000, (n,)),
        lambda n: torch.empty(n, 2).normal_(),
        lambda n: torch.empty(n, 2).uniform_(-1, 1),
        lambda n: torch.empty(n, 2).exponential_(),
        lambda n: torch.multinomial(torch.ones(n, 5), 2),
        lambda n: torch.bernoulli(torch.full((n, 8), 0.5)),
        lambda n: nn.functional.dropout(torch.ones(n, 8), 0.5),
        lambda n: nn.functional.rrelu(-torch.ones(n, 8), training=True),
    ],
)
def test_each_micro_batch_gets_the_rows_of_its_samples(draw, orders) -> None:
    whole = []
    torch.manual_seed(0)
    dealing = Dealing(recorded(lambda: whole.append(draw(4))))
    dim, fold = next((dim, size // 4) for dim, size in enumerate(whole[0].shape) if size % 4 == 0)
    start = 0
    for order in orders:
        torch.manual_seed(99)  # what the micro-batch would draw itself is something else
        n, turns = len(order), order if orders[0] == (0, 2) else None
        part = dealt(dealing, lambda n=n: draw(n), start, start + n, order=turns)
        rows = [sample * fold + row for sample in order for row in range(fold)]
        assert torch.equal(part, whole[0].index_select(dim, torch.tensor(rows)))
        start += n
    assert not dealing.report.unaligned and dealing.report.dealt
    assert dealing.report.ambiguous == (fold > 1)


def test_the_generator_moves_as_the_users_code_expects() -> None:
    dealing = Dealing(recorded(lambda: torch.rand(4)))
    torch.manual_seed(7)
    torch.rand(2)
    expected = torch.get_rng_state()
    torch.manual_seed(7)
    dealt(dealing, lambda: torch.rand(2), 0, 2)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize(
    ("full", "micro", "order", "reason"),
    [
        (lambda: torch.rand(4), lambda: [torch.rand(2), torch.rand(2)], None, "more often than"),
        (lambda: [torch.rand(4), torch.rand(4)], lambda: torch.rand(2), None, "less often than"),
        (lambda: torch.rand(4), lambda: torch.randn(2), None, "` here"),
        (lambda: torch.randperm(4), lambda: torch.randperm(2), None, "permutation"),
        (lambda: torch.empty(4).normal_(0, 3.0), lambda: torch.empty(2).normal_(0, 5.0), None, "arguments depend"),
        (lambda: torch.rand(4), lambda: torch.rand(2, 2), None, "do not match"),
        (lambda: torch.rand(3), lambda: torch.rand(1), (0, 2), "do not match"),  # of 4 samples: which, nobody knows
    ],
)
def test_what_cannot_be_dealt_is_said_with_its_line(full, micro, order, reason: str) -> None:
    dealing = Dealing(recorded(full))
    dealt(dealing, micro, 0, 2, order=order)
    assert dealing.report.ambiguous
    assert any(reason in why for why in dealing.report.unaligned.values()), dealing.report.unaligned
    assert all(file.endswith("test_draws.py") and line for file, line in dealing.report.places.values())
    assert dealing.report.places or reason == "less often than"


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), lambda: random.random()], ids=["torch", "python"])
def test_the_second_reading_deals_a_loop_over_samples_by_its_place(draw: Callable[[], float]) -> None:
    """Python's draws are made from their samples' states."""
    whole: list[float] = []

    def loop(n: int) -> list[float]:
        whole.extend(numbers := [draw() for _ in range(n)])
        return numbers

    def parts(dealing: Dealing) -> list[float]:
        numbers = []
        for start in (0, 2):
            random.seed(5)  # every micro-batch starts from the state that the full batch started from
            numbers += dealt(dealing, partial(loop, 2), start, start + 2)
        return numbers

    random.seed(5)
    ledger = recorded(partial(loop, 4))
    first_reading = Dealing(ledger)
    assert parts(first_reading) != whole[:4], "by order, the second micro-batch is dealt the first one's numbers"
    second_reading = Dealing(ledger, Reading(by_contents=True, counts=first_reading.report.counts))
    assert parts(second_reading) == whole[:4] and second_reading.report.dealt


def test_a_recomputation_is_dealt_the_same_rows_again() -> None:
    whole = []
    ledger = recorded(lambda: whole.append(torch.rand(4)))
    dealer = Dealer(Dealing(ledger), 2, 4, 4)

    state = torch.get_rng_state()
    with draw_mode(dealer):
        first = torch.rand(2)
    torch.set_rng_state(state)  # as activation checkpointing does
    with draw_mode(Recomputing([dealer])):
        again = torch.rand(2)
    assert torch.equal(first, again) and torch.equal(first, whole[0][2:])


def test_a_constant_draw_is_the_same_for_every_sample() -> None:
    dealing = Dealing(recorded(lambda: torch.randn(4)), Reading(constant=True))
    assert dealt(dealing, lambda: torch.randn(2), 0, 2).tolist() == [1.0, 1.0]


# --- The full batch's draws are kept: which, how often, and with what they were drawn for ----------------------------


def test_a_kept_draw_does_not_change_with_the_tensor_it_was_drawn_into() -> None:
    noise = torch.empty(4)
    ledger = recorded(lambda: noise.normal_().mul_(0))
    assert not noise.any()
    assert ledger.draws[0].value.any()


def test_what_draws_nothing_is_not_kept_and_a_mask_takes_a_byte() -> None:
    inputs = torch.ones(4, 3, requires_grad=True)
    for nothing in (torch.exp, nn.Dropout(0.0), nn.Dropout(0.5).eval()):
        assert recorded(partial(nothing, inputs)).draws == ()
    assert [draw.value.dtype for draw in recorded(partial(nn.Dropout(0.5), inputs)).draws] == [torch.bool]


def test_a_draw_that_a_recomputation_repeats_is_one_draw() -> None:
    def twice() -> None:
        state = torch.get_rng_state()
        torch.rand(4)
        torch.set_rng_state(state)
        torch.rand(4)

    assert len(recorded(twice).draws) == 1
    assert len(recorded(lambda: [torch.rand(4), torch.rand(4)]).draws) == 2


def test_draws_of_python_are_kept_with_their_state() -> None:
    random.seed(3)
    ledger = recorded(lambda: [random.random(), random.gauss(0, 1)])
    assert [draw.call.name for draw in ledger.foreign] == ["random", "gauss"]
    assert set(ledger.foreign_end) >= {"random"}
    assert recorded(lambda: None).foreign == ()
    assert random.random.__name__ == "random" and random.random.__self__ is random._inst  # put back


# --- Which rows of the full batch's draw are a micro-batch's: by their place, by their contents ----------------------


def drawn(*shape: int, source: torch.Tensor | None = None) -> Draw:
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    return Draw("rand", value, (), None, fingerprint(source) if source is not None else None)


def rows(micro_batch: tuple[int, int], size: int, *shape: int, source: torch.Tensor | None = None) -> Rows:
    prints = fingerprint(source) if source is not None else None
    return Rows(micro_batch, size, torch.Size(shape), prints, 1e-4)


@pytest.mark.parametrize(
    ("draw", "wanted", "inner", "expected"),
    [
        (drawn(6), rows((2, 4), 6, 2), False, [2, 3]),
        (drawn(3, 6), rows((2, 4), 6, 3, 2), False, [[2, 3], [8, 9], [14, 15]]),
        (drawn(5), rows((2, 4), 6, 5), False, [0, 1, 2, 3, 4]),
        (drawn(12), rows((2, 4), 6, 4), True, [2, 3, 8, 9]),
        (drawn(6, 2), rows((2, 4), 6, 2), False, None),
        (drawn(6), rows((2, 4), 6, 9), False, None),
    ],
    ids=["a row per sample", "a column per sample", "the same shape", "batch inside", "other dimensions", "longer"],
)
def test_rows_lie_at_their_samples_place(draw: Draw, wanted: Rows, inner: bool, expected: list | None) -> None:
    selection = select_by_position(draw, wanted, inner, GivenRows()).selection
    assert (None if selection is None else take_selection(draw.value, selection).tolist()) == expected


def test_the_order_of_a_fold_is_guessed_without_contents() -> None:
    first = select_by_position(drawn(12), rows((0, 2), 6, 4), False, GivenRows())
    second = select_by_position(drawn(12), rows((2, 4), 6, 4), False, first.given)
    assert [position.selection for position in (first, second)] == [[(0, range(4))], [(0, range(4, 8))]]
    assert first.guessed


@pytest.mark.parametrize("inner", [True, False])
def test_contents_tell_how_rows_are_folded(inner: bool) -> None:
    samples = torch.randn(6, 2, 7, generator=torch.Generator().manual_seed(0))  # two heads per sample
    order = (lambda t: t.transpose(0, 1).reshape(-1, 7)) if inner else (lambda t: t.reshape(-1, 7))
    draw = drawn(12, 7, source=order(samples))
    wanted = rows((2, 4), 6, 4, 7, source=order(samples[2:4]))
    first = select_by_position(draw, rows((0, 2), 6, 4, 7, source=order(samples[:2])), not inner, GivenRows())
    selection, guessed, _ = select_by_position(draw, wanted, not inner, first.given)
    assert not guessed
    assert have_other_contents(draw, wanted, selection).item() is False


def test_selected_rows_follow_each_other_and_can_be_withdrawn() -> None:
    """Five of six samples passed a mask: the micro-batches' rows lie one behind the other."""
    draw = drawn(5)
    first, second = rows((0, 3), 6, 2), rows((3, 6), 6, 3)
    selection, _, given = select_by_position(draw, first, False, GivenRows())
    assert selection == [(0, range(2))]
    selection, _, given = select_by_position(draw, second, False, given)
    assert selection == [(0, range(2, 5))]
    assert given.count == 5
    assert given.withdraw(draw, second).count == 2


def test_rows_are_found_by_contents_wherever_they_lie() -> None:
    source = torch.randn(6, 9)
    draw = drawn(6, 9, source=source)
    order = torch.tensor([5, 1, 3])
    selection = select_by_contents(draw, rows((0, 3), 6, 3, 9, source=source[order]), GivenRows())
    assert selection is not None and selection[0][1].tolist() == [5, 1, 3]
    assert select_by_contents(draw, rows((0, 3), 6, 3, 9, source=torch.randn(3, 9)), GivenRows()) is None
    assert select_by_contents(drawn(6, 9), rows((0, 3), 6, 3, 9, source=source[order]), GivenRows()) is None


def test_equal_rows_are_handed_out_once_each() -> None:
    source = torch.ones(4, 5)
    draw = drawn(4, 5, source=source)
    found, given = [], GivenRows()
    for micro_batch in ((0, 2), (2, 4)):
        selection = select_by_contents(draw, rows(micro_batch, 4, 2, 5, source=source[:2]), given)
        assert selection is not None
        given = given.take(draw, selection)
        found += selection[0][1].tolist()
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(12, 9), (12, 3, 9), (12,)], ids=str)
def test_rows_that_are_far_nearer_to_their_own_than_to_others_are_rounded(shape: tuple[int, ...]) -> None:
    """Whatever their precision rounds by; rows of other samples are not, and neither are two that were exchanged."""
    source = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    noisy = source * (1 + 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    here = [(0, range(2, 8))]

    def told(full: torch.Tensor, ours: torch.Tensor) -> tuple[bool, bool]:
        draw, wanted = drawn(*shape, source=full), rows((2, 8), 12, *ours.shape, source=ours)
        return bool(have_other_contents(draw, wanted, here)), bool(are_rounded(draw, wanted, here))

    assert told(source, source[2:8]) == (False, True)
    assert told(source, noisy[2:8]) == (True, True)
    assert told(source.bfloat16(), noisy[2:8].double()) == (True, True), "recorded in another precision"
    assert told(source, noisy[[7, 6, 5, 4, 3, 2]]) == (True, False)
    assert told(source, noisy[[2, 3, 5, 4, 6, 7]]) == (True, False), "a pair"
    alike = torch.cat([source[:1] + 1e-3 * source[:11], source[11:]])
    assert told(alike, source[2:8]) == (True, False), "as far off as others"


def test_a_pair_of_near_rows_that_was_exchanged_is_no_rounding() -> None:
    """They differ by less than rows do from their neighbours, and by more than the other rows were rounded."""
    source = torch.arange(12.0)
    source[4:6] = torch.tensor([4.0, 4.2])
    draw, rounded = drawn(12, source=source), source[2:8] + 1e-3
    for order, is_rounding in (([0, 1, 3, 2, 4, 5], False), ([0, 1, 2, 3, 4, 5], True)):
        wanted = rows((2, 8), 12, 6, source=rounded[order])
        assert bool(are_rounded(draw, wanted, [(0, range(2, 8))])) is is_rounding


def test_rows_in_several_dimensions_or_without_contents_do_not_tell_whether_they_are_rounded() -> None:
    source, here = torch.randn(6, 9), [(0, range(2, 4))]
    draw, wanted = drawn(6, 9, source=source), rows((2, 4), 6, 2, 9, source=source[2:4])
    assert are_rounded(draw, wanted, [*here, (1, range(3))]) is None
    assert are_rounded(drawn(6, 9), wanted, here) is None
    assert have_other_contents(draw, rows((2, 4), 6, 2, 9), here) is None


def test_rows_that_rounding_changed_are_the_same_and_others_are_not() -> None:
    source = torch.randn(50, 30)
    noisy = source * (1 + 1e-6 * torch.randn_like(source))
    assert not rows_differ(fingerprint(noisy), fingerprint(source), tolerance_of(source))
    assert rows_differ(fingerprint(noisy.flip(0)), fingerprint(source), tolerance_of(source))
    found = match_rows(fingerprint(source), fingerprint(noisy[[7, 3]]), 0, [], tolerance_of(source))
    assert found is not None and found.tolist() == [7, 3]


def test_a_loose_match_has_to_are_rounded() -> None:
    """Under the tolerance of lower precision, a row that two others are about as near to belongs to neither."""
    full = torch.tensor([[1.0], [1.04], [9.0]])
    assert match_rows(full, torch.tensor([[1.02]]), 0, [], LOOSE) is None
    found = match_rows(full, torch.tensor([[8.9]]), 0, [], LOOSE)
    assert found is not None and found.tolist() == [2]


SECRET = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _stand_in():
    """`standin::_cudnn_rnn` masks its input by a generator that nobody else knows of."""
    library = torch.library.Library("standin", "DEF")
    library.define(
        "_cudnn_rnn(Tensor x, float dropout, bool train) -> (Tensor, Tensor)", tags=torch.Tag.nondeterministic_seeded
    )

    def forward(x: torch.Tensor, dropout: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        keep = torch.rand(x.shape, generator=SECRET) >= (dropout if train else 0.0)
        mask = keep / (1 - dropout if train else 1.0)
        return x * mask, mask

    def setup(ctx, inputs, output) -> None:
        ctx.save_for_backward(output[1])

    def backward(ctx, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None

    library.impl("_cudnn_rnn", forward, "CPU")
    torch.library.register_autograd("standin::_cudnn_rnn", backward, setup_context=setup, lib=library)
    yield
    library._destroy()


def layer(x: torch.Tensor, dropout: float = 0.5, train: bool = True) -> torch.Tensor:
    return torch.ops.standin._cudnn_rnn(x, dropout, train)[0]


def test_hidden_draws_are_fused_whatever_the_generator_does() -> None:
    x = torch.randn(4, 3)
    assert recorded(lambda: layer(x)).fused == {"_cudnn_rnn"}
    assert recorded(lambda: layer(x, dropout=0.0)).fused == set()
    assert recorded(lambda: layer(x, train=False)).fused == set()


def problem(*, written_out: bool) -> Problem:
    """A model with the layer; where cuDNN is switched off it is written out, if it can be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](batch))
        visible = written_out and not torch.backends.cudnn.enabled
        return model[2](F.dropout(hidden, 0.5) if visible else layer(hidden)).square().mean()

    return Problem(model, loss, torch.randn(8, 6))


def test_recurrent_dropout_is_verified_on_unfused_kernels() -> None:
    verdict = gaverify.verify(problem(written_out=True), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert [finding.code for finding in verdict.findings if finding.severity == "fault"] == []


def scripted_layer(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.standin._cudnn_rnn(x, 0.5, True)[0]


def catching(kind: type[BaseException]) -> Callable[[torch.Tensor], torch.Tensor]:
    def defended(x: torch.Tensor) -> torch.Tensor:
        try:
            return layer(x)
        except kind:
            return x

    return defended


LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": catching(Exception),
    "scripted": lambda x: torch.jit.script(scripted_layer)(x),
    "bare": catching(BaseException),
}


@pytest.mark.parametrize(("how", "finished"), [("plain", 1), ("scripted", 1), ("bare", 2)])
def test_a_recording_ends_at_its_first_hidden_draw_and_is_made_again(
    how: str, finished: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What follows in that forward, and its backward, are not run; unless the user's code holds on to everything."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(x)
            print("begun")  # a counter would be put back after each pass
            hidden = LAYERS[how](hidden) if torch.backends.cudnn.enabled else F.dropout(hidden, 0.5)
            print("ended")
            return hidden

    model = Net(6, 2)
    squares = Problem(model, lambda model, batch: model(batch).square().mean(), torch.randn(8, 6))
    experiment = experiment_of(model, problem=squares, sizes=(4, 4))
    recorded_experiment, full = experiment.record(seed=0)
    printed = capsys.readouterr().out
    assert (printed.count("begun"), printed.count("ended")) == (2, finished)
    assert recorded_experiment.math_kernels and recorded_experiment.draws.count == 1
    assert not recorded_experiment.draws.fused and set(full.gradients) == {"weight", "bias"}


def test_hidden_draws_that_no_remedy_shows_are_named_as_that() -> None:
    verdict = gaverify.verify(problem(written_out=False), steps=4)
    assert verdict.outcome is not Outcome.EQUIVALENT
    codes = {finding.code for finding in verdict.findings if finding.severity == "fault"}
    assert "GAV302" in codes
    assert codes <= {"GAV302", "GAV403"}  # a generator that nobody can reach is hidden state as well


# --- Packed sequences: time steps of equal contents ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["unsorted", "sorted by the user", "time first", "sorted twice"])
def test_time_steps_of_equal_contents_get_the_draws_of_their_own_samples(how: str) -> None:
    lengths = torch.tensor([2, 5, 1, 4])

    def drop(rows: slice) -> torch.Tensor:
        counts, steps = lengths[rows], torch.ones(len(lengths[rows]), int(lengths[rows].max()), 2)
        order = torch.arange(len(counts))
        if how.startswith("sorted"):
            order = counts.argsort(descending=how == "sorted by the user")
        packed = nn.utils.rnn.pack_padded_sequence(
            steps.transpose(0, 1) if how == "time first" else steps,
            counts[order],
            batch_first=how != "time first",
            enforce_sorted=how == "sorted by the user",
        )
        dropped = packed._replace(data=F.dropout(packed.data, 0.5))
        padded, _ = nn.utils.rnn.pad_packed_sequence(dropped, batch_first=True, total_length=5)
        return padded[order.argsort()]

    full: list[torch.Tensor] = []
    dealing = Dealing(recorded(lambda: full.append(drop(slice(0, 4)))))
    parts = [dealt(dealing, lambda at=at: drop(slice(at, at + 2)), at, at + 2) for at in (0, 2)]
    assert torch.equal(torch.cat(parts), full[0])
