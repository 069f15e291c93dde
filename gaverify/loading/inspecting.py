"""What `gaverify init` finds out about a model, and the batch and the loss that are guessed for it.

What the file says comes first (how it builds the class, with what it calls the model), then what is guessed. What is
proposed has been run once: the constructor, the forward and the loss, as they will be written.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from gaverify.errors import ProblemError, SpecError, kind_of_value, nearest
from gaverify.loading.importing import import_factory, parse_file
from gaverify.passes.isolation import isolated_generators
from gaverify.passes.modes import mode_set

# Guesses a batch and a loss for a module: `gaverify init` writes them down, a bare module's problem is made of
# them.
#
# A guess is a Python expression of `batch_size`, `model`, `inputs` and `targets`; `init` writes what has been run.
#
# Shapes: B samples, C classes, D any further dimensions.


_OWN_TARGETS = ("targets", "labels", "target", "label", "y")
"""Names of parameters by which a forward is given what it computes its own loss from."""
_MOST_FORWARDS = 64
_ROWS = 4
"""B of the batches that are tried."""

_OTHER_ARGUMENTS = {
    "cosine_embedding_loss": "two inputs and a target",
    "ctc_loss": "lengths",
    "gaussian_nll_loss": "a variance",
    "margin_ranking_loss": "two inputs and a target",
    "triplet_margin_loss": "an anchor, a positive and a negative",
    "triplet_margin_with_distance_loss": "an anchor, a positive and a negative",
}
"""Losses that take more than an input and a target, and what."""


class Guess(NamedTuple):
    """A batch and a loss that ran.

    Args:
        inputs: An expression for `batch_size` inputs; a tuple where the forward takes several.
        several: Whether it takes several.
        loss: An expression for the loss.
        targets: An expression for targets that fit.
        inputs_are_said: Whether the file of the model says the inputs.
        loss_is_own: Whether the forward itself computes the loss.
    """

    inputs: str = "torch.randn(batch_size, 16)"
    several: bool = False
    loss: str = "F.cross_entropy(model(inputs), targets)"
    targets: str = "torch.randint(10, (batch_size,))"
    inputs_are_said: bool = False
    loss_is_own: bool = False


def guess_batch_and_loss(model: nn.Module, said_inputs: Callable[[int], Iterable[str]]) -> Guess | None:
    """Returns the first batch and loss that run; None where none of those that are tried does.

    Args:
        model: The module.
        said_inputs: Gives what the file of the model says of the argument at a place of the forward.
    """
    parameters = list(inspect.signature(model.forward).parameters)
    own_target = next((name for name in parameters if name in _OWN_TARGETS and len(parameters) > 1), None)
    names = [parameter.name for parameter in needed_parameters(model.forward) if parameter.name != own_target]
    said = [list(said_inputs(at)) for at in range(len(names))]
    choices = [[*texts, *_input_texts(model, name)] for texts, name in zip(said, names, strict=True)]
    for inputs in islice(product(*choices), _MOST_FORWARDS):
        written = inputs[0] if len(inputs) == 1 else f"({', '.join(inputs)})"
        call = "*inputs" if len(inputs) > 1 else "inputs"
        are_said = all(text in texts for text, texts in zip(inputs, said, strict=True))
        for loss, targets, is_own in _losses_that_run(model, written, call, own_target):
            return Guess(written, len(inputs) > 1, loss, targets, are_said, is_own)
    return None


def needed_parameters(function: Any) -> list[inspect.Parameter]:
    """Returns the parameters that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.default is parameter.empty and parameter.kind in kinds]


def evaluate(expression: str, batch_size: int, **names: Any) -> Any:
    """Returns the value of a guess."""
    return eval(expression, {"torch": torch, "F": F, "batch_size": batch_size, **names})


# --- Inputs ---


def first_input(model: nn.Module, shape: Sequence[int]) -> str:
    """Returns an input of this shape per sample: integers where the first layer with weights is an embedding."""
    layer = next(iter(_layers_with_weights(model)), None)
    return _input_text(shape, getattr(layer, "num_embeddings", None))


def _layers_with_weights(model: nn.Module) -> list[Any]:
    layers = [layer for layer in model.modules() if next(layer.children(), None) is None]
    return [layer for layer in layers if next(layer.parameters(recurse=False), None) is not None]


def _input_text(shape: Sequence[int], vocabulary: int | None = None) -> str:
    return f"torch.randn{_sizes(shape)}" if vocabulary is None else f"torch.randint({vocabulary}, {_sizes(shape)})"


def _sizes(shape: Sequence[int]) -> str:
    return f"({', '.join(('batch_size', *map(str, shape)))}{'' if shape else ','})"


def _vocabularies(model: nn.Module) -> list[int]:
    """Sizes of the embeddings, largest first; a table of positions is one of them, and no vocabulary."""
    layers = _layers_with_weights(model)
    return sorted({layer.num_embeddings for layer in layers if hasattr(layer, "num_embeddings")}, reverse=True)


def _input_texts(model: nn.Module, name: str) -> list[str]:
    """Tensors that a parameter of the forward may be for: what its name says, then what the layers take."""
    texts = []
    if "mask" in name:
        texts = [f"torch.ones{_sizes((16,))[:-1]}, dtype=torch.{kind})" for kind in ("bool", "long")]
    elif "len" in name:
        texts = ["torch.full((batch_size,), 16)"]
    for layer in _layers_with_weights(model):
        texts += _texts_for_layer(layer, min(_vocabularies(model), default=None))
    return list(dict.fromkeys(texts))


def _texts_for_layer(layer: Any, vocabulary: int | None) -> list[str]:
    """What a layer takes, by attributes whose names the layers of `torch.nn` share."""
    if hasattr(layer, "num_embeddings"):
        return [_input_text(shape, vocabulary) for shape in ((16,), ())]
    if hasattr(layer, "in_channels"):
        # The weight has two dimensions (channels out, channels in) beside those of the kernel.
        planes = {1: (64,), 2: (32, 32), 3: (8, 16, 16)}
        return [_input_text((layer.in_channels, *planes[layer.weight.dim() - 2]))]
    if hasattr(layer, "input_size"):
        return [_input_text((16, layer.input_size))]
    if hasattr(layer, "in_features"):
        return [_input_text(shape) for shape in ((layer.in_features,), (16, layer.in_features))]
    return []


# --- Losses, and targets for them ---


@dataclass(frozen=True)
class Output:
    """What targets have to fit.

    Args:
        loss: The name of the loss.
        tensor: What the model returned, batch first.
        classes: What `--classes` said.
        tokens: Shape of the inputs where they are integers.
    """

    loss: str
    tensor: torch.Tensor
    classes: int | None = None
    tokens: torch.Size | None = None

    @property
    def classes_last(self) -> bool:
        """Whether the classes are the last dimension, as in the (B, T, V) of a language model, and not the second."""
        shape = self.tensor.shape
        if len(shape) < 3 or self.loss not in ("cross_entropy", "nll_loss"):
            return False
        if self.classes is not None and shape[-1] != shape[1]:
            return self.classes == shape[-1]
        return self.tokens == shape[:-1]

    def checked_classes(self) -> int:
        """Returns C, the size of the output's class dimension.

        Raises:
            ProblemError: There is no such dimension, or `--classes` is another number.
        """
        shape = list(self.tensor.shape)
        if len(shape) < 2:
            raise ProblemError(f"--loss {self.loss} needs an output of shape [batch, classes, …], got {shape}")
        dimension = len(shape) - 1 if self.classes_last else 1
        if self.classes is not None and self.classes != shape[dimension]:
            raise ProblemError(
                f"--classes {self.classes}: the output of the model has shape {shape}, that is {shape[dimension]} "
                f"classes; write --classes {shape[dimension]}, or change the model's last layer"
            )
        return shape[dimension]

    def targets(self) -> str:
        """Returns an expression for random targets.

        Raises:
            ProblemError: The output, or `--classes`, does not fit the loss.
        """
        kind = find_loss(self.loss)
        if self.classes is not None and not kind.counts_classes:
            raise ProblemError(f"--classes {self.classes}: {self.loss} has no classes; leave it out")
        return kind.targets(self)


class LossKind(NamedTuple):
    """How a loss of `torch.nn.functional` is called, the targets that it takes, and whether these count classes."""

    targets: Callable[[Output], str]
    counts_classes: bool = False
    keywords: Mapping[str, str] = {}


def _like_output(output: Output) -> str:
    return f"torch.randn{_sizes(output.tensor.shape[1:])}"


def _class_indices(output: Output) -> str:
    """(B,) for an output (B, C), (B, D…) for (B, C, D…) or (B, D…, C)."""
    classes, shape = output.checked_classes(), output.tensor.shape
    return f"torch.randint({classes}, {_sizes(shape[1:-1] if output.classes_last else shape[2:])})"


def _zeros_and_ones(output: Output) -> str:
    return f"torch.randint(2, {_sizes(output.tensor.shape[1:])}).float()"


def _zeros_and_ones_per_class(output: Output) -> str:
    output.checked_classes()
    return _zeros_and_ones(output)


def _signs(output: Output) -> str:
    return f"2 * {_zeros_and_ones(output)} - 1"


def _probabilities(output: Output) -> str:
    """Distributions over the second dimension, of which `kl_div` takes the logarithms as the model's output."""
    return f"{_like_output(output)}.softmax({min(1, output.tensor.dim() - 1)})"


def _counts(output: Output) -> str:
    return f"torch.poisson(torch.ones{_sizes(output.tensor.shape[1:])})"


def _class_lists(output: Output) -> str:
    """Per sample one to C classes in any order, then −1: `multilabel_margin_loss` reads up to the first −1."""
    classes = output.checked_classes()
    order = f"torch.rand(batch_size, {classes}).argsort(dim=1)"
    return f"{order}.masked_fill(torch.arange({classes}) >= torch.randint(1, {classes + 1}, (batch_size, 1)), -1)"


_LOSSES = {
    "cross_entropy": LossKind(_class_indices, counts_classes=True),
    "nll_loss": LossKind(_class_indices, counts_classes=True),
    "multi_margin_loss": LossKind(_class_indices, counts_classes=True),
    "multilabel_margin_loss": LossKind(_class_lists, counts_classes=True),
    "multilabel_soft_margin_loss": LossKind(_zeros_and_ones_per_class, counts_classes=True),
    "mse_loss": LossKind(_like_output),
    "l1_loss": LossKind(_like_output),
    "smooth_l1_loss": LossKind(_like_output),
    "huber_loss": LossKind(_like_output),
    "binary_cross_entropy": LossKind(_zeros_and_ones),
    "binary_cross_entropy_with_logits": LossKind(_zeros_and_ones),
    # its "mean" is none, as PyTorch warns at every call
    "kl_div": LossKind(_probabilities, keywords={"reduction": "batchmean"}),
    "poisson_nll_loss": LossKind(_counts),
    "soft_margin_loss": LossKind(_signs),
    "hinge_embedding_loss": LossKind(_signs),
}


def find_loss(name: str) -> LossKind:
    """Returns the loss of that name.

    Raises:
        SpecError: There is none, or it takes more than an input and a target.
    """
    if name in _LOSSES:
        return _LOSSES[name]
    if name in _OTHER_ARGUMENTS:
        raise SpecError(
            f"`{name}` takes {_OTHER_ARGUMENTS[name]} beside the model's output; "
            "write a factory that returns a gaverify.Problem with your own `loss(model, batch)`",
            "loss",
        )
    word = name.lower().removesuffix("loss").strip("_")
    short = {loss_name.removesuffix("_loss").replace("_", ""): loss_name for loss_name in _LOSSES}
    near = nearest(word.replace("_", ""), short)
    advice = f"did you mean `{short[near]}`?" if near else f"choose one of {', '.join(_LOSSES)}"
    raise SpecError(f"torch.nn.functional has no loss function `{name}`; {advice}", "loss")


def _losses_that_run(
    model: nn.Module, inputs: str, call: str, own_target: str | None
) -> Iterator[tuple[str, str, bool]]:
    """Yields losses with their targets, and whether each is the model's own: that comes first."""
    input_value = _value_of(inputs, None)
    first = input_value[0] if isinstance(input_value, tuple) else input_value
    if first is None:
        return
    if own_target is not None:
        for targets in _targets_of_own_loss(model, first):
            for part, tensor in tensors_in(_value_of(f"model({call}, {own_target}=targets)", model, inputs, targets)):
                if tensor.dim() == 0 and tensor.is_floating_point():
                    yield f"model({call}, {own_target}=targets){part}", targets, True
    for part, tensor in tensors_in(_value_of(f"model({call})", model, inputs)):
        if tensor.dim() and tensor.shape[0] == _ROWS:
            loss, targets = _loss_for(f"model({call}){part}", tensor, first)
            if _value_of(loss, model, inputs, targets) is not None:
                yield loss, targets, False


def _targets_of_own_loss(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    """What a forward may compute its own loss from: tokens for tokens, a class per sample, numbers like the inputs."""
    sizes, tokens = _sizes(inputs.shape[1:]), list[str]()
    if not inputs.is_floating_point():
        # a head with fewer classes than words refuses the larger numbers, and 0 and 1 suit it
        tokens = [f"torch.randint({count}, {sizes})" for count in (*_vocabularies(model), 2)]
    return [*tokens, "torch.randint(2, (batch_size,))", f"torch.randn{sizes}"]


def _loss_for(written: str, tensor: torch.Tensor, inputs: torch.Tensor) -> tuple[str, str]:
    """A loss of `torch.nn.functional` for what a forward returns, and targets for it."""
    tokens = None if inputs.is_floating_point() else inputs.shape
    classified = Output("cross_entropy", tensor, tokens=tokens)
    if classified.classes_last and tensor.dim() == 3:
        return f"F.cross_entropy({written}.flatten(0, 1), targets.flatten())", classified.targets()
    # numbers in the shape of the inputs are a reconstruction rather than scores of classes
    if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.shape != inputs.shape:
        return f"F.cross_entropy({written}, targets)", classified.targets()
    return f"F.mse_loss({written}, targets)", Output("mse_loss", tensor).targets()


def _value_of(expression: str, model: nn.Module | None, *batch: str) -> Any:
    """Returns what an expression gives in eval mode, with its inputs and targets; None where it raises."""
    try:
        with mode_set([] if model is None else [model], "eval"), torch.no_grad():
            values = (evaluate(text, _ROWS, model=model) for text in batch)
            return evaluate(expression, _ROWS, model=model, **dict(zip(("inputs", "targets"), values, strict=False)))
    except Exception:
        return None


def tensors_in(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors in what a forward returns, each with how it is taken out, logits first."""
    if isinstance(output, torch.Tensor):
        return [("", output)]
    if isinstance(output, Mapping):
        parts = [(f"[{key!r}]".replace("'", '"'), value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        parts = [(f"[{at}]", value) for at, value in enumerate(output)]
    else:
        parts = [(f".{name}", value) for name, value in getattr(output, "__dict__", {}).items()]
    logits = getattr(output, "logits", None)  # also where it is a property
    parts = [(".logits", logits), *(pair for pair in parts if pair[1] is not logits)]
    tensors = [(part, value) for part, value in parts if isinstance(value, torch.Tensor)]
    return sorted(tensors, key=lambda pair: "logits" not in pair[0])


# What `gaverify init` finds out about a model that it is to write a factory for.


_SIZES = {"vocab": 100, "class": 10, "out": 10, "head": 2, "layer": 2, "depth": 2, "block": 64, "context": 64, "": 16}
"""A part of a constructor's parameter, and a size that suits what it means."""
_MAKERS = ("randn", "rand", "randint", "zeros", "ones")


@dataclass(frozen=True)
class Sketch:
    """What a factory's text says of a model.

    Args:
        has_training_step: Whether it says itself what its loss is.
        arguments: What its constructor needs, as written in a call.
        names: Further names of the class's module that the arguments need.
        arguments_are_said: Whether the file says the arguments, or none are needed.
        guess: A batch and a loss that ran; None where none did.
    """

    has_training_step: bool = False
    arguments: str = ""
    names: tuple[str, ...] = ()
    arguments_are_said: bool = False
    guess: Guess | None = None


def sketch(name: str) -> Sketch | None:
    """Returns what is known of the class that `name` stands for, or None where that is a factory already.

    Raises:
        SpecError: No such module, file or attribute.
        ProblemError: It is neither a class of modules nor a function.
    """
    named = import_factory(name)
    if not inspect.isclass(named):
        if callable(named) and not isinstance(named, nn.Module):
            return None
        raise ProblemError(f"`{name}` is {kind_of_value(named)}; name a class or a function that returns it")
    if not issubclass(named, nn.Module):
        raise ProblemError(f"`{name}` is a class, but not of torch.nn.Module; name the model's class")
    has_step = callable(getattr(named, "training_step", None))
    text = _Text(named)
    best = Sketch(has_step, ", ".join(f"{parameter.name}=..." for parameter in needed_parameters(named)))
    for arguments, are_said in text.arguments():
        try:
            with isolated_generators():
                # `made`, because the name of the class may be hidden in its module, or have a dot.
                model = eval(f"made({arguments})", {**text.scope, "made": named})
                guess = guess_batch_and_loss(model, text.tensors_for_argument)
        except Exception:  # it wants something else; its owner writes it where nothing else does
            continue
        if guess is not None or (are_said and "..." in best.arguments):
            used = {node.id for node in ast.walk(ast.parse(f"made({arguments})")) if isinstance(node, ast.Name)}
            best = Sketch(has_step, arguments, tuple(sorted(used - {"made"})), are_said, guess)
        if guess is not None:
            break
    return best


class _Text:
    """What the file of a class says of it."""

    def __init__(self, made: type[nn.Module]) -> None:
        self._made = made
        module = sys.modules[made.__module__]
        self.scope = dict(vars(module))
        self._nodes = list(ast.walk(parse_file(Path(getattr(module, "__file__", None) or ""))))

    def arguments(self) -> Iterator[tuple[str, bool]]:
        """Yields what the class may be called with, and whether the file (or the lack of a need) says so."""
        needed = needed_parameters(self._made)
        if not needed:
            yield "", True
        # What the file itself calls the class with is better than any guess.
        for call in self._calls():
            words = [ast.unparse(word) for word in (*call.args, *call.keywords)]
            if all(self._is_plain(word) for word in (*call.args, *call.keywords)):
                yield ", ".join(words), True
        if needed:
            yield ", ".join(f"{parameter.name}={self._size_of(parameter)}" for parameter in needed), False

    def tensors_for_argument(self, at: int) -> Iterator[str]:
        """Yields tensors that the file makes for an argument of the model, with `batch_size` rows."""
        values = [
            node for node in self._nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        models = {ast.unparse(node.targets[0]) for node in values if node.value in self._calls()}
        for node in self._nodes:
            if isinstance(node, ast.Call) and (ast.unparse(node.func) in models or node.func in self._calls()):
                argument = node.args[at] if at < len(node.args) else None
                named = [
                    value.value
                    for value in values
                    if argument and ast.unparse(value.targets[0]) == ast.unparse(argument)
                ]
                for maker in (argument, *named):
                    if isinstance(maker, ast.Call) and ast.unparse(maker.func) in {f"torch.{word}" for word in _MAKERS}:
                        yield self._with_rows(maker)

    def _calls(self) -> list[ast.Call]:
        """The calls of the class."""
        return [
            node
            for node in self._nodes
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == self._made.__name__
        ]

    def _is_plain(self, word: ast.AST) -> bool:
        """Whether an argument stands for itself: numbers, names of the module, objects of its classes; nothing runs."""
        nodes = list(ast.walk(word))
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        called = [self.scope.get(ast.unparse(node.func)) for node in nodes if isinstance(node, ast.Call)]
        return all(name in self.scope for name in names) and all(inspect.isclass(callee) for callee in called)

    def _size_of(self, parameter: inspect.Parameter) -> str:
        kind: Any = parameter.annotation
        kind = self.scope.get(kind, kind) if isinstance(kind, str) else kind
        if kind in ("bool", bool):
            return "False"
        if kind in ("float", float):
            return "0.1"
        name = getattr(kind, "__name__", "")
        if inspect.isclass(kind) and self.scope.get(name) is kind:
            return f"{name}()"
        return str(next(size for part, size in _SIZES.items() if part in parameter.name))

    def _with_rows(self, maker: ast.Call) -> str:
        """The text of a tensor's maker with another number of rows, and constants of the module as numbers."""
        # A copy: the nodes of the file are read again for other arguments.
        copied = ast.parse(ast.unparse(maker), mode="eval").body
        assert isinstance(copied, ast.Call)
        sizes: list[ast.expr] = copied.args
        first = next((size for size in sizes if isinstance(size, ast.Tuple | ast.List)), None)
        (first.elts if first else sizes)[0] = ast.Name("batch_size")
        for node in ast.walk(copied):
            for _, value in ast.iter_fields(node):
                for at, part in enumerate(value if isinstance(value, list) else []):
                    number = self.scope.get(part.id) if isinstance(part, ast.Name) else None
                    if isinstance(number, int):
                        value[at] = ast.Constant(number)
        return ast.unparse(copied)
