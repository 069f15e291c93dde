"""What a backward pass reaches: parameters, or only inputs and weights that a call was given."""

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gaverify.audit.recording.graph import ends_in_parameters
from gaverify.audit.recording.names import Names


class TestEndsInParameters:
    def test_a_loss_of_the_model_does(self) -> None:
        assert ends_in_parameters(nn.Linear(2, 1)(torch.ones(3, 2, device="cpu")).sum())

    def test_one_that_counts_nothing_does_too(self) -> None:
        assert ends_in_parameters([nn.Linear(2, 1)(torch.ones(3, 2, device="cpu")).sum() * 0.0])

    def test_a_parameter_itself_does(self) -> None:
        assert ends_in_parameters((nn.Parameter(torch.ones((), device="cpu")),))

    def test_weights_that_a_call_was_given_do_not(self) -> None:
        model = nn.Linear(2, 1)
        weights = {name: weight.detach().requires_grad_() for name, weight in model.named_parameters()}
        assert not ends_in_parameters(functional_call(model, weights, (torch.ones(3, 2, device="cpu"),)).sum())

    def test_weights_made_of_parameters_do(self) -> None:
        model = nn.Linear(2, 1)
        weights = {name: weight - 0.1 for name, weight in model.named_parameters()}
        assert ends_in_parameters(functional_call(model, weights, (torch.ones(3, 2, device="cpu"),)).sum())

    def test_inputs_do_not(self) -> None:
        model = nn.Linear(2, 1).requires_grad_(False)
        assert not ends_in_parameters(model(torch.ones(3, 2, device="cpu", requires_grad=True)).sum())

    def test_a_function_that_hides_parameters_counts_as_one_that_does(self) -> None:
        inputs = torch.ones(3, 2, device="cpu", requires_grad=True)
        assert ends_in_parameters(checkpoint(nn.Linear(2, 1), inputs, use_reentrant=True).sum())


class TestNames:
    def test_a_call_with_other_weights_leaves_the_names_to_the_model_itself(self) -> None:
        names, model, found = Names(), nn.Linear(2, 1), []

        class Noted(nn.Module):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                found.append(names.add(self))
                return inputs

        outer = Noted()
        outer.inner = model
        weights = {name: weight.detach().clone() for name, weight in outer.named_parameters()}
        weights = {name: weight.requires_grad_() for name, weight in weights.items()}
        functional_call(outer, weights, (torch.ones(1, 2, device="cpu"),))
        outer(torch.ones(1, 2, device="cpu"))
        assert found == [True, True]
        assert names.models == [outer]
        assert names.key(model.weight, 0, 0) == "0:inner.weight"
