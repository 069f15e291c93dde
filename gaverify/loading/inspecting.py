"""What `gaverify init` finds out about a model that it is to write a factory for.

What the file says comes first (how it builds the class, with what it calls the model), then what is guessed. What is
proposed has been run once: the constructor, the forward and the loss, as they will be written.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gaverify.errors import ProblemError, kind_of_value
from gaverify.loading.guessing import Guess, guess_batch_and_loss, needed_parameters
from gaverify.loading.importing import import_factory
from gaverify.loading.texts import parse_file
from gaverify.passes.isolation import isolated_generators

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
