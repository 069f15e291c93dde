"""The pytest plugin, run by pytest itself in a process of its own, as users run it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

# `pytester` takes out of `sys.modules` what a test imports, and torch cannot be imported twice in one process.
pytest.importorskip("torch")

INSTALLED = [point.value for point in importlib.metadata.entry_points(group="pytest11", name="gaverify")]
OWN = [] if INSTALLED else ["-p", "gaverify.pytest_plugin"]  # an editable install that is older than the plugin

SPECS = {
    "right": 'model = "mlp"\n',
    "wrong": 'model = "mlp-batchnorm"\n',
    "known": 'model = "mlp-batchnorm"\naccept = [{ code = "GAV101", location = "1", reason = "ghost batch norm" }]\n',
    "broken": 'model = "mlp"\nsteps = "4"\n',
    "open": 'model = "open.py:make"\n',
}
OPEN = """
import torch
def make():  # all samples are the same: nothing can be seen
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return model, lambda m, b: m(b[0]).square().mean(), (torch.ones(8, 4),)
"""

LEAVES = """
import os
def make():
    os._exit(0)
def fail():
    raise ValueError("no model today")
def hang():
    import time
    time.sleep(600)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    folder = pytester.mkdir("configs")
    for name, text in SPECS.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "open.py").write_text(OPEN)
    (folder / "other.toml").write_text("[tool.black]\nline-length = 3\n")
    return pytester


def run(project: pytest.Pytester, *words: str) -> pytest.RunResult:
    return project.runpytest_subprocess(*OWN, *words)


def test_specs_are_items(project: pytest.Pytester) -> None:
    result = run(project, "--gaverify", "configs", "-v", "-rA")
    result.assert_outcomes(passed=2, failed=1, errors=2)
    text = result.stdout.str()
    assert result.ret == 1
    assert "DIVERGENT  3 of 6 parameters differ" in text and "see        gaverify explain GAV101" in text
    assert "must be a whole number of at least 1" in text
    assert "INCONCLUSIVE" in text
    assert re.search(r"gaverify: accepted divergences", text)
    assert "configs/known.toml: GAV101 batch-statistics at `1` (BatchNorm1d): ghost batch norm" in text
    assert "FAILED configs/wrong.toml::gaverify - divergent: GAV101 in layer 1; 3 of" in text
    assert "ERROR configs/open.toml::gaverify - inconclusive: " in text
    assert "pytest_plugin.py" not in text  # nobody wants to read our traceback
    assert "other.toml" not in text
    assert "skipped" not in text


def test_nothing_is_collected_unasked(project: pytest.Pytester) -> None:
    assert run(project, "configs").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result = run(project, "--gaverify", "configs/other.toml")  # named: then it is meant
    result.assert_outcomes(errors=1)
    assert "unknown key" in result.stdout.str()


def test_a_folder_may_hold_audits_and_misspelt_specs(pytester: pytest.Pytester) -> None:
    pytester.mkdir("all")
    for name, text in {
        "audit": 'script = "train.py"\nsteps = 4\nseed = 3\n',  # keys that a spec has, too
        "misspelt": 'modle = "mlp"\n',
        "leaves": 'model = "leaves.py:make"\n',
        "raises": 'model = "leaves.py:fail"\n',
        "hangs": 'model = "leaves.py:hang"\ntimeout = 0.5\n',
        "lacks": 'model = "lacks.py:make"\n',
    }.items():
        (pytester.path / "all" / f"{name}.toml").write_text(text)
    (pytester.path / "all" / "leaves.py").write_text(LEAVES)
    (pytester.path / "all" / "lacks.py").write_text("import nobody_has_this\n")
    run(pytester, "--gaverify", "all/lacks.toml").assert_outcomes(errors=1)  # named: somebody wants it
    result = run(pytester, "--gaverify", "all")
    result.assert_outcomes(errors=4, skipped=1)  # `os._exit(0)` would end pytest with 0
    text = result.stdout.str()
    assert result.ret == 1 and "audit.toml" not in text
    assert "all/misspelt.toml: $.modle: unknown key; did you mean `model`?" in text
    assert "all/hangs.toml: did not finish within 0.5 s and was stopped" in text
    assert "called os._exit(0) at all/leaves.py:4" in text
    assert "raised ValueError at" in text and "The above exception" not in text


@pytest.mark.slow
def test_markers_choose(project: pytest.Pytester) -> None:
    result = run(project, "--gaverify", "configs", "-m", "gaverify_cuda", "--strict-markers", "--collect-only", "-q")
    assert "5 deselected" in result.stdout.str()
    (project.path / "configs" / "gpu.toml").write_text('model = "mlp"\ndevice = "cuda:0"\n')
    (project.path / "configs" / "ranks.toml").write_text('model = "mlp"\nranks = 2\n')
    for marker, name in (("gaverify_cuda", "gpu"), ("gaverify_ranks", "ranks")):
        result = run(project, "--gaverify", "configs", "-m", marker, "--collect-only", "-q")
        assert f"configs/{name}.toml::gaverify" in result.stdout.str() and "6 deselected" in result.stdout.str()
    cache = project.path / ".pytest_cache" / "v" / "gaverify"
    cache.mkdir(parents=True)
    (cache / "durations").write_text('{"configs/right.toml::gaverify": 11.0, "configs/wrong.toml::gaverify": 1.0}')
    result = run(project, "--gaverify", "configs", "-m", "gaverify_slow", "--collect-only", "-q")
    assert "configs/right.toml::gaverify" in result.stdout.str() and "6 deselected" in result.stdout.str()


@pytest.mark.slow
def test_last_failed_and_durations_are_kept(project: pytest.Pytester) -> None:
    run(project, "--gaverify", "configs/right.toml", "configs/wrong.toml").assert_outcomes(passed=1, failed=1)
    run(project, "--gaverify", "--lf", "configs/right.toml", "configs/wrong.toml").assert_outcomes(failed=1)
    durations = project.path / ".pytest_cache" / "v" / "gaverify" / "durations"
    assert "configs/right.toml::gaverify" in durations.read_text()
    run(project, "--gaverify", "configs/right.toml", "-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.slow
def test_strict_fails_on_a_stale_entry(project: pytest.Pytester) -> None:
    (project.path / "stale.toml").write_text(SPECS["known"].replace("mlp-batchnorm", "mlp"))
    result = run(project, "--gaverify", "stale.toml")
    result.assert_outcomes(passed=1)
    assert "matches nothing any more" in result.stdout.str()
    run(project, "--gaverify", "--gaverify-strict", "stale.toml").assert_outcomes(failed=1)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_xdist_and_junit(project: pytest.Pytester) -> None:
    result = run(project, "--gaverify", "configs", "-n", "2", "--junitxml", "out.xml")
    result.assert_outcomes(passed=2, failed=1, errors=2)
    text = result.stdout.str()
    assert "DIVERGENT  3 of 6" in text and "ghost batch norm" in text
    assert "FAILED configs/wrong.toml::gaverify - divergent: GAV101 in layer 1; 3 of" in text
    (suite,) = ElementTree.parse(project.path / "out.xml").getroot()
    assert [suite.attrib[key] for key in ("tests", "failures", "errors", "skipped")] == ["5", "1", "2", "0"]
    failure = suite.find(".//failure")
    assert failure is not None and failure.attrib["message"].startswith("divergent: GAV101 in layer 1; 3 of 6")
    assert "ghost batch norm" in {p.attrib["value"].rpartition(": ")[2] for p in suite.iter("property")}


def test_it_can_be_switched_off(project: pytest.Pytester) -> None:
    words = ["-p", "no:gaverify"] if INSTALLED else []
    result = project.runpytest_subprocess(*words, "--gaverify", "configs")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --gaverify" in result.stderr.str()


TEST = """
import torch
from torch import nn

def loss(model, batch):
    return model(batch).square().mean()

def test_right(gaverify):
    assert gaverify.assert_equivalent(nn.Linear(4, 1), loss, torch.randn(8, 4), steps=2).outcome == "equivalent"
    assert gaverify.verify(nn.Linear(4, 1), loss, torch.randn(8, 4), 2).outcome == "equivalent"

def test_wrong(gaverify):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    gaverify.assert_equivalent(model, loss, torch.randn(8, 4), steps=2)  # here

def test_other():
    assert 1 == 2
"""


def test_the_fixtures_failure_reads_like_the_report(pytester: pytest.Pytester) -> None:
    file = pytester.makepyfile(TEST)
    result = run(pytester, "--color=yes", "-rA")
    result.assert_outcomes(passed=1, failed=2)
    text = result.stdout.str()
    assert re.search(r"\x1b\[[0-9;]*31[0-9;]*mDIVERGENT", text)
    line = 1 + file.read_text().splitlines().index(next(at for at in file.read_text().splitlines() if "# here" in at))
    assert f"{file}:{line}" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "assert 1 == 2" in text  # other failures stay pytest's
    assert "verification.py" not in text
    plain = pytester.runpytest_inprocess(*OWN, "--color=no", "-k", "wrong").stdout.str()
    assert "DIVERGENT" in plain and "\x1b" not in plain


def test_it_costs_nothing_until_used() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import gaverify.pytest_plugin; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "sys.exit(str(sorted(new)) if new != {'gaverify'} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
