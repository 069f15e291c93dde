"""What `gaverify init` finds out about a model that it is to write a factory for.

What the file says comes first (how it builds the class, with what it calls the model), then what names, annotations and
layers suggest. What is proposed has been run once: the constructor, the forward and the loss, as they will be written.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gaverify.errors import ProblemError, kind_of_value
from gaverify.loading.importing import import_factory
from gaverify.loading.texts import parsed
from gaverify.passes.isolation import isolated_generators, mode_set

_TARGETS = ("targets", "labels", "target", "label", "y")
"""Names of parameters by which a forward is given what it computes its own loss from."""
_GUESSES = {"vocab": 100, "class": 10, "out": 10, "head": 2, "layer": 2, "depth": 2, "block": 64, "context": 64, "": 16}
"""A part of a constructor's parameter, and a size that suits what it means."""
_MAKERS = ("randn", "rand", "randint", "zeros", "ones")
_TRIES = 64
"""Forward passes that are tried at most."""
_ROWS = 4


@dataclass(frozen=True)
class Sketch:
    """What a factory's text says of a model.

    Args:
        steps: Whether it has a `training_step`.
        arguments: What its constructor needs, as written in a call.
        names: Further names of the class's module that the arguments need.
        inputs: A Python expression for a batch of `batch_size` inputs; a tuple where there are several.
        several: Whether the forward takes several.
        loss: A Python expression for the loss, of `model`, `inputs` and `targets`.
        targets: A Python expression for targets that fit.
        tried: Whether all of this ran; else it is a guess.
        guessed: Whether the constructor's arguments are sizes that nothing says.
    """

    steps: bool = False
    arguments: str = ""
    names: tuple[str, ...] = ()
    inputs: str = "torch.randn(batch_size, 16)"
    several: bool = False
    loss: str = "F.cross_entropy(model(inputs), targets)"
    targets: str = "torch.randint(10, (batch_size,))"
    tried: bool = False
    guessed: bool = False


def sketch(name: str) -> Sketch | None:
    """Returns what is known of the class that `name` stands for, or None where that is a factory already.

    Raises:
        SpecError: No such module, file or attribute.
        ProblemError: It is neither a class of modules nor a function.
    """
    found = import_factory(name)
    if not inspect.isclass(found):
        if callable(found) and not isinstance(found, nn.Module):
            return None
        raise ProblemError(f"`{name}` is {kind_of_value(found)}; name a class or a function that returns it")
    if not issubclass(found, nn.Module):
        raise ProblemError(f"`{name}` is a class, but not of torch.nn.Module; name the model's class")
    text = _Text(found)
    best = Sketch(arguments=", ".join(f"{parameter.name}=..." for parameter in _needed(found)))
    for arguments, said in text.arguments():
        try:
            with isolated_generators():
                model = eval(f"made({arguments})", {**text.scope, "made": found})
                drawn = _tried(model, text)
        except Exception:  # it wants something else; its owner writes it where nothing else does
            continue
        if drawn.tried or (said and "..." in best.arguments):
            used = {node.id for node in ast.walk(ast.parse(f"made({arguments})")) if isinstance(node, ast.Name)}
            best = replace(drawn, arguments=arguments, names=tuple(sorted(used - {"made"})), guessed=not said)
        if drawn.tried:
            break
    return replace(best, steps=callable(getattr(found, "training_step", None)))


def tensors_of(path: str) -> list[str]:
    """Returns a line for each tensor of a checkpoint, at most ten; none where torch cannot read it safely."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return []
    found = list(_tensors(saved, ""))
    more = [f"… and {len(found) - 10} more"] if len(found) > 10 else []
    return [f"{name}: {list(tensor.shape)}" for name, tensor in found[:10]] + more


def _tensors(node: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        return [(name, node)]
    if isinstance(node, dict):
        return [pair for key, value in node.items() for pair in _tensors(value, f"{name}.{key}".lstrip("."))]
    return []


class _Text:
    """What the file of a class says of it."""

    def __init__(self, made: type[nn.Module]) -> None:
        self._made = made
        module = sys.modules[made.__module__]
        self.scope = dict(vars(module))
        self._nodes = list(ast.walk(parsed(Path(getattr(module, "__file__", None) or ""))))

    def arguments(self) -> Iterator[tuple[str, bool]]:
        """Yields what the class may be called with, and whether the file (or the lack of a need) says so."""
        needed = _needed(self._made)
        if not needed:
            yield "", True
        for call in self._calls():
            words = [ast.unparse(word) for word in (*call.args, *call.keywords)]
            if all(self._is_plain(word) for word in (*call.args, *call.keywords)):
                yield ", ".join(words), True
        if needed:
            yield ", ".join(f"{parameter.name}={self._guess(parameter)}" for parameter in needed), False

    def fed(self, at: int) -> Iterator[str]:
        """Yields tensors that the file makes for an argument of the model, with `batch_size` rows."""
        values = [
            node for node in self._nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        models = {ast.unparse(node.targets[0]) for node in values if node.value in self._calls()}
        for node in self._nodes:
            if isinstance(node, ast.Call) and (ast.unparse(node.func) in models or node.func in self._calls()):
                given = node.args[at] if at < len(node.args) else None
                named = [
                    value.value for value in values if given and ast.unparse(value.targets[0]) == ast.unparse(given)
                ]
                for maker in (given, *named):
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
        return all(name in self.scope for name in names) and all(inspect.isclass(made) for made in called)

    def _guess(self, parameter: inspect.Parameter) -> str:
        kind: Any = parameter.annotation
        kind = self.scope.get(kind, kind) if isinstance(kind, str) else kind
        if kind in ("bool", bool):
            return "False"
        if kind in ("float", float):
            return "0.1"
        name = getattr(kind, "__name__", "")
        if inspect.isclass(kind) and self.scope.get(name) is kind:
            return f"{name}()"
        return str(next(size for part, size in _GUESSES.items() if part in parameter.name))

    def _with_rows(self, maker: ast.Call) -> str:
        """The text of a tensor's maker with another number of rows, and constants of the module as numbers."""
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


def _needed(made: Any) -> list[inspect.Parameter]:
    """The parameters that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(made).parameters.values()
    return [parameter for parameter in parameters if parameter.default is parameter.empty and parameter.kind in kinds]


def _tried(model: nn.Module, text: _Text) -> Sketch:
    """Runs forward and loss on what the text, the names and the layers suggest, until they run."""
    parameters = list(inspect.signature(model.forward).parameters)
    own = next((name for name in parameters if name in _TARGETS and len(parameters) > 1), None)
    names = [parameter.name for parameter in _needed(model.forward) if parameter.name != own]
    choices = [[*text.fed(at), *_inputs(model, name)] for at, name in enumerate(names)]
    for inputs in islice(product(*choices), _TRIES):
        written = inputs[0] if len(inputs) == 1 else f"({', '.join(inputs)})"
        call = "*inputs" if len(inputs) > 1 else "inputs"
        for loss, targets in _losses(model, written, call, own):
            return Sketch(inputs=written, several=len(inputs) > 1, loss=loss, targets=targets, tried=True)
    return Sketch()


def _losses(model: nn.Module, inputs: str, call: str, own: str | None) -> Iterator[tuple[str, str]]:
    """Yields the losses that run on inputs, with their targets: the model's own, then those of torch."""
    given = _run(inputs, None)
    words = given[0] if isinstance(given, tuple) else given
    if words is None:
        return
    if own is not None:
        like = [] if words.is_floating_point() else [f"torch.randint(2, {_sizes(words.shape[1:])})"]
        for targets in (*like, "torch.randint(2, (batch_size,))", f"torch.randn{_sizes(words.shape[1:])}"):
            for part, tensor in _parts(_run(f"model({call}, {own}=targets)", model, inputs, targets)):
                if tensor.dim() == 0 and tensor.is_floating_point():
                    yield f"model({call}, {own}=targets){part}", targets
    for part, tensor in _parts(_run(f"model({call})", model, inputs)):
        if tensor.dim() and tensor.shape[0] == _ROWS:
            loss, targets = _criterion(f"model({call}){part}", tensor, words)
            if _run(loss, model, inputs, targets) is not None:
                yield loss, targets


def _criterion(output: str, found: torch.Tensor, words: torch.Tensor) -> tuple[str, str]:
    """A loss of `torch.nn.functional` for what a forward returns, and targets for it."""
    if found.dim() == 2 and found.shape[1] > 1:
        return f"F.cross_entropy({output}, targets)", f"torch.randint({found.shape[1]}, (batch_size,))"
    if found.dim() == 3 and not words.is_floating_point() and found.shape[:2] == words.shape:
        targets = f"torch.randint({found.shape[2]}, {_sizes(words.shape[1:])})"
        return f"F.cross_entropy({output}.flatten(0, 1), targets.flatten())", targets
    return f"F.mse_loss({output}, targets)", f"torch.randn{_sizes(found.shape[1:])}"


def _run(expression: str, model: nn.Module | None, *at: str) -> Any:
    """Returns what an expression of a factory gives in eval mode, with its inputs and targets; None where it raises."""
    scope = {"torch": torch, "F": F, "batch_size": _ROWS, "model": model}
    try:
        with mode_set([] if model is None else [model], "eval"), torch.no_grad():
            scope |= dict(zip(("inputs", "targets"), (eval(text, dict(scope)) for text in at), strict=False))
            return eval(expression, scope)
    except Exception:
        return None


def _parts(output: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in what a forward returns, each with how it is taken out, logits first."""
    if isinstance(output, torch.Tensor):
        return [("", output)]
    if isinstance(output, Mapping):
        parts = [(f"[{key!r}]".replace("'", '"'), value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        parts = [(f"[{at}]", value) for at, value in enumerate(output)]
    else:
        parts = [(f".{name}", value) for name, value in getattr(output, "__dict__", {}).items()]
    tensors = [(part, value) for part, value in parts if isinstance(value, torch.Tensor)]
    return sorted(tensors, key=lambda pair: "logits" not in pair[0])


def _sizes(shape: tuple[int, ...]) -> str:
    return f"({', '.join(('batch_size', *map(str, shape)))}{'' if shape else ','})"


def _inputs(model: nn.Module, name: str) -> list[str]:
    """Tensors that a parameter of the forward may be for: what its name says, then what the layers take."""
    found = []
    if "mask" in name:
        found = [f"torch.ones({_sizes((16,))[1:-1]}, dtype=torch.{kind})" for kind in ("bool", "long")]
    elif "len" in name:
        found = ["torch.full((batch_size,), 16)"]
    layers = [layer for layer in model.modules() if next(layer.children(), None) is None]
    vocabularies = [layer.num_embeddings for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    for layer in layers:
        if next(layer.parameters(recurse=False), None) is not None:
            found += _taken(layer, min(vocabularies, default=0))
    return list(dict.fromkeys(found))


def _taken(layer: Any, vocabulary: int) -> list[str]:
    """What a layer takes, by attributes whose names the layers of `torch.nn` share."""
    if hasattr(layer, "num_embeddings"):
        return [f"torch.randint({vocabulary}, {_sizes(shape)})" for shape in ((16,), ())]
    if hasattr(layer, "in_channels"):
        shapes = {1: (64,), 2: (32, 32), 3: (8, 16, 16)}
        return [f"torch.randn{_sizes((layer.in_channels, *shapes[layer.weight.dim() - 2]))}"]
    if hasattr(layer, "input_size"):
        return [f"torch.randn{_sizes((16, layer.input_size))}"]
    if hasattr(layer, "in_features"):
        return [f"torch.randn{_sizes(shape)}" for shape in ((layer.in_features,), (16, layer.in_features))]
    return []
