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


CATEGORIES = ("gaverify", "gaverify-audit")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    for name, text in SPECS.items():
        (tmp_path / "configs" / f"{name}.toml").write_text(text)
    return tmp_path


class Runner:
    """A composite action's steps, each a script file in `bash --noprofile --norc -eo pipefail`, as GitHub runs them."""

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def __init__(self, project: Path, **inputs: str) -> None:
        self.project = project
        self.action = yaml.safe_load((ROOT / "action.yml").read_text())
        defaults = {name: entry.get("default", "") for name, entry in self.action["inputs"].items()}
        assert inputs.keys() <= defaults.keys()
        self.values = {f"inputs.{name}": value for name, value in (defaults | inputs).items()}
        self.values["github.action_path"] = str(ROOT)
        self.values |= {"github.job": "check", "strategy.job-index": "2", "runner.os": "Linux", "runner.temp": "/tmp"}
        self.used: dict[str, dict[str, str]] = {}  # actions that the steps use, with what each is given

    def run(self) -> tuple[int, str]:
        """The exit code of the first step that fails, and what all printed; the actions of others only noted."""
        told = ""
        for step in self.action["runs"]["steps"]:
            if "if" in step and not self._holds(step["if"]):
                continue
            if "uses" in step:
                name = step["uses"].partition("@")[0]
                self.used[f"{name} {step['with'].get('category', '')}".strip()] = {
                    key: self._filled(value).strip() for key, value in step["with"].items()
                }
                continue
            assert step["shell"] == "bash"  # a composite step without it is refused
            script = self.project / "step.sh"
            script.write_text(step["run"])
            assert "${{" not in step["run"]
            env = {key: self._filled(value) for key, value in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
                cwd=self.project / self._filled(step.get("working-directory", ".")),
                check=False,
                capture_output=True,
                text=True,
                env={**os.environ, **self.github, **env},
            )
            told += done.stdout + done.stderr
            self._note_outputs(step.get("id", ""))
            if done.returncode:
                return done.returncode, told
        return 0, told

    @property
    def github(self) -> dict[str, str]:
        names = {"GITHUB_OUTPUT": "output.txt", "GITHUB_STEP_SUMMARY": "summary.md"}
        paths = {key: str(self.project / name) for key, name in names.items()}
        return {"GITHUB_ACTIONS": "true", "PATH": self.path, **paths}

    def _note_outputs(self, step: str) -> None:
        """Takes `name=value` and `name<<END`, lines, `END` from the file that the step has written."""
        file = self.project / "output.txt"
        text = file.read_text() if file.exists() else ""
        several = r"^([\w-]+)<<(\S+)\n(.*?)^\2$"
        found = [
            (name, value.removesuffix("\n")) for name, _, value in re.findall(several, text, re.MULTILINE | re.DOTALL)
        ]
        found += re.findall(r"^([\w-]+)=(.*)$", re.sub(several, "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
        self.values |= {f"steps.{step}.outputs.{name}": value for name, value in found}

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: self._value(found[1]), text)

    def _value(self, name: str) -> str:
        """What an expression names; an output that no step has set is empty."""
        return self.values.get(name, "") if name.startswith("steps.") else self.values[name]

    def _holds(self, condition: str) -> bool:
        found = re.fullmatch(r"\$\{\{ (.*) \}\}", condition)
        parts = [re.fullmatch(r"([\w.-]+) != ''", part) for part in found[1].split(" && ")] if found else []
        assert parts and all(parts), condition
        return all(self._value(part[1]) != "" for part in parts if part)


def test_the_action_annotates_summarises_and_writes(project: Path) -> None:
    runner = Runner(project, install="")
    code, told = runner.run()
    assert code == 1
    assert "::error file=" in told and "GAV101" in told
    assert runner.values["steps.verify.outputs.exit-code"] == "1"
    assert "divergent" in (project / "summary.md").read_text(encoding="utf-8")
    assert (project / "gaverify.sarif").exists() and (project / "gaverify.html").exists()
    assert runner.used == {
        "github/codeql-action/upload-sarif gaverify": {"sarif_file": "gaverify.sarif", "category": "gaverify"},
        "actions/upload-artifact": {"name": "gaverify-check-2", "path": "gaverify.sarif\ngaverify.html"},
    }


def test_the_action_splits_lines_expands_globs_and_is_not_in_the_way_of_modules(project: Path) -> None:
    (project / "types.py").write_text("raise SystemExit('this is not the types that Python means')")
    inputs = {
        "specs": "configs/right.toml\nconfigs/k*.toml\n",
        "output": "a.json\n\tb.md c.md",
        "arguments": "--strict\n",
    }
    runner = Runner(project, install="", artifact="", **inputs)
    code, told = runner.run()
    assert code == 0, told
    assert "::error" not in told and runner.values["steps.verify.outputs.exit-code"] == "0"
    assert runner.used == {}
    assert len(json.loads((project / "a.json").read_text())["answers"]) == 2
    assert (project / "b.md").exists() and (project / "c.md").exists()


def test_an_input_is_no_command_and_a_glob_without_a_match_gets_a_sentence(project: Path) -> None:
    specs = "configs/right.toml; touch hacked $(touch hacked)\nconfigs/*.tom"
    code, told = Runner(project, install="", specs=specs, output="").run()
    assert code == 2 and not (project / "hacked").exists()
    assert "configs/*.tom: there is no such file or folder" in told
    assert told.count("there is no such file or folder") > 1


def test_the_action_is_whole() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    assert all(entry["description"] for entry in action["inputs"].values())
    for step in action["runs"]["steps"]:  # an expression that names nothing is empty, and nobody says so
        for name in re.findall(r"inputs\.([\w-]+)", str(step)):
            assert name in action["inputs"], name


PIP = """#!/bin/sh
case "$*" in
*"pip show"*) exit $HAS_NO_TORCH ;;
*"pip install"*) echo "$@" >> pip.txt ;;
*) exec "$REAL_PYTHON" "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("has_torch", "inputs", "calls"),
    [
        (
            False,
            {},
            [
                "-c {root}/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch",
                "--extra-index-url https://download.pytorch.org/whl/cpu {root}",
            ],
        ),
        (
            False,  # requirements may pin another torch
            {"install": "this -r requirements.txt", "torch-index": ""},
            ["-c {root}/constraints.txt torch", "{root} -r requirements.txt"],
        ),
        (True, {"install": "this -r requirements.txt"}, ["{root} -r requirements.txt"]),
        (
            False,
            {"constraints": "mine.txt", "torch-index": "", "install": "gaverify"},
            ["-c mine.txt torch", "-c mine.txt gaverify"],
        ),
    ],
)
def test_the_action_installs_a_torch_without_cuda_where_there_is_none(
    has_torch: bool, inputs: dict[str, str], calls: list[str], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = project / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PIP)
    python.chmod(0o755)
    monkeypatch.setattr(Runner, "path", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HAS_NO_TORCH", str(int(not has_torch)))
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    runner = Runner(project, specs="", **{"python-version": "3.12", **inputs})
    code, told = runner.run()
    assert code == 2 and "name `specs` or `audits`" in told
    made = [f"-P -m pip install --quiet {call.format(root=ROOT)}" for call in calls]
    assert (project / "pip.txt").read_text().splitlines() == made
    cached = runner.used.pop("actions/cache")
    assert cached["path"] == "/tmp/gaverify-pip" and cached["restore-keys"] == "gaverify-pip-Linux-3.12-"
    assert runner.used == {"actions/setup-python": {"python-version": "3.12"}}


def test_the_action_audits_and_fails_with_the_worst_exit_code(project: Path) -> None:
    (project / "audits").mkdir()
    (project / "audits" / "a.toml").write_text('script = "gone.py"\nfull = "--b 8"\naccumulated = "--b 2"\n')
    audits = {"audits": "audits/*.toml", "audit-arguments": "-q", "audit-output": "audit.sarif"}
    runner = Runner(project, install="", specs="configs/right.toml", output="a.sarif", **audits)
    code, told = runner.run()
    assert code == 2 and "`gone.py` does not exist" in told and "EQUIVALENT" in told
    assert [runner.used[f"github/codeql-action/upload-sarif {name}"]["sarif_file"] for name in CATEGORIES] == [
        "a.sarif",
        "audit.sarif",
    ]
    assert runner.used["actions/upload-artifact"]["path"] == "a.sarif\naudit.sarif"


def test_the_action_runs_in_the_folder_of_the_project(project: Path) -> None:
    (project / "models").mkdir()
    (project / "configs").rename(project / "models" / "configs")
    runner = Runner(project, install="", **{"working-directory": "models", "specs": "configs/right.toml"})
    code, told = runner.run()
    assert code == 0 and "EQUIVALENT" in told, told
    assert runner.used["actions/upload-artifact"]["path"] == "models/gaverify.sarif\nmodels/gaverify.html"
    assert runner.used["github/codeql-action/upload-sarif gaverify"]["sarif_file"] == "models/gaverify.sarif"


def test_the_readme_shows_the_action_and_the_hooks_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    job, configuration = yaml.safe_load_all(block)
    assert job["name"] and job[True] == ["push", "pull_request"], "`on` is true for a reader of YAML 1.1"
    (call,) = (step for step in job["jobs"]["gaverify"]["steps"] if step["uses"].startswith("gaverify/gaverify@"))
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    assert {"python-version", "specs", "audits"} <= call["with"].keys() <= inputs.keys()
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    (repository,) = configuration["repos"]
    assert {hook["id"] for hook in repository["hooks"]} <= hooks


STAGE = {"gaverify-audit": ("--hook-stage", "pre-push")}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pre_commit") is None, reason="pre-commit is not installed")
@pytest.mark.parametrize(
    ("hook", "files", "code"),
    [
        ("gaverify", ["configs/right.toml"], 0),
        ("gaverify", ["configs/wrong.toml"], 1),
        ("gaverify", ["a.py"], 0),
        ("gaverify-all", ["a.py"], 1),
        ("gaverify-audit", ["a.py"], 2),
    ],
)
def test_pre_commit_runs_the_hooks(project: Path, hook: str, files: list[str], code: int) -> None:
    (project / "a.py").write_text("")
    (project / "audits").mkdir()
    (project / "audits" / "a.toml").write_text('script = "gone.py"\nfull = "--b 8"\naccumulated = "--b 2"\n')
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
    words = [hook, *STAGE.get(hook, ()), "--files", *files]
    done = call(sys.executable, "-m", "pre_commit", "try-repo", str(hooks), *words)
    assert done.returncode == min(code, 1), done.stdout + done.stderr  # pre-commit's own: a hook failed
    assert code < 2 or "`gone.py` does not exist" in done.stdout
    skipped = hook == "gaverify" and files == ["a.py"]
    assert ("Skipped" in done.stdout) is skipped
    assert ("DIVERGENT" in done.stdout) is (code == 1)
