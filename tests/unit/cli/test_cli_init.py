"""`gaverify init`, `models` and `schema`."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest

from gaverify.cli import main
from gaverify.cli.scaffolding import template
from gaverify.spec import Spec, load_specs
from gaverify.zoo import Builtin


def test_init_writes_a_spec_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.toml"
    assert main(["init", str(file)]) == 0
    ((_, spec),) = load_specs([file], {})
    assert spec == Spec(model="mlp")
    assert str(file) in capsys.readouterr().out


def test_init_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.toml"
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert "--force" in capsys.readouterr().err and file.read_text() == "mine"
    assert main(["init", str(file), "--force"]) == 0
    assert file.read_text() != "mine"
    assert main(["init", str(tmp_path / "gone" / "x.toml")]) == 2


def test_the_starter_holds_every_key_and_its_comments_are_right(tmp_path: Path) -> None:
    for field in Spec.model_fields:
        assert re.search(rf"^(# )?\[?{field.replace('_', '-')}(\]| =)", template("parts/spec"), re.MULTILINE), field
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# (?=[a-z-]+ = |\[)", "", template("parts/spec"), flags=re.MULTILINE))
    ((_, spec),) = load_specs([file], {})
    assert spec.model_args == {"width": 32} and spec.rtol == 1e-5


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"]


def test_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    zoo = types.ModuleType("gaverify.zoo")
    known = Builtin("mlp", "577", "8 × [16]", "mse", "equivalent", 8)
    zoo.__dict__["BUILTINS"] = (known,)
    monkeypatch.setitem(sys.modules, "gaverify.zoo", zoo)
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "577" in out and "[16]" in out and max(map(len, out.splitlines())) <= 80
