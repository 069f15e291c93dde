"""What stands for an optimizer where a script moves its weights itself."""

import pytest
import torch
from torch import nn

from gaverify.audit.recording.by_hand import ByHand, Unannounced
from gaverify.audit.recording.values import out_of_sight


def model() -> nn.Linear:
    made = nn.Linear(2, 1)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 2.0]], device="cpu"))
        made.bias.zero_()
    return made


def moved(module: nn.Linear, by: float) -> None:
    module.weight.data -= by


class TestByHand:
    def test_the_change_is_what_was_taken_away_since_it_was_asked_for_last(self) -> None:
        module = model()
        hand = ByHand(list(module.parameters()))
        moved(module, 0.5)
        weight, bias = hand.change()
        assert weight is not None and bias is not None
        assert weight.tolist() == [[0.5, 0.5]] and bias.tolist() == [0.0]
        moved(module, 0.25)
        again = hand.change()[0]
        assert again is not None and again.tolist() == [[0.25, 0.25]]

    def test_weights_go_back_to_before_the_last_change(self) -> None:
        module = model()
        hand = ByHand(list(module.parameters()))
        moved(module, 0.5)
        hand.change()
        hand.back()
        assert module.weight.tolist() == [[1.0, 2.0]]
        moved(module, 0.5)
        again = hand.change()[0]
        assert again is not None and again.tolist() == [[0.5, 0.5]]


class TestUnannounced:
    def test_two_moves_after_differentiations_are_certain(self) -> None:
        module, unannounced = model(), Unannounced()
        unannounced.look(module)
        for at in range(2):
            assert not unannounced.certain(lambda: False)
            unannounced.differentiated()
            moved(module, 0.5)
            unannounced.look(module)
            assert unannounced.moves == at + 1
        assert unannounced.certain(lambda: False)

    def test_beside_an_optimizer_its_step_is_waited_for(self) -> None:
        """Weight decay by hand after each of many micro-batches comes before the first step."""
        module, unannounced = model(), Unannounced()
        unannounced.look(module)
        for _ in range(255):
            unannounced.differentiated()
            moved(module, 0.5)
            unannounced.look(module)
        assert not unannounced.certain(lambda: True)
        unannounced.differentiated()
        moved(module, 0.5)
        unannounced.look(module)
        assert unannounced.certain(lambda: True)

    def test_moves_without_a_differentiation_do_not_count(self) -> None:
        module, unannounced = model(), Unannounced()
        for _ in range(4):
            unannounced.look(module)
            moved(module, 0.5)
        assert unannounced.moves == 0

    def test_differentiations_without_a_move_do_not_count(self) -> None:
        module, unannounced = model(), Unannounced()
        for _ in range(4):
            unannounced.look(module)
            unannounced.differentiated()
        assert unannounced.moves == 0


@pytest.mark.parametrize(("initialised", "capturing"), [(True, True), (True, False), (False, True)])
def test_nothing_can_be_read_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, capturing: bool
) -> None:
    """A build without CUDA cannot even be asked."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert ("CUDA graph capture" in out_of_sight()) is (initialised and capturing)
