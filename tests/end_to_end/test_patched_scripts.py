"""Scripts with one fault each: the patch that an audit prints is applied as a user would, and repairs the script.

The truth about each script and its right twin is established without gaverify, in float64: after every update of the
right script the weights are those of the full batch, and of the wrong script's first two updates one has other weights.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import Audited, folder, gaverify
from patched_scripts import SCRIPTS, Run, Script
from torch.optim.optimizer import register_optimizer_step_post_hook

QUICK = {"argparse undivided", "notebook boundary", "click clear_each", "stranger early_continue"}
NAME = "train.py"


def per_script(slow: bool = True) -> pytest.MarkDecorator:
    """A test per script, slow but for the quick ones."""

    def case(script: Script) -> Any:
        marks = [pytest.mark.slow] if slow and script.name not in QUICK else []
        return pytest.param(script, id=script.name, marks=[*marks, *([pytest.mark.hf, pytest.mark.slow] * script.hf)])

    return pytest.mark.parametrize("script", [case(script) for script in SCRIPTS])


def audit(text: str, script: Script, path: Path, *options: str) -> Audited:
    """Audits a script that lies alone in a folder, from there."""
    path.mkdir()
    (path / NAME).write_text(text, encoding="utf-8")
    words = ["audit", NAME, "--format", "json", *options]
    for role, run in (("full", script.full), ("accumulated", script.accumulated)):
        words += [f"--{role}", run.arguments] if run.arguments else []
        for kind, values in (("env", run.environment), ("set", run.constants)):
            words += [word for name, value in values.items() for word in (f"--{role}-{kind}", f"{name}={value}")]
    with folder(path):
        return gaverify(words)


@pytest.fixture
def double() -> Iterator[None]:
    """What a script does not say is float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def weights(text: str, run: Run, monkeypatch: pytest.MonkeyPatch, path: Path) -> list[torch.Tensor]:
    """The weights after each update, without gaverify: the script is run in this process."""
    for name, value in run.constants.items():
        text, count = re.subn(rf"(?m)^( *{name.split('.')[-1]}(?:: int)? *= ).*$", rf"\g<1>{value}", text)
        assert count == 1, name
    (path / NAME).write_text(text, encoding="utf-8")
    after: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        after.append(torch.cat([weight.detach().flatten() for weight in optimizer.param_groups[0]["params"]]))

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [NAME, *run.arguments.split()])
        for name, value in run.environment.items():
            patch.setenv(name, value)
        hook = register_optimizer_step_post_hook(keep)
        try:
            runpy.run_path(str(path / NAME), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code
        finally:
            hook.remove()
    assert len(after) >= 2
    return after


@per_script(slow=False)
@pytest.mark.usefixtures("double")
def test_plain_torch_tells_the_fault_from_its_twin(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full, right = (weights(script.right, run, monkeypatch, tmp_path) for run in (script.full, script.accumulated))
    assert len(right) == len(full)
    assert max(float((one - other).abs().max()) for one, other in zip(right, full, strict=True)) < 1e-12
    wrong = weights(script.wrong, script.accumulated, monkeypatch, tmp_path)
    assert max(float((one - other).abs().max()) for one, other in zip(wrong[:2], full[:2], strict=True)) > 1e-5


@per_script()
def test_the_fault_is_found_and_its_twin_is_quiet(script: Script, tmp_path: Path) -> None:
    wrong, right = audit(script.wrong, script, tmp_path / "wrong"), audit(script.right, script, tmp_path / "right")
    assert wrong.code == 1 and script.code in wrong.faults, str(wrong)
    assert (right.code, right.outcome, right.faults) == (0, "equivalent", set()), str(right)
