import ast
from pathlib import Path

import torch

import gaverify
from gaverify.passes.modes import FunctionMode, OperationMode, operation_name


def test_every_operation_goes_through_the_handler_also_in_the_backward():
    names = []

    def handle(func, args, kwargs):
        names.append(operation_name(func))
        return func(*args, **kwargs)

    x = torch.ones(3, requires_grad=True)
    with OperationMode(handle):
        x.exp().sum().backward()
    assert names[0] == "exp" and "sum" in names
    assert "mul" in names[names.index("sum") :]  # the derivative of exp
    names.clear()
    x.exp()
    assert names == []


def test_the_caller_gets_what_the_handler_returns():
    instead = torch.tensor([7.0])
    with OperationMode(lambda func, args, kwargs: instead):
        result = torch.zeros(2)
    assert result.tolist() == [7.0]
    with FunctionMode(lambda func, args, kwargs: "instead"):
        assert torch.sin(instead) == "instead"


def test_a_function_mode_sees_the_outermost_call_alone():
    names = []

    def handle(func, args, kwargs):
        names.append(func.__name__)
        return func(*args, **kwargs)

    with FunctionMode(handle):
        torch.nn.functional.layer_norm(torch.ones(2, 3), (3,))
    assert names == ["ones", "layer_norm"]


def test_nobody_else_defines_a_mode():
    """Each mode costs a frame per operation and has to remember the same two traps; there is one of each kind."""
    root = Path(gaverify.__file__).parent
    found = [
        f"{path.relative_to(root)}: {node.name}"
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base).rpartition(".")[2] for base in node.bases} & {"TorchDispatchMode", "TorchFunctionMode"}
    ]
    assert found == ["passes/modes.py: OperationMode", "passes/modes.py: FunctionMode"]
