"""The remedies do what the findings that name them promise, on models of every layout that they claim to handle."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradients import difference, gradients
from problems import cross_entropy, fault_codes, language_model, mlp, token_batch, token_loss
from torch import nn

import gaverify
from gaverify import Outcome, Problem, ProblemError
from gaverify.remedies import FrozenBatchNorm, convert_batch_norm, token_weights, valid_targets


class TestTokenWeights:
    def test_repairs_a_mean_of_means(self) -> None:
        torch.manual_seed(0)
        problem = Problem(language_model(), token_loss, token_batch((6, 2, 1, 3, 5, 6, 2, 4)))
        assert fault_codes(gaverify.verify(problem)) == {"GAV202"}
        assert gaverify.verify(problem, weighting=token_weights).outcome is Outcome.EQUIVALENT

    def test_shifted_targets(self) -> None:
        """The model drops the first label of each row, valid or not."""

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = model(batch["tokens"])[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        torch.manual_seed(0)
        problem = Problem(language_model(), loss, token_batch((6, 2, 1, 3, 5, 6, 2, 4)))
        assert gaverify.verify(problem, weighting=token_weights).outcome is Outcome.DIVERGENT
        shifted = partial(token_weights, shifted=True)
        assert gaverify.verify(problem, weighting=shifted).outcome is Outcome.EQUIVALENT

    def test_class_weights(self) -> None:
        weights = torch.tensor([0.2, 1.0, 2.0, 5.0])

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], weight=weights.to(batch[0].dtype))

        torch.manual_seed(0)
        problem = Problem(mlp(), loss, (torch.randn(16, 6), torch.tensor([0, 0, 1, 0] + [3, 2, 2, 3] * 3)))
        assert gaverify.verify(problem, weighting=token_weights).outcome is Outcome.DIVERGENT
        weighed = partial(token_weights, class_weights=weights)
        assert gaverify.verify(problem, weighting=weighed).outcome is Outcome.EQUIVALENT

    @pytest.mark.parametrize("lengths", [(6, 2, 1, 3, 5, 6, 2, 4), (6, 2, 0, 0, 5, 6, 2, 4)])
    def test_the_loop_of_its_docstring(self, lengths: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        model, batch = language_model().double(), token_batch(lengths)
        token_loss(model, batch).backward()
        expected = [gradient.clone() for gradient in gradients(model)]
        model.zero_grad()
        window = [{name: rows[start : start + 2] for name, rows in batch.items()} for start in range(0, 8, 2)]
        total = sum(valid_targets(micro_batch) for micro_batch in window)
        for micro_batch in window:
            share = valid_targets(micro_batch) / total
            assert share == token_weights(micro_batch, window) == token_weights(micro_batch, batch)
            if share > 0:
                (token_loss(model, micro_batch) * share).backward()
        assert difference(gradients(model), expected) < 1e-14

    def test_another_ignored_target(self) -> None:
        targets = torch.tensor([[1, 0, 0], [2, 3, 0]])
        assert valid_targets(targets, ignore_index=0) == 3
        assert token_weights(targets[:1], targets, ignore_index=0) == pytest.approx(1 / 3)

    def test_bad_input_gets_a_sentence(self) -> None:
        with pytest.raises(ProblemError, match="no valid target at all"):
            token_weights(torch.tensor([-100]), torch.tensor([-100, -100]))
        with pytest.raises(ProblemError, match="no integer targets"):
            valid_targets((torch.randn(3),))


NORMS = (
    (nn.BatchNorm1d(8), (16, 8)),
    (nn.BatchNorm1d(8), (16, 8, 5)),
    (nn.BatchNorm2d(8), (16, 8, 3, 3)),
    (nn.BatchNorm3d(8), (16, 8, 2, 2, 2)),
    (nn.SyncBatchNorm(8), (16, 8, 3)),
    (nn.BatchNorm2d(8, affine=False, eps=1e-3), (16, 8, 3, 3)),
)


class Ended(nn.Module):
    """A network whose only BatchNorm is `norm`, with a linear layer around it."""

    def __init__(self, norm: nn.Module, *shape: int) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(torch.Size(shape[1:]).numel(), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x).tanh().flatten(1))


def trained(norm: nn.Module, shape: tuple[int, ...]) -> tuple[Ended, torch.Tensor]:
    """A network with statistics, scale and shift of its own, and a batch for it."""
    torch.manual_seed(0)
    model = Ended(copy.deepcopy(norm), *shape)
    layer, x = model.norm, torch.randn(shape)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    layer.num_batches_tracked.fill_(7)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return model, x


class TestConvertBatchNorm:
    @pytest.mark.parametrize(("norm", "shape"), NORMS)
    @pytest.mark.parametrize("to", ["group", "frozen"])
    def test_makes_every_kind_equivalent(self, norm: nn.Module, shape: tuple[int, ...], to: Any) -> None:
        model, x = trained(norm, shape)
        batch = x, torch.randint(4, (len(x),))
        if not isinstance(norm, nn.SyncBatchNorm):  # which refuses to train on a CPU
            assert gaverify.verify(model, cross_entropy, batch, diagnose=False).outcome is Outcome.DIVERGENT
        converted = convert_batch_norm(model, to)
        assert gaverify.verify(converted, cross_entropy, batch).outcome is Outcome.EQUIVALENT

    @pytest.mark.parametrize(("norm", "shape"), NORMS)
    def test_frozen_keeps_the_function_of_eval_mode(self, norm: nn.Module, shape: tuple[int, ...]) -> None:
        model, x = trained(norm, shape)
        frozen = convert_batch_norm(model, "frozen")
        assert torch.equal(frozen.train()(x), model.eval()(x))
        assert frozen.state_dict().keys() == model.state_dict().keys()
        frozen.load_state_dict(model.state_dict())

    @pytest.mark.parametrize(("norm", "shape"), NORMS)
    def test_group_norm_takes_over_what_it_can(self, norm: nn.Module, shape: tuple[int, ...]) -> None:
        model, x = trained(norm, shape)
        converted = convert_batch_norm(model, "group").norm
        assert isinstance(converted, nn.GroupNorm)
        assert (converted.num_groups, converted.eps, converted.affine) == (2, norm.eps, norm.affine)
        one, other = converted(x), converted(x[:3])
        assert torch.allclose(one[:3], other), "a sample does not depend on the others"
        if norm.affine:
            assert torch.equal(converted.weight, model.norm.weight) and torch.equal(converted.bias, model.norm.bias)

    def test_the_model_itself_stays_as_it_is(self) -> None:
        model, _ = trained(*NORMS[0])
        before = copy.deepcopy(model.state_dict())
        converted = convert_batch_norm(model)
        assert type(model.norm) is nn.BatchNorm1d
        with torch.no_grad():
            converted.norm.weight.zero_()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    @pytest.mark.parametrize("to", ["group", "frozen"])
    def test_in_place_keeps_the_parameters(self, to: Any) -> None:
        model, _ = trained(*NORMS[0])
        parameters = list(model.parameters())
        assert convert_batch_norm(model, to, in_place=True) is model
        assert not isinstance(model.norm, nn.BatchNorm1d)
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]

    def test_a_shared_layer_stays_shared(self) -> None:
        norm = nn.BatchNorm1d(8)
        model = nn.Sequential(norm, nn.ReLU(), nn.Sequential(nn.Linear(8, 8), norm))
        converted = convert_batch_norm(model)
        assert isinstance(converted[0], nn.GroupNorm) and converted[0] is converted[2][1]

    def test_a_layer_alone(self) -> None:
        assert isinstance(convert_batch_norm(nn.BatchNorm1d(8)), nn.GroupNorm)
        with pytest.raises(ProblemError, match="is a BatchNorm itself"):
            convert_batch_norm(nn.BatchNorm1d(8), in_place=True)

    def test_mode_dtype_and_frozen_parameters_stay(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(8).double()).eval().requires_grad_(False)
        for converted in (convert_batch_norm(model), convert_batch_norm(model, to="group", groups=4)):
            assert not converted[0].training
            assert converted[0].weight.dtype is torch.float64 and not converted[0].weight.requires_grad

    @pytest.mark.parametrize(("channels", "groups"), [(1, 1), (2, 1), (3, 1), (6, 1), (8, 2), (24, 6), (256, 32)])
    def test_groups_of_several_channels(self, channels: int, groups: int) -> None:
        assert convert_batch_norm(nn.BatchNorm1d(channels)).num_groups == groups

    def test_statistics_that_were_never_trained_are_worth_a_warning(self) -> None:
        with pytest.warns(UserWarning, match="`0` first"):
            frozen = convert_batch_norm(nn.Sequential(nn.BatchNorm1d(8)), "frozen")
        assert isinstance(frozen[0], FrozenBatchNorm)

    def test_what_cannot_be_converted_is_named_and_nothing_is_changed(self) -> None:
        class Activated(nn.BatchNorm1d):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).relu()

        model = nn.Sequential(nn.BatchNorm1d(8), Activated(8), nn.LazyBatchNorm1d(), nn.BatchNorm1d(6))
        with pytest.raises(ProblemError) as caught:
            convert_batch_norm(model, "group", groups=4, in_place=True)
        lines = str(caught.value).splitlines()
        assert len(lines) == 3
        for line, part in zip(lines, ("`1` (Activated)", "is lazy", "6 channels"), strict=True):
            assert part in line
        assert type(model[0]) is nn.BatchNorm1d
        with pytest.raises(ProblemError, match="keeps no running statistics"):
            convert_batch_norm(nn.BatchNorm1d(8, track_running_stats=False), "frozen")
        with pytest.raises(ProblemError, match="unknown target 'layer'"):
            convert_batch_norm(model, "layer")  # type: ignore[arg-type]
