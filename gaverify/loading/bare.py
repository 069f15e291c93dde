"""Makes a problem of a bare module: a batch that fits its input and a named loss of `torch.nn.functional`.

Shapes: B samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gaverify.errors import ProblemError
from gaverify.loading.importing import described
from gaverify.loading.targets import Target, find_loss
from gaverify.passes.isolation import eager_when_compiled, mode_set
from gaverify.passes.problem import Problem

DEFAULT_BATCH_SIZE = 8


class NamedLoss:
    """The loss of a (micro-)batch (inputs, targets) under a function of `torch.nn.functional`."""

    def __init__(self, function: Callable[..., torch.Tensor], classes_last: bool) -> None:
        self.function, self.classes_last = function, classes_last

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns the loss of exactly that (micro-)batch."""
        inputs, targets = batch
        output = first_tensor(model(inputs))
        if output is None:
            raise ProblemError("the model's forward returned no tensor, tuple of tensors or object with `.logits`")
        return self.function(output.movedim(-1, 1) if self.classes_last else output, targets)


def bare_problem(
    model: nn.Module,
    name: str,
    input_shape: tuple[int, ...] | None,
    loss: str | None,
    classes: int | None,
    batch_size: int,
) -> Problem:
    """Returns the problem of a module on generated inputs and targets.

    The module's forward is called once, in eval mode and on a copy where one can be made, to learn its output's shape.

    Args:
        model: The module; a first layer that looks up embeddings gets integers, any other normal numbers.
        name: How messages call it.
        input_shape: Of one sample.
        loss: A function of `torch.nn.functional` that takes (input, target).
        classes: Number of classes, checked against the output.
        batch_size: B.

    Raises:
        ProblemError: The shape or the loss is not given, or they do not fit the module.
        SpecError: There is no such loss.
    """
    missing = [option for option, value in (("--input-shape", input_shape), ("--loss", loss)) if value is None]
    if missing:
        raise ProblemError(
            f"`{name}` returned a bare {type(model).__name__}, which needs {' and '.join(missing)} as well "
            "(such as `--input-shape 3,32,32 --loss cross_entropy --classes 10`); or return a gaverify.Problem"
        )
    assert input_shape is not None and loss is not None  # what `missing` says, for mypy
    kind = find_loss(loss)
    inputs = _inputs(model, (batch_size, *input_shape))
    output = _output(model, name, inputs)
    target = Target(loss, output, classes, tokens=inputs.shape if not inputs.is_floating_point() else None)
    targets = kind.targets(target).to(output.device)
    function = NamedLoss(kind.function, target.classes_last)
    _try(function, name, loss, output, targets)
    return Problem(model, function, (inputs, targets), batch_size=batch_size)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Returns the tensor that a loss is for: the output, its `.logits`, or the first tensor in it."""
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    if isinstance(output, Mapping):
        entries = [output["logits"]] if "logits" in output else list(output.values())
    else:
        entries = list(output) if isinstance(output, tuple | list) else list(getattr(output, "__dict__", {}).values())
    return next((entry for entry in entries if isinstance(entry, torch.Tensor)), None)


def _inputs(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """Integers below the vocabulary for a model that starts with an embedding, else normal numbers of its precision."""
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    device = parameters[0].device if parameters else torch.device("cpu")
    layers = [layer for layer in model.modules() if next(layer.children(), None) is None]
    first = next((layer for layer in layers if next(layer.parameters(recurse=False), None) is not None), None)
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        return torch.randint(first.num_embeddings, shape).to(device)
    return torch.randn(shape).to(device, parameters[0].dtype if parameters else torch.float32)


def _output(model: nn.Module, name: str, inputs: torch.Tensor) -> torch.Tensor:
    lazy = any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))
    # lazy layers take their shapes from this very call; anything else must not notice it
    tried = model if lazy else _copied(model)
    try:
        with mode_set([tried], "eval"), eager_when_compiled([tried]), torch.no_grad():
            returned = tried(inputs.clone())
    except (Exception, SystemExit) as error:
        raise ProblemError(
            f"`{name}`: its forward on inputs of shape {list(inputs.shape)} raised {described(error)}; "
            "--input-shape is the shape of one sample, without the batch"
        ) from error
    output = first_tensor(returned)
    if output is None:
        raise ProblemError(
            f"`{name}`: its forward returned a {type(returned).__name__} without a tensor; "
            "return a gaverify.Problem with a loss that knows what to do with it"
        )
    if output.dim() == 0 or output.shape[0] != inputs.shape[0]:
        raise ProblemError(
            f"`{name}`: its output has shape {list(output.shape)} for {inputs.shape[0]} samples; "
            "the first dimension has to be the batch, or return a gaverify.Problem"
        )
    return output


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception:  # some modules hold what cannot be copied; they see one forward more
        return model


def _try(loss: NamedLoss, name: str, word: str, output: torch.Tensor, targets: torch.Tensor) -> None:
    """Calls the loss once on what the forward returned, so that a misfit is told in terms of the options."""
    shaped = output.movedim(-1, 1) if loss.classes_last else output
    try:
        loss.function(shaped, targets)
    except Exception as error:
        hint = "; --loss binary_cross_entropy_with_logits takes any numbers" if word == "binary_cross_entropy" else ""
        raise ProblemError(
            f"--loss {word} does not take the output of `{name}`, shape {list(output.shape)}: {described(error)}{hint}"
        ) from error
