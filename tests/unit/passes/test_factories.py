"""Under `torch.set_default_device("cuda")` a factory that names no device makes its tensor there.

Scripts set it, and gaverify runs inside: every tensor of its own says where it belongs.
"""

import ast
from pathlib import Path

import pytest

import gaverify

FACTORIES = {
    "tensor",
    "as_tensor",
    "asarray",
    "zeros",
    "ones",
    "empty",
    "full",
    "eye",
    "arange",
    "linspace",
    "logspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "empty_strided",
    "tril_indices",
    "triu_indices",
    "complex",
    "sparse_coo_tensor",
    "hann_window",
    "scalar_tensor",
    "from_file",
}


def unplaced(source: str) -> list[str]:
    """The factory calls of a module that name no device, as "line: call"."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"{call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3)", 1),
        ("torch.zeros(3, device=d)", 0),
        ("f(torch.tensor([1.0], dtype=t))", 1),
        ("torch.zeros_like(x); x.new_zeros(3); other.zeros(3)", 0),
    ],
)
def test_unplaced_factories_are_found(source: str, found: int) -> None:
    assert len(unplaced(source)) == found


def test_every_factory_names_its_device() -> None:
    """But those of problems that are made up: built-in models, and the batches of models that come without one."""
    root = Path(gaverify.__file__).parent
    paths = [path for path in sorted(root.rglob("*.py")) if not {"zoo", "loading"} & set(path.relative_to(root).parts)]
    found = [f"{path.relative_to(root)}:{call}" for path in paths for call in unplaced(path.read_text())]
    assert found == []
