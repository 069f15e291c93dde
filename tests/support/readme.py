"""What is generated of the README and the pages that it links: output of commands, faults, templates, the picture.

`python tests/support/readme.py` rewrites them.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
FAULTS = ROOT / "tests/corpus/FAULTS.md"
TEMPLATES = ROOT / "configs/README.md"
AUDIT = ROOT / "configs/audit/audit.toml"
PICTURE = ROOT / "configs/mlp-batchnorm.svg"
_OUTPUT = re.compile(r"<!-- output: (?P<command>[^\n]+?) -->\n(?P<body>.*?)<!-- /output -->", re.DOTALL)
_FAULTS = re.compile(r"(?<=<!-- faults -->\n).*?(?=<!-- /faults -->)", re.DOTALL)


def outputs(text: str) -> list[tuple[str, str]]:
    """Returns every command of the README with the output that stands under it."""
    return [(found["command"], found["body"]) for found in _OUTPUT.finditer(text)]


def block(command: str) -> str:
    """Returns a code block with the command and what it prints at 80 columns, run in the repository's root."""
    line, _, first = command.partition(" | head -n ")
    printed = run(line)
    if first:
        printed = "".join(printed.splitlines(keepends=True)[: int(first)])
    return f"```console\n$ {line}\n{printed}{'…' + chr(10) if first else ''}```\n"


def run(line: str) -> str:
    """Returns the stdout of a `gaverify` command line."""
    from gaverify.cli import main

    words = shlex.split(line)
    assert words[0] == "gaverify", line
    environment = {name: word for name, word in os.environ.items() if name != "FORCE_COLOR"}
    environment |= {"COLUMNS": "80", "NO_COLOR": "1"}
    printed, told = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(told),
    ):
        assert main(words[1:]) in (0, 1, 3), told.getvalue()
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().split("\n")) + "\n"


def skeleton(text: str) -> str:
    """Returns a text with every number masked: rounding differs from machine to machine, words do not."""
    text = re.sub(r"torch \S+", "torch", text)
    text = re.sub(r"[-−]?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"\n\s*", " ", text)).strip()


def fault_table() -> str:
    """Verifies every planted fault and its twin, and returns the results as a Markdown table."""
    from test_faults import FAULTS, TWINS

    from gaverify import Outcome

    rows = ["| fault | what it does | outcome | found | where | twin |", "|---|---|---|---|---|---|"]
    for case in FAULTS:
        verdict = case.verify()
        found = [finding for finding in verdict.findings if finding.severity == "fault"]
        codes = ", ".join(finding.code + ("" if finding.proven else " (suspected)") for finding in found) or "–"
        where = next((str(finding.location) for finding in found if finding.location), "–").replace("|", "\\|")
        twins = [twin for twin in TWINS if twin.id == case.id]
        quiet = all(twin.verify().outcome is Outcome.EQUIVALENT for twin in twins)
        rows.append(
            f"| {case.id} | {case.why} | {verdict.outcome.value} | {codes} | {where.replace('tests/corpus/', '')} | "
            f"{'–' if not twins else 'quiet' if quiet else 'FLAGGED'} |"
        )
    return "\n".join(rows) + "\n"


def templates() -> str:
    """Returns the page of the templates that `gaverify init --kind` writes."""
    from gaverify.cli.scaffolding import KINDS, scaffold

    spec, factory = Path("gaverify.toml"), Path("gaverify_model.py")
    blocks = [f"## {kind}\n\n```python\n{scaffold(None, None, kind, spec, factory).text}```\n" for kind in KINDS]
    return _TEMPLATES_HEAD + "\n".join(blocks) + _TEMPLATES_END.format(audit=AUDIT.read_text(encoding="utf-8"))


_TEMPLATES_HEAD = """\
# Specs and factories to start from

The `.toml` files here are specs; `gaverify run configs/` runs them all. `gaverify init --kind KIND` writes a spec and
one of the factories below. `gaverify init --model net.py:Net` chooses one and copies what the file says: how it makes
the model, and what it calls it with. `--checkpoint last.pt` adds code that loads it. Each `gaverify.fill_in` ends the
run with one sentence, such as `fill in the loss: line 15 of gaverify_model.py`, until your own code stands there.

"""


_TEMPLATES_END = """
## audit

`gaverify init --kind audit` writes this file, the options of `gaverify audit`. It stands beside a small training script
in [audit/](audit), which `gaverify run configs/` passes over; `gaverify audit configs/audit` runs it.

```toml
{audit}```
"""


def audit_options() -> str:
    """Returns the file of options that `gaverify init --kind audit` writes."""
    from gaverify.cli.scaffolding import template

    return template("parts/audit").replace("{name}", str(AUDIT.relative_to(ROOT)))


def picture() -> str:
    """Returns the picture of a report that the README shows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / PICTURE.name
        run(f"gaverify run mlp-batchnorm --steps 4 --output {file}")
        return file.read_text(encoding="utf-8")


def words_of(svg: str) -> str:
    """Returns the text in a picture, without the positions and the names of its parts."""
    return " ".join(html.unescape(re.sub(r"<style.*?</style>|<[^>]*>", " ", svg, flags=re.DOTALL)).split())


def refreshed(text: str) -> str:
    """Returns the README with its generated parts made anew."""
    return _OUTPUT.sub(
        lambda found: f"<!-- output: {found['command']} -->\n{block(found['command'])}<!-- /output -->", text
    )


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/corpus"), str(ROOT / "tests/support")]
    README.write_text(refreshed(README.read_text(encoding="utf-8")), encoding="utf-8")
    FAULTS.write_text(_FAULTS.sub(lambda _: fault_table(), FAULTS.read_text(encoding="utf-8")), encoding="utf-8")
    AUDIT.write_text(audit_options(), encoding="utf-8")
    TEMPLATES.write_text(templates(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
