"""`gaverify report` and its files: saved documents as pages; options of audits in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import samples

from gaverify.audit.request import Request
from gaverify.cli import main
from gaverify.cli.auditing import options_files, read_options
from gaverify.errors import SpecError
from gaverify.report import FORMATS, render

SAVED = samples.divergent()
"""Made once: an answer holds the second in which it was made."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "verdict.json"
    file.write_text(render([SAVED], "json"))
    return file


@pytest.mark.parametrize("form", [form.name for form in FORMATS])
@pytest.mark.smoke
def test_a_saved_document_gives_the_report_written_at_once(
    saved: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(saved), "--format", form]) == 1
    assert capsys.readouterr().out == render([SAVED], form)


@pytest.mark.smoke
def test_files_too(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved), "--output", str(tmp_path / "page.html")]) == 1
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == render([SAVED], "html")


@pytest.mark.parametrize(
    ("answers", "errors", "code"),
    [
        ([samples.equivalent()], (), 0),
        ([samples.equivalent(), samples.inconclusive()], (), 3),
        ([samples.divergent(), samples.inconclusive()], (), 1),
        ([samples.equivalent()], [("a", "b")], 2),
    ],
)
def test_the_exit_code_is_that_of_what_was_saved(answers, errors, code: int, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(render(answers, "json", errors=errors))
    assert main(["report", str(file)]) == code


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name one JSON document: "),
        (["{saved}"] * 2, "name one JSON document: "),
        (["gone.json"], "`gone.json` cannot be read: No such file or directory"),
        (["{folder}"], "cannot be read"),
        (["{page}"], "is no JSON"),
        (["{old}"], "has version 7; this gaverify reads version 2"),
        (["{saved}", "--output", "{saved}"], "would overwrite the document that is read"),
        (["{saved}", "--output", "gone/x.html"], "there is no folder"),
        (["{saved}", "--output", "a.html", "--output", "./a.html"], "is named twice"),
        (["{saved}", "--format", "pdf"], "`pdf` is not a format"),
    ],
)
def test_wrong_input_gets_a_sentence(
    words: list[str], sentence: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, old = tmp_path / "page.html", tmp_path / "old.json"
    page.write_text(render([samples.divergent()], "html"))
    old.write_text(json.dumps({**json.loads(saved.read_text()), "version": 7}))
    before = sorted(tmp_path.iterdir())
    names = {"saved": saved, "folder": tmp_path, "page": page, "old": old}
    assert main(["report", *(word.format(**names) for word in words)]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == ""
    assert sorted(tmp_path.iterdir()) == before


LOOP = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--forget", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, x in enumerate(torch.randn(32, 4).split(args.batch_size)):
    loss = model(x).square().mean()
    (loss if args.forget else loss / args.accum).backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
PAIR = 'full = "--batch-size 8 --accum 1"\naccumulated = ["--batch-size", 2, "--accum", 4]\nupdates = 1\n'


def read(folder: Path, text: str) -> Request:
    file = folder / "a.toml"
    file.write_text(text)
    return read_options(file).request


def test_keys_are_the_commands_options(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    given = read(
        tmp_path,
        f'script = "train.py"\narguments = "--a \'b c\'"\nin-place = true\nseed = 3\n{PAIR}'
        "[set]\nBATCH = 8\nFLAG = true\n",
    )
    assert given.script == str(tmp_path / "train.py")
    assert given.full == ("--batch-size", "8", "--accum", "1")
    assert given.accumulated == ("--batch-size", "2", "--accum", "4")
    assert (given.arguments, given.in_place, given.seed) == (("--a", "b c"), True, 3)
    assert given.both_set == {"BATCH": "8", "FLAG": "true"}
    assert given.events_only is False and given.full_env == {} and given.steps is None
    assert read(tmp_path, 'module = "a.b"\n').module == "a.b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", '$.script: is missing; write `script = "train.py"`'),
        ('script = "a"\nacumulated = "x"', "$.acumulated: unknown key; did you mean `accumulated`?"),
        ('script = "a"\noutput = "x"', "$.output: unknown key"),
        ('script = "a"\nset = "x=1"', "$.set: must be a table of names and values"),
        ('script = "a"\nin-place = "yes"', "$.in-place: must be true or false"),
        ('script = "a"\nfull = { a = 1 }', "$.full: must be arguments as in a shell, each quote closed, got"),
        ('script = "a"\narguments = "\'"', "$.arguments: must be arguments as in a shell, each quote closed"),
        ('script = "a"\nlauncher = ""', '$.launcher: must be a command as in a shell, got ""'),
        (
            'script = "a"\nupdates = "2"',
            '$.updates: must be a whole number of at least 0, got "2"; write `updates = 2`',
        ),
        ('script = "a"\nset = { A = [1] }', "$.set.A: must be text, a number or true/false, got [1]"),
        ('script = "a"\nfull_env = {}\nfull-env = {}', "$.full-env: is given twice, also as `full_env`"),
        ('script = "a"\nexpect = "red"', '$.expect: must be "equivalent", "divergent" or "inconclusive", got "red"'),
        ('script = "a"\naccept = [{ code = "GAV101" }]', "$.accept[0].reason: is missing"),
        ("script = ", "not TOML"),
        ('model = "mlp"\nsteps = 4', "is a spec, not the options of an audit; run it with `gaverify run`"),
    ],
)
def test_wrong_files_get_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


@pytest.fixture
def without_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits answer at once."""
    monkeypatch.setattr("gaverify.audit.flow.audit", lambda request, progress, patches: samples.audited())


@pytest.mark.usefixtures("without_runs")
def test_an_audit_in_a_line_and_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--full", "--b 8", "--accumulated", "--b 2"]
    assert main(["audit", "train.py", *pair, "-q", "--name", "small"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("DIVERGENT     small  GAV") and out.count("\n") == 1
    assert main(["audit", "train.py", *pair, "-v", "--name", "small"]) == 1
    out = capsys.readouterr().out
    assert "audit: small" in out and "train.py" in out
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(f'script = "train.py"\nname = "{name}"\n{PAIR}')
    (tmp_path / "c.toml").write_text('script = "train.py"\ncolor = "never"')
    assert main(["audit", str(tmp_path), "-q"]) == 2
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["DIVERGENT", "DIVERGENT", "ERROR"]
    assert [f"{name}.toml ({name})" in row for name, row in zip("ab", rows, strict=False)] == [True, True]


def test_a_script_is_no_options_file(tmp_path: Path) -> None:
    assert options_files(["train.py", "a.toml"]) == [] and options_files([]) == []
    for name in "ba":
        (tmp_path / f"{name}.toml").write_text("")
    assert [file.name for file, _ in options_files([str(tmp_path), str(tmp_path / "b.toml")])] == ["a.toml", "b.toml"]
    package = tmp_path / "package"
    package.mkdir()
    with pytest.raises(SpecError, match=r"nor a \*\.toml"):
        options_files([str(package)])
    (package / "__main__.py").write_text("")
    assert options_files([str(package)]) == []


def test_what_is_wrong_is_told_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('script = "gone.py"\nfull = "--b 8"\naccumulated = "--b 2"\n')
    (tmp_path / "b.toml").write_text("scrip = 1\n")
    assert main(["audit", ".", "--output", "all.xml", "--output", "all.json"]) == 2
    out, err = capsys.readouterr()
    assert "error: a.toml: the script `gone.py` does not exist" in err and "command line" not in err + out
    assert all(entry["source"] not in entry["message"] for entry in json.loads(Path("all.json").read_text())["errors"])
    assert (tmp_path / "all.xml").read_text().count("<testcase ") == 2


@pytest.mark.slow
def test_files_are_audited_and_accept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "right.toml").write_text(f'script = "train.py"\n{PAIR}')
    wrong = f'script = "train.py"\narguments = ["--forget"]\n{PAIR}'
    (tmp_path / "wrong.toml").write_text(wrong)
    (tmp_path / "broken.toml").write_text("scrip = 1")
    report = tmp_path / "out" / "all.json"
    report.parent.mkdir()
    assert main(["audit", str(tmp_path), "--output", str(report)]) == 2
    out, err = capsys.readouterr()
    assert "$.scrip: unknown key" in err and "3 runs in " in out
    assert {Path(e["source"]).name: e["message"][:7] for e in json.loads(report.read_text())["errors"]} == {
        "broken.toml": "$.scrip"
    }
    document = json.loads(report.read_text())
    outcomes = {Path(made["source"]).name: made["outcome"] for made in document["answers"]}
    assert outcomes == {"right.toml": "equivalent", "wrong.toml": "divergent"}
    (tmp_path / "broken.toml").unlink()
    assert main(["audit", str(tmp_path)]) == 1
    (tmp_path / "wrong.toml").write_text(f'{wrong}accept = [{{ code = "GAV201", location = "*", reason = "known" }}]\n')
    assert main(["audit", str(tmp_path)]) == 0
    assert "(accepted)" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "right.toml"), "--seed", "1"]) == 2
    assert "leave out --seed" in capsys.readouterr().err
