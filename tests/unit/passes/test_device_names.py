"""No accelerator is asked for by its name where any device is meant: XPU and MPS run the same code."""

import ast
from pathlib import Path

import pytest
import torch

import gaverify

# Where a name is part of torch's own switches, of a released document, or of the list of kinds.
NAMED = {
    "passes/devices.py": "the list of kinds",
    "passes/isolation/flags.py": "torch's precision and attention switches, which carry the name",
    "records/profile.py": "a released word of the document",
    "records/prediction.py": "a released word of the document",
    "report/text/profile.py": "a released word of the document",
    "profiling/measuring.py": "a released word of the document",
    "passes/precision.py": "the backends of torch's precision switches",
    "pytest_plugin.py": "the names of pytest's marks",
    "audit/recording/values.py": "graphs that are captured, which torch asks of CUDA",
    "audit/recording/samples.py": "whether torch pins memory is asked of CUDA alone",
    "cli/options.py": "the words that completion offers",
}


def names_of_devices(source: str) -> list[str]:
    """Uses of `torch.cuda`, and strings that begin with an accelerator's name; prose does not begin with it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps") and isinstance(node.value, ast.Name):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if text.partition(":")[0].partition("-")[0] in ("cuda", "xpu", "mps"):
            found.append(f"{node.lineno}: {text!r}")
    return found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.cuda.synchronize()", 1),
        ("x.to('cuda:0')", 1),
        ("device.type == 'mps'", 1),
        ("'write cuda, or cpu'", 0),
        ("x.cuda()", 1),
        ("torch.get_device_module(device).synchronize()", 0),
    ],
)
def test_names_are_found(source: str, count: int) -> None:
    assert len(names_of_devices(source)) == count


def test_devices_are_not_asked_for_by_name() -> None:
    root = Path(gaverify.__file__).parent
    found = {
        str(path.relative_to(root)): names
        for path in sorted(root.rglob("*.py"))
        if "zoo" not in path.parts and (names := names_of_devices(path.read_text()))
    }
    assert {path: names for path, names in found.items() if path not in NAMED} == {}
    assert NAMED.keys() <= found.keys(), "an exception that is no longer needed"


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_model_without_numbers_gets_a_sentence(device: str | None) -> None:
    model = torch.nn.Linear(4, 2, device="meta")
    with pytest.raises(gaverify.ProblemError, match="`meta` device, where tensors have no numbers"):
        gaverify.verify(model, lambda m, x: m(x).sum(), torch.randn(4, 4), steps=2, device=device)
