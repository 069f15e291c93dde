"""The README shows what the program prints now, and names only commands and options that exist.

The layers of the house hold, and the rooms behind the wall import no torch.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import readme

from gaverify.cli import cli

TEXT = readme.README.read_text(encoding="utf-8")
COMMANDS = readme.outputs(TEXT)


def _options(command: click.Command) -> set[str]:
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def _lines() -> list[tuple[str, list[str]]]:
    """Every `gaverify COMMAND …` of the README with its words."""
    found = re.findall(r"gaverify ((?:run|profile|audit|models|rules|explain|schema|init)\b[^\n`|]*)", TEXT)
    return [(line.split()[0], line.split()[1:]) for line in found]


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 2 and len(_lines()) >= 8


@pytest.mark.parametrize(("name", "words"), _lines(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_and_option_exists(name: str, words: list[str]) -> None:
    assert name in cli.commands
    quoted = re.sub(r'"[^"]*"', "", " ".join(words)).split(" -- ")[0].split("#")[0]
    flags = {word.split("=")[0] for word in quoted.split() if re.match(r"--\w", word)} - {"--help"}
    assert flags <= _options(cli.commands[name])


def test_help_names_every_command_of_the_readme() -> None:
    printed = readme.run("gaverify --help")
    for name, _ in _lines():
        assert re.search(rf"^  {name} ", printed, re.MULTILINE), name


def shown_output(command: str, shown: str) -> object:
    """A command of the README with its output; an audit takes longer than the default run allows."""
    return pytest.param(command, shown, id=command, marks=[pytest.mark.slow] * ("audit" in command))


@pytest.mark.parametrize(("command", "shown"), [shown_output(*output) for output in COMMANDS])
def test_output_is_what_is_printed_now(command: str, shown: str) -> None:
    assert readme.skeleton(readme.block(command)) == readme.skeleton(shown)


def test_the_skeleton_tells_words_apart() -> None:
    assert readme.skeleton("rel. diff 1.2e-07\n  in `a`") == readme.skeleton("rel. diff 9e-08 in `a`")
    assert readme.skeleton("1 divergent") != readme.skeleton("1 equivalent")


def test_the_pages_that_it_links_are_there_and_current() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (readme.ROOT / path).exists(), path
    assert readme.TEMPLATES.read_text(encoding="utf-8") == readme.templates()
    assert readme.AUDIT.read_text(encoding="utf-8") == readme.audit_options()


def test_the_picture_is_the_report_of_now() -> None:
    shown, now = readme.words_of(readme.PICTURE.read_text(encoding="utf-8")), readme.words_of(readme.picture())
    assert readme.skeleton(shown) == readme.skeleton(now)
    assert "GAV101" in shown and "DIVERGENT" in shown


def test_the_first_verdict_stands_on_the_first_screen() -> None:
    assert any("EQUIVALENT" in line for line in TEXT.splitlines()[:36])


def test_the_example_file_runs(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import gaverify.loading
    from gaverify.spec import Spec

    source = TEXT.partition("<!-- file: my_model.py -->\n```python\n")[2].partition("```")[0]
    (tmp_path / "my_model.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    problem = gaverify.loading.load_problem(Spec(model="my_model.py:factory"))
    assert gaverify.verify(problem, steps=4).outcome is gaverify.Outcome.EQUIVALENT


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("lint-imports")
    if not script.exists():
        pytest.skip("import-linter is not installed")
    return subprocess.run([script, "--no-cache"], capture_output=True, text=True, check=False, cwd=folder)


def test_layers_hold() -> None:
    done = _lint(readme.ROOT)
    assert done.returncode == 0, done.stdout


def test_torch_in_a_rule_and_an_import_upwards_are_seen(tmp_path: Path) -> None:
    shutil.copy(readme.ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(readme.ROOT / "gaverify", tmp_path / "gaverify", ignore=shutil.ignore_patterns("__pycache__"))
    rule = tmp_path / "gaverify" / "rules" / "shares.py"
    lines = "\nimport torch\nfrom gaverify import verification\n"
    rule.write_text(rule.read_text(encoding="utf-8") + lines, encoding="utf-8")
    done = _lint(tmp_path)
    assert done.returncode == 1
    assert "gaverify.rules.shares -> torch" in done.stdout, done.stdout
    assert "gaverify.rules.shares -> gaverify.verification" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("names", "imported"),
    [("gaverify.cli, gaverify.rules, gaverify.report.documents", 0), ("gaverify.passes.gradients", 1)],
)
def test_no_torch_behind_the_wall(names: str, imported: int) -> None:
    code = f"import {names}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=readme.ROOT).returncode == imported


def _private_names_of_torch(tree: ast.AST) -> list[str]:
    """Names of torch with an underscore that a module imports or reaches through `torch.`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            names = ast.unparse(node).split(".")
        else:
            continue
        found += [name for name in names if re.match("_[a-zA-Z]", name)]
    return found


@pytest.mark.parametrize("source", sorted((readme.ROOT / "gaverify").rglob("*.py")), ids=lambda path: path.stem)
def test_names_that_torch_does_not_promise_stand_in_one_module(source: Path) -> None:
    found = _private_names_of_torch(ast.parse(source.read_text(encoding="utf-8")))
    assert bool(found) == (source.name == "torch_internals.py"), found
