"""Reads the file of a model's class, for the factory that `gaverify init` writes; nothing of it is run."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gaverify.errors import ProblemError, kind_of_value
from gaverify.loading.importing import import_factory, parse_file

_MAKERS = ("randn", "rand", "randint", "zeros", "ones")


@dataclass(frozen=True)
class Sketch:
    """A model as a factory's text describes it.

    Args:
        has_training_step: Whether it says itself what its loss is.
        arguments: The arguments of its constructor, or its parameters where no call is found.
        arguments_are_said: Whether the file says the arguments, or none are needed.
        names: Further names of the class's module that the arguments need.
        inputs: The tensors of `batch_size` rows that the file calls the model with; empty where none are found.
    """

    has_training_step: bool
    arguments: str
    arguments_are_said: bool
    names: tuple[str, ...]
    inputs: tuple[str, ...]


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
    text, needed = _Text(named), _needed_parameters(named)
    calls = {call: text.find_inputs(call) for call in text.find_calls(without_arguments=not needed)}
    # a call whose object is given tensors says more than one that comes before it
    call = next((call for call, inputs in calls.items() if inputs), next(iter(calls), None))
    arguments = [] if call is None else [*call.args, *call.keywords]
    are_said = call is not None or not needed
    written = ", ".join(map(ast.unparse, arguments) if are_said else (f"{parameter}=..." for parameter in needed))
    names = {node.id for word in arguments for node in ast.walk(word) if isinstance(node, ast.Name)}
    has_step = callable(getattr(named, "training_step", None))
    return Sketch(has_step, written, are_said, tuple(sorted(names)), () if call is None else calls[call])


def _needed_parameters(function: Any) -> list[str]:
    """The names of the parameters that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind in kinds]


def _walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes whose names mean what the names of a module or function do: not those of functions inside it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _walk_scope(node)


class _Text:
    """The text of the file that defines a class."""

    def __init__(self, made: type[nn.Module]) -> None:
        module = sys.modules[made.__module__]
        self._scope = vars(module)
        tree = parse_file(Path(getattr(module, "__file__", None) or ""))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._scopes = [list(_walk_scope(scope)) for scope in (tree, *functions)]
        called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._calls = [node for node in called if ast.unparse(node.func).rpartition(".")[2] == made.__name__]

    def find_calls(self, *, without_arguments: bool) -> Iterator[ast.Call]:
        """Yields the calls of the class that can be written elsewhere; `without_arguments`: those that have none."""
        for call in self._calls:
            words: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
            if all(map(self._is_plain, words)) and not (words and without_arguments):
                yield call

    def find_inputs(self, made: ast.Call) -> tuple[str, ...]:
        """Returns the tensors with which the function around a call of the class calls what it made; empty for none."""
        scope = next((nodes for nodes in self._scopes if made in nodes), [])
        assigned = [node for node in scope if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
        models = {ast.unparse(node.targets[0]) for node in assigned if node.value is made}
        for node in scope:
            if isinstance(node, ast.Call) and (node.func is made or ast.unparse(node.func) in models):
                tensors = [self._with_rows(self._find_maker(argument, assigned)) for argument in node.args]
                if tensors and all(tensors) and not node.keywords:
                    return tuple(tensors)
        return ()

    def _find_maker(self, argument: ast.expr, assigned: Sequence[ast.Assign]) -> ast.Call | None:
        """The call of torch that makes an argument, also where the argument is a name that it is assigned to."""
        name = ast.unparse(argument)
        values = [argument, *(node.value for node in assigned if ast.unparse(node.targets[0]) == name)]
        makers = {f"torch.{word}" for word in _MAKERS}
        return next((each for each in values if isinstance(each, ast.Call) and ast.unparse(each.func) in makers), None)

    def _is_plain(self, word: ast.AST) -> bool:
        """Whether an argument stands for itself: numbers, names of the module, objects of its classes."""
        nodes = list(ast.walk(word))
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        called = [self._scope.get(ast.unparse(node.func)) for node in nodes if isinstance(node, ast.Call)]
        return all(name in self._scope for name in names) and all(inspect.isclass(callee) for callee in called)

    def _with_rows(self, maker: ast.Call | None) -> str:
        """The text of a tensor's maker with another number of rows, and constants of the module as numbers.

        It is empty where the text needs further names, or does not tell which number is that of the rows.
        """
        if maker is None:
            return ""
        # A copy: the nodes of the file are read again for other arguments.
        copied = ast.parse(ast.unparse(maker), mode="eval").body
        assert isinstance(copied, ast.Call)
        shapes = [*copied.args, *(word.value for word in copied.keywords if word.arg == "size")]
        shape = next((each.elts for each in shapes if isinstance(each, ast.Tuple | ast.List)), copied.args)
        if shape is copied.args and len(shape) < 2:  # a name may stand for a whole shape
            return ""
        shape[0] = ast.Name("batch_size")
        for node in ast.walk(copied):
            for _, value in ast.iter_fields(node):
                for at, part in enumerate(value if isinstance(value, list) else []):
                    number = self._scope.get(part.id) if isinstance(part, ast.Name) else None
                    if isinstance(number, int):
                        value[at] = ast.Constant(number)
        needed = {node.id for node in ast.walk(copied) if isinstance(node, ast.Name)}
        return ast.unparse(copied) if needed <= {"torch", "batch_size"} else ""
