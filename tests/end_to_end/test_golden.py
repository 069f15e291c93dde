"""Whole reports of every command: as text, with what differs from machine to machine masked, and as JSON of its schema.

Numbers, versions, paths and the order that rounding gives to rows of a table are masked; every word, code and outcome
stays. A change here is a change of what users read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import audits
import jsonschema
import pytest
import readme
from documents import only_answer
from mutated_loops import path_of

from gaverify.report.documents import schema_text

ROOT = str(readme.ROOT)
BOTH = ["--full", "--batch-size 16 --accum 1", "--accumulated", "--batch-size 4 --accum 4"]
SCALE, STEPS = (str(path_of(name)) for name in ("loops_scale.py", "loops_steps.py"))
COMMANDS = {
    "equivalent": ["run", f"{ROOT}/configs/mlp.toml"],
    "batchnorm": ["run", f"{ROOT}/configs/mlp-batchnorm.toml"],
    "tokens": ["run", f"{ROOT}/configs/causal-lm.toml", "--weighting", "tokens", "--expect", "equivalent"],
    "means-of-means": ["run", f"{ROOT}/configs/causal-lm.toml"],
    "forgotten-division": ["run", f"{ROOT}/configs/mlp.toml", "--weighting", "none"],
    "trace": ["run", f"{ROOT}/configs/toy-linear.toml"],
    "own-model": ["run", f"{ROOT}/configs/own-model.toml", "--model-arg", "norm=batch"],
    "events": [
        "audit",
        STEPS,
        "--events-only",
        "--",
        "--loop",
        "cleared_at_epoch",
        "--batch-size",
        "4",
        "--accum",
        "4",
        "--samples",
        "24",
    ],
    "audit-scale": ["audit", SCALE, *BOTH, "--", "--loop", "division_forgotten"],
    "audit-ragged": [
        "audit",
        SCALE,
        "--full",
        "--micro 16",
        "--accumulated",
        "--micro 6",
        "--",
        "--loop",
        "ragged_batches",
    ],
    "audit-steps": ["audit", STEPS, *BOTH, "--", "--loop", "all_but_the_boundary"],
    "profile": ["profile", "--model", "mlp", "--steps", "1,2"],
}
QUICK = ("equivalent", "batchnorm", "tokens", "forgotten-division", "events")
_ROW = re.compile(r"  (divergent|equivalent|inconclusive)$")
_CASES = [pytest.param(name, marks=pytest.mark.smoke if name in QUICK else pytest.mark.slow) for name in COMMANDS]


def words(text: str) -> str:
    """Returns a text with paths and all numbers but those of codes and of floating-point types masked."""
    text = text.replace(str(path_of("loops_scale.py").parent), f"{ROOT}/tests/scripts")
    text = text.replace(f"{ROOT}/", "").replace(ROOT, "")
    text = re.sub(r"(?<=relative difference )(\S+ in )`[^`]+`", r"\1`…`", text)  # the worst of equals
    text = re.sub(r"(torch \d[\d.]*)\+\w+", r"\1", text)  # the build of torch is the machine's: +cpu, +cu130
    kept = re.split(r"(GAV\d{3}|b?float\d\d)", text)
    return "".join(
        part if at % 2 else re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", part).replace("-#", "#")
        for at, part in enumerate(kept)
    )


def lines(text: str) -> str:
    """Returns a text's masked paragraphs, each on one line, and the rows of its tables in an order of their own.

    Where a paragraph breaks hangs on how many digits its numbers have.
    """
    found = []
    for block in text.split("\n\n"):
        rest, table = [], []
        for line in block.splitlines():
            if line.startswith("      worst element"):
                continue
            masked_line = " ".join(words(re.sub(r"  \[[^]]*\]: \S+ vs \S+", "  #", line)).split())
            (table if _ROW.search(line) else rest).append(masked_line)
        found += [" ".join(rest), *sorted(table)]
    return "\n".join(found)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is shortened by what other columns of its table need."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", _CASES)
def test_text(name: str, snapshot: Any, tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    words = _with(COMMANDS[name], "--output", str(saved))
    result = audits.gaverify(words)
    document = json.loads(saved.read_text(encoding="utf-8"))
    jsonschema.validate(document, json.loads(schema_text(words[0])))
    assert (document["exit_code"], only_answer(json.dumps(document))["exit_code"]) == (result.code, result.code)
    if name != "profile":  # its bars and units hang on the machine; `tests/unit/profiling` shows them for fixed numbers
        assert f"exit {result.code}\n{lines(result.out)}" == snapshot


def test_every_example_of_the_clone_ends_as_it_says() -> None:
    result = audits.gaverify(["run", f"{ROOT}/configs", "--time-limit", "60"])
    assert result.code == 0, result.out
    summary = " ".join(result.out.partition("\nsummary\n")[2].split())
    assert summary.count("as expected: GAV") == 2 and " equivalent, 2 divergent" in summary, summary


def test_the_mask_hides_numbers_and_nothing_else() -> None:
    assert words("GAV201: 3.0e+00 times in float64, -4 of 8") == "GAV201: # times in float64, # of #"
    assert words("a fault") != words("a note")


def _with(command: list[str], *options: str) -> list[str]:
    at = command.index("--") if "--" in command else len(command)
    return [*command[:at], *options, *command[at:]]
