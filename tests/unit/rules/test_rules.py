"""The rule pages: every code has one, with its headings; each example fires its code, and its repair does not."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import Audited, audit
from click.testing import CliRunner

import gaverify
from gaverify import SpecError, rules
from gaverify.cli import cli, main
from gaverify.patches.proposing import RECOGNISERS
from gaverify.rulebook import RulePage, find_page, rule_pages
from gaverify.rules import shares, unexplained
from gaverify.spec import Spec
from gaverify.verification import verify_spec

PAGES = {page.code: page for page in rule_pages()}
# section 7 of the design; the codes are stable once released
NAMES = {
    10: "batch-statistics cross-sample-operation batch-coupled-loss batch-dependent-backward",
    20: "wrong-loss-scale mean-of-means empty-micro-batch",
    30: "aligned-randomness unalignable-randomness unrepeatable-backward",
    40: "state-changed-by-forward buffer-drift hidden-state",
    50: "low-precision-accumulation missing-gradient non-finite-gradient",
    60: "step-inside-window gradients-not-cleared gradients-cleared-inside-window trailing-window-lost "
    "trailing-window-misscaled clip-per-micro-batch scheduler-per-micro-batch scaler-per-micro-batch "
    "step-settings-differ loss-inputs-differ",
    70: "ranks-hold-different-gradients gradients-never-reduced mean-over-ranks wrong-rank-scale "
    "gather-without-gradient shard-local-norm rank-statistics synchronised-every-micro-batch",
    90: "uninformative-batch",
}
CATALOGUE = {f"GAV{10 * tens + at}": name for tens, names in NAMES.items() for at, name in enumerate(names.split(), 1)}
AUDITED = {rule.code for rule in rules.EVENTS} | {"GAV605", "GAV610", "GAV701", "GAV702", "GAV706", "GAV707", "GAV708"}
VERIFIED = [rule.code for rule in rules.RULES if rule.code not in AUDITED]


def test_every_code_of_the_catalogue_has_its_page() -> None:
    assert {code: page.name for code, page in PAGES.items() if code != unexplained.code} == CATALOGUE
    assert [page.code for page in rule_pages()] == sorted(PAGES)


@pytest.mark.parametrize("rule", [*rules.RULES, unexplained])
def test_a_rule_and_its_page_agree(rule: Any) -> None:
    page = PAGES[rule.code]
    assert (page.code, page.name) == (rule.code, rule.name)


def source_of(function: Any) -> str:
    """The source of a function and of those beside it that it calls, however far down."""
    module = sys.modules[function.__module__]
    taken = {function.__name__: inspect.getsource(inspect.unwrap(function))}
    while True:
        words = {word for text in taken.values() for word in re.findall(r"\w+", text)} - taken.keys()
        called = {word: getattr(module, word, None) for word in words}
        more = {w: f for w, f in called.items() if inspect.isfunction(f) and f.__module__ == module.__name__}
        if not more:
            return "\n\n".join(taken.values())
        taken |= {word: inspect.getsource(function) for word, function in more.items()}


HEADINGS = ["What it finds", "Why gradients diverge", "How to recognise it", "Example", "Use instead"]
HEADINGS += ["When it is harmless", "References"]
A_MODEL, A_LOOP = "A model:", "A training loop:"
"""Lines above the two examples of a code that arises in both."""
BOTH = [code for code, page in PAGES.items() if A_MODEL in page.sections["Use instead"]]


def code_block(page: RulePage, heading: str, kind: str | None = None) -> str:
    """The indented lines under a heading; with a kind those below that line alone."""
    lines = page.sections[heading].splitlines()
    if kind is not None:
        starts = lines.index(kind) + 1 if kind in lines else len(lines)
        others = [at for at in range(starts, len(lines)) if lines[at] in (A_MODEL, A_LOOP)]
        lines = lines[starts : others[0] if others else len(lines)]
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line)).strip("\n")


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_has_its_headings_in_order_and_text_below_each(page: RulePage) -> None:
    assert list(page.sections) == HEADINGS
    assert all(text.strip() for text in page.sections.values())
    assert page.severity in ("fault", "note", "fault or note")


@pytest.mark.parametrize("rule", rules.RULES)
def test_severity_of_the_page_is_that_of_the_findings(rule: Any) -> None:
    """Read from the rule's calls of `finding_of`: without the keyword `severity` it is a fault."""
    calls = [node for node in ast.walk(ast.parse(source_of(rule.judgement))) if isinstance(node, ast.Call)]
    found = set()
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "finding_of":
            given = [keyword.value for keyword in call.keywords if keyword.arg == "severity"]
            words = {node.value for value in given for node in ast.walk(value) if isinstance(node, ast.Constant)}
            found |= words & {"fault", "note"} if given else {"fault"}
    assert found == set(PAGES[rule.code].severity.split(" or "))


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_says_which_patches_there_are(page: RulePage) -> None:
    """Read from the recognisers' calls of `Candidate`: without a third argument a patch is safe."""
    kinds = set()
    for recogniser in RECOGNISERS.get(page.code, ()):
        for call in ast.walk(ast.parse(source_of(recogniser))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Candidate":
                is_unsafe = len(call.args) > 2 or any(keyword.arg == "unsafe" for keyword in call.keywords)
                kinds.add("unsafe" if is_unsafe else "safe")
    assert page.patch == (" or ".join(sorted(kinds)) or "none")


def executed(code: str, folder: Path) -> dict[str, Any]:
    """Runs a code block as a user would, from a file, with weights and data that are the same in every test run."""
    path = folder / "example.py"
    path.write_text(code, encoding="utf-8")
    torch.manual_seed(0)
    return runpy.run_path(str(path))


def verified(page: RulePage, heading: str, folder: Path) -> gaverify.Verdict:
    code = code_block(page, heading, A_MODEL if page.code in BOTH else None)
    names = executed(code, folder)
    if "ranks" in names:  # a command starts them, and every rank makes the problem for itself
        factory = folder / "example.py"
        factory.write_text(f"{code}\n\ndef problem():\n    return model, loss, batch\n")
        return verify_spec(Spec(model=f"{factory}:problem", steps=names["steps"], ranks=names["ranks"], device="cpu"))
    steps, options = names.get("steps", 4), names.get("options", {})
    return gaverify.verify(names["model"], names["loss"], names["batch"], steps=steps, **options)


def codes(verdict: gaverify.Verdict, severity: str) -> set[str]:
    return {finding.code for finding in verdict.findings if finding.severity == severity}


@pytest.mark.parametrize("code", VERIFIED)
def test_the_example_fires_its_code_and_no_other(code: str, tmp_path: Path) -> None:
    verdict = verified(PAGES[code], "Example", tmp_path)
    severities = {finding.severity for finding in verdict.findings if finding.code == code}
    assert severities and severities <= set(PAGES[code].severity.split(" or "))
    assert codes(verdict, "fault") <= {code}
    if "fault" in severities:
        assert verdict.outcome is gaverify.Outcome.DIVERGENT


@pytest.mark.parametrize("code", VERIFIED)
def test_the_repair_is_equivalent_without_the_code(code: str, tmp_path: Path) -> None:
    verdict = verified(PAGES[code], "Use instead", tmp_path)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT
    assert codes(verdict, "fault") == set()
    assert code not in codes(verdict, "note")


def test_a_code_that_arises_in_both_has_both_examples() -> None:
    """Which codes do is read from the rules: those that look at the window of a training loop beside a run's facts."""
    both = {
        rule.code
        for rule in (*rules.RULES, unexplained)
        if rule.code not in AUDITED and ".record" in source_of(rule.judgement)
    }
    assert both <= set(BOTH)
    for code in BOTH:
        for heading in ("Example", "Use instead"):
            model = code_block(PAGES[code], heading, A_MODEL)
            assert model or (code == "GAV000" and heading == "Example"), "what is known becomes a rule"


@pytest.mark.parametrize("code", CATALOGUE)
@pytest.mark.parametrize("heading", ["Example", "Use instead"])
def test_examples_are_python(code: str, heading: str) -> None:
    for kind in (A_MODEL, A_LOOP) if code in BOTH else (None,):
        assert ast.parse(code_block(PAGES[code], heading, kind)).body, kind


def test_the_repair_of_a_coupled_loss_is_the_same_gradient(tmp_path: Path) -> None:
    """The two-pass step of the page is not another loss that happens to be additive."""
    norms = []
    for heading in ("Example", "Use instead"):
        names = executed(code_block(PAGES["GAV103"], heading), tmp_path)
        names["loss"](names["model"], names["batch"]).backward()
        norms.append([float(parameter.grad.norm()) for parameter in names["model"].parameters()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("wanted", ["GAV101", "gav101", "101", "gav-101", "batch-statistics", "Batch_Statistics"])
def test_a_page_is_found_by_code_and_by_name(wanted: str) -> None:
    assert find_page(wanted).code == "GAV101"


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("GAV105", "there is no rule `GAV105`; did you mean GAV104 batch-dependent-backward?"),
        ("GAV999", "there is no rule `GAV999`; did you mean GAV901 uninformative-batch?"),
        ("batch-statistic", "there is no rule `batch-statistic`; did you mean GAV101 batch-statistics?"),
        ("GAVI01", "there is no rule `GAVI01`; did you mean GAV101 batch-statistics?"),
        ("zzz", "there is no rule `zzz`; `gaverify rules` lists all"),
        ("", "there is no rule ``; `gaverify rules` lists all"),
    ],
)
def test_an_unknown_code_names_the_nearest(wanted: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        find_page(wanted)
    assert caught.value.problems == (sentence,)


def printed(*words: str) -> str:
    """What the command prints on a pipe."""
    result = CliRunner().invoke(cli, words)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_explain_on_a_pipe_is_plain_text_with_code_as_it_stands() -> None:
    lines = printed("explain", "gav202").splitlines()
    assert lines[0].startswith("GAV202 mean-of-means: ")
    assert [line for line in lines if line in HEADINGS] == list(HEADINGS)
    assert "    full         Σ_k S_k / Σ_k n_k  =  Σ_k (n_k / N) (S_k / n_k),  N = Σ_k n_k" in lines
    assert "- Hugging Face, Fixing Gradient Accumulation, 2024," in lines
    assert {f"    {line}".rstrip() for line in code_block(PAGES["GAV202"], "Use instead", A_LOOP).splitlines()} <= {
        *lines
    }


@pytest.mark.parametrize("code", PAGES)
def test_a_page_fits_into_80_columns(code: str) -> None:
    wide = [line for line in printed("explain", code).splitlines() if len(line) > 80 and "https://" not in line]
    assert wide == []


def test_pages_survive_python_without_docstrings_and_are_styled_on_a_terminal() -> None:
    words = [sys.executable, "-OO", "-m", "gaverify", "explain", "GAV606"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    styled = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
    assert "\x1b[1" in styled
    assert re.sub(r"\x1b\[[0-9;]*m", "", styled) == printed("explain", "GAV606")


def test_explain_imports_no_torch() -> None:
    code = "import sys; from gaverify.cli import main; main(['explain', 'GAV101']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", [["explain", "GAV105"], ["explain"], ["rules", "--format", "yaml"]])
def test_unknown_words_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("gaverify: error: ")


def test_rules_prints_a_line_per_rule_on_a_pipe() -> None:
    heading, *rows = printed("rules").splitlines()
    assert heading.split() == ["code", "name", "severity", "finds"]
    for row, page in zip(rows, rule_pages(), strict=False):
        assert re.split(r"  +", row) == [page.code, page.name, page.severity, page.summary]
    assert rows[len(PAGES) :] == ["", "Read one with `gaverify explain CODE`."]


def test_rules_as_json() -> None:
    document = json.loads(printed("rules", "--format", "json"))
    assert document["version"] == 1 and len(document["rules"]) == len(PAGES)
    page = PAGES["GAV101"]
    told = {"code": page.code, "name": page.name, "severity": page.severity, "summary": page.summary}
    assert document["rules"][1] == {**told, "patch": page.patch}


def test_every_sentence_of_a_rule_has_its_values() -> None:
    """A literal that lost its `f` shows a name in braces to the user; those of `SHARES` get their values by `word`."""
    values = set(re.findall(r"^ +(\w+)=", inspect.getsource(shares.word), re.MULTILINE))
    for file in Path(inspect.getfile(rules)).parent.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        names = {name for text in texts for name in re.findall(r"\{([a-z_]+)[.(}:]", text)}
        assert names <= (values if file.stem == "shares" else set()), file


HEAD = """
import argparse
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
parser.add_argument("--accum", type=int)
parser.add_argument("--samples", type=int)
parser.add_argument("--text", action="store_true")
args = parser.parse_args()
K, device, epochs = args.accum, "cpu", 1
torch.manual_seed(0)
if args.text:
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    x, y = torch.randint(8, (args.samples, 6)), torch.randint(8, (args.samples, 6))
    for row in range(args.samples):
        y[row, (3 if row >= 4 else 0) if EMPTY else (row * 5) % 6 + 1 :] = -100
else:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    x, y = torch.randn(args.samples, 16), 20 * torch.randn(args.samples, 1)
criterion = nn.MSELoss()
loader = list(zip(x.split(args.batch_size), y.split(args.batch_size)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
scaler = torch.amp.GradScaler(device, init_scale=256.0)
average = AveragedModel(model)

def rate_at(count):
    return 1e-4 / (1 + count)

def windows(batches, size):
    return [batches[at : at + size] for at in range(0, len(batches), size)]

"""
TEXT, TAIL = ("GAV202", "GAV203"), ("GAV604", "GAV605")
LOOPS = ("GAV101", "GAV201", "GAV402", "GAV601", "GAV602", "GAV603", "GAV606", "GAV607", "GAV608", "GAV609", "GAV610")


def audit_loops(folder: Path, heading: str, *codes: str) -> Audited:
    """Audits the loops under a heading of these pages, one after the other, each with a model of its own."""
    text = ""
    for code in codes:
        page = find_page(code)
        loop = code_block(page, heading, A_LOOP) or code_block(page, heading)
        if "for epoch" not in loop:
            loop = "for epoch in range(epochs):\n" + textwrap.indent(loop, "    ")
        text += HEAD.replace("EMPTY", str(code == "GAV203")) + loop + "\n"
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    common = f"--samples {24 if codes[0] in TAIL else 32}" + (" --text" if codes[0] in TEXT else "")
    updates = ["--updates", str(2 * len(codes))]
    return audit(script, "--batch-size 16 --accum 1", "--batch-size 4 --accum 4", common, updates)


@pytest.mark.slow
@pytest.mark.parametrize("code", [*LOOPS, *TEXT, *TAIL])
def test_the_loop_of_a_page_has_its_fault_and_no_other(code: str, tmp_path: Path) -> None:
    result = audit_loops(tmp_path, "Example", code)
    assert code in result.faults | result.notes, result
    assert result.faults <= {code}, result


@pytest.mark.slow
@pytest.mark.parametrize("codes", [LOOPS, TEXT[:1], TEXT[1:], TAIL[:1], TAIL[1:]], ids=lambda codes: codes[-1])
def test_the_repaired_loops_of_pages_are_equivalent(codes: tuple[str, ...], tmp_path: Path) -> None:
    """Each is followed for the updates of an epoch; the same script with one loop of an example has a fault."""
    result = audit_loops(tmp_path, "Use instead", *codes)
    assert (result.outcome, result.faults) == ("equivalent", set()), result
    assert not result.notes & {*codes}, result
    assert len(result.document["updates"]) == 2 * len(codes), result
