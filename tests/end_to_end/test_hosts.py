"""The GitHub action and the pre-commit hooks, run the way their hosts run them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent.parent
SPECS = {
    "right": 'model = "mlp"\n',
    "wrong": 'model = "mlp-batchnorm"\n',
    "known": 'model = "mlp-batchnorm"\naccept = [{ code = "GAV101", location = "1", reason = "known" }]\n',
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    for name, text in SPECS.items():
        (tmp_path / "configs" / f"{name}.toml").write_text(text)
    return tmp_path


class Runner:
    """A composite action's steps, each a script file in `bash --noprofile --norc -eo pipefail`, as GitHub runs them."""

    def __init__(self, project: Path, **inputs: str) -> None:
        self.project = project
        self.action = yaml.safe_load((ROOT / "action.yml").read_text())
        defaults = {name: entry.get("default", "") for name, entry in self.action["inputs"].items()}
        assert inputs.keys() <= defaults.keys()
        self.values = {f"inputs.{name}": value for name, value in (defaults | inputs).items()}
        self.values["github.action_path"] = str(ROOT)

    def run(self) -> tuple[int, str]:
        """The exit code of the first step that fails, and what all printed."""
        told = ""
        for step in self.action["runs"]["steps"]:
            if "if" in step and not self._holds(step["if"]):
                continue
            assert step["shell"] == "bash"  # a composite step without it is refused
            script = self.project / "step.sh"
            script.write_text(step["run"])
            assert "${{" not in step["run"]
            env = {key: self._filled(value) for key, value in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
                cwd=self.project,
                check=False,
                capture_output=True,
                text=True,
                env={**os.environ, **self.github, **env},
            )
            told += done.stdout + done.stderr
            if done.returncode:
                return done.returncode, told
        return 0, told

    @property
    def github(self) -> dict[str, str]:
        names = {"GITHUB_OUTPUT": "output.txt", "GITHUB_STEP_SUMMARY": "summary.md"}
        paths = {key: str(self.project / name) for key, name in names.items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"GITHUB_ACTIONS": "true", "PATH": path, **paths}

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: self.values[found[1]], text)

    def _holds(self, condition: str) -> bool:
        found = re.fullmatch(r"\$\{\{ ([\w.-]+) != '' \}\}", condition)
        assert found, condition
        return self.values[found[1]] != ""


def test_the_action_annotates_summarises_and_writes(project: Path) -> None:
    code, told = Runner(project, install="").run()
    assert code == 1
    assert "::error file=" in told and "GAV101" in told
    assert (project / "output.txt").read_text() == "exit-code=1\n"
    assert "divergent" in (project / "summary.md").read_text(encoding="utf-8")
    assert (project / "gaverify.sarif").exists() and (project / "gaverify.html").exists()


def test_the_action_splits_lines_expands_globs_and_is_not_in_the_way_of_modules(project: Path) -> None:
    (project / "types.py").write_text("raise SystemExit('this is not the types that Python means')")
    inputs = {
        "specs": "configs/right.toml\nconfigs/k*.toml\n",
        "output": "a.json\n\tb.md c.md",
        "arguments": "--strict\n",
    }
    code, told = Runner(project, install="", **inputs).run()
    assert code == 0, told
    assert "::error" not in told and (project / "output.txt").read_text() == "exit-code=0\n"
    assert len(json.loads((project / "a.json").read_text())["verdicts"]) == 2
    assert (project / "b.md").exists() and (project / "c.md").exists()


def test_a_glob_without_a_match_gets_a_sentence(project: Path) -> None:
    code, told = Runner(project, install="", specs="configs/*.tom", output="").run()
    assert code == 2 and "configs/*.tom: there is no such file or folder" in told


def test_an_input_is_no_command(project: Path) -> None:
    code, told = Runner(project, install="", specs="configs/right.toml; touch hacked $(touch hacked)", output="").run()
    assert code == 2 and not (project / "hacked").exists()
    assert "there is no such file or folder" in told


def test_the_action_is_whole() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    assert all(entry["description"] for entry in action["inputs"].values())
    install = action["runs"]["steps"][0]
    assert "pip install" in install["run"] and install["env"]["ACTION"] == "${{ github.action_path }}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pre_commit") is None, reason="pre-commit is not installed")
@pytest.mark.parametrize(
    ("hook", "files", "code"),
    [
        ("gaverify", ["configs/right.toml"], 0),
        ("gaverify", ["configs/wrong.toml"], 1),
        ("gaverify", ["a.py"], 0),
        ("gaverify-all", ["a.py"], 1),
    ],
)
def test_pre_commit_runs_the_hooks(project: Path, hook: str, files: list[str], code: int) -> None:
    (project / "a.py").write_text("")
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(project / "home"),
    }
    env |= {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def call(*words: str) -> Any:
        return subprocess.run(words, cwd=project, env=env, capture_output=True, text=True, check=False)

    hooks = project / "hooks"
    hooks.mkdir()
    (hooks / ".pre-commit-hooks.yaml").write_text((ROOT / ".pre-commit-hooks.yaml").read_text())
    for folder in (hooks, project):
        call("git", "init", "-q", str(folder))
        call("git", "-C", str(folder), "add", ".")
        call("git", "-C", str(folder), "commit", "-q", "-m", "all")
    done = call(sys.executable, "-m", "pre_commit", "try-repo", str(hooks), hook, "--files", *files)
    assert done.returncode == code, done.stdout + done.stderr
    skipped = hook == "gaverify" and files == ["a.py"]
    assert ("Skipped" in done.stdout) is skipped
    assert ("DIVERGENT" in done.stdout) is (code == 1)
