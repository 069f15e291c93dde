"""Runs `gaverify audit` on the training scripts in `tests/scripts` and holds what it said against what is expected.

The command is called in this process (its runs of the script are processes of their own), with JSON out. A line that an
audit has to name carries the comment `# here: NAME` in its script.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from documents import only_answer
from mutated_loops import path_of

from gaverify.cli import main

SCRIPTS = Path(__file__).parent.parent / "scripts"

HEAD = """
import argparse, os, sys, threading, time
import torch
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--odd", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inputs = torch.randn(32, 4)
targets = inputs.sum(1, keepdim=True)
batches = list(zip(inputs.split(args.batch_size), targets.split(args.batch_size)))
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(batches):
    (mse_loss(model(x), y) / args.accum).backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Audited:
    """What one audit printed, and how it exited."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        """What a failing test shows: the answer without its tables."""
        if not self.out:
            return f"exit {self.code}\n{self.err}"
        found = [f"{f['code']} ({f['severity']}) {f['location']}: {f['summary']}" for f in self.document["findings"]]
        return "\n".join([f"exit {self.code}: {self.outcome}: {self.document['reason']}", *found, self.err])

    @cached_property
    def document(self) -> dict[str, Any]:
        """The audit in the JSON document."""
        assert self.out, self.err
        return only_answer(self.out)

    @property
    def outcome(self) -> str:
        """The outcome in a word."""
        return str(self.document["outcome"])

    @property
    def faults(self) -> set[str]:
        """The codes of the faults that were found."""
        return {finding["code"] for finding in self.document["findings"] if finding["severity"] == "fault"}

    @property
    def notes(self) -> set[str]:
        """The codes of the notes."""
        return {finding["code"] for finding in self.document["findings"] if finding["severity"] == "note"}

    def finding(self, code: str) -> dict[str, Any]:
        """The first finding with this code."""
        found = [finding for finding in self.document["findings"] if finding["code"] == code]
        assert found, f"no {code} in {self}"
        return found[0]  # type: ignore[no-any-return]

    def text(self, code: str) -> str:
        """Everything that the finding says, as one string."""
        return json.dumps(self.finding(code), ensure_ascii=False)

    def line(self, code: str) -> tuple[str, int]:
        """File name and line of the finding."""
        location = self.finding(code)["location"]
        assert location and location["file"], f"{code} names no line: {self}"
        return Path(location["file"]).name, location["line"]

    def update(self, number: int) -> dict[str, Any]:
        """The comparison of one update."""
        return next(update for update in self.document["updates"] if update["number"] == number)


def marked(script: str, mark: str) -> tuple[str, int]:
    """Returns file name and number of the line that carries `# here: mark`."""
    path = path_of(script)
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = [at for at, line in enumerate(lines, 1) if line.endswith(f"# here: {mark}")]
    assert len(numbers) == 1, f"{script} has {len(numbers)} lines marked {mark!r}"
    return path.name, numbers[0]


def gaverify(words: Sequence[str]) -> Audited:
    """Runs the command line in this process."""
    return _ran(tuple(words))


@cache
def _known(words: tuple[str, ...]) -> Audited:
    """Runs an audit of a shipped script once, however many tests ask about it."""
    return _ran(words)


def _ran(words: tuple[str, ...]) -> Audited:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return Audited(code, out.getvalue(), err.getvalue())


def audit(
    script: str | Path,
    full: str | None = "--batch-size 16 --accum 1",
    accumulated: str | None = "--batch-size 4 --accum 4",
    common: str = "",
    options: Sequence[str] = (),
) -> Audited:
    """Audits a script of `tests/scripts` (or one by its full path)."""
    words = ["audit", *_script(script)]
    for option, value in (("--full", full), ("--accumulated", accumulated)):
        if value is not None:
            words += [option, value]
    words += ["--format", "json", *options, "--", *common.split()]
    return gaverify(words) if isinstance(script, Path) else _known(tuple(words))


def events_of(script: str | Path, arguments: str, options: Sequence[str] = ()) -> Audited:
    """Audits the events of one run alone."""
    words = ["audit", *_script(script), "--events-only", "--format", "json", *options, "--", *arguments.split()]
    return gaverify(words)


def _script(script: str | Path) -> list[str]:
    if isinstance(script, Path):
        return [str(script)]
    return [str(path_of(script))] if script.endswith(".py") else ["-m", script]


def audited(
    script: Path, body: str, accumulated: str = "--batch-size 2 --accum 4", options: Sequence[str] = ()
) -> Audited:
    """Writes a script that begins with `HEAD`, and audits it."""
    script.write_text(HEAD + body, encoding="utf-8")
    return audit(script, "--batch-size 8", accumulated, options=options)


def refused(result: Audited, *words: str) -> None:
    """Exit 2, nothing on stdout, the words in the message, and no frame of gaverify."""
    assert result.code == 2, str(result)
    for word in words:
        assert word in result.err, f"{word!r} is missing in\n{result}"
    assert "gaverify/audit" not in result.err, str(result)
    assert result.out == "", str(result)


@contextlib.contextmanager
def folder(path: Path) -> Iterator[None]:
    """Works in another folder for a while."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
