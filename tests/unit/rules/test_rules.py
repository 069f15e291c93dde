"""The rule pages: every code has one, with its headings; each example fires its code, and its repair does not."""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import audit
from click.testing import CliRunner

import gaverify
from gaverify import SpecError, rules
from gaverify.cli import cli
from gaverify.patches.proposing import RECOGNISERS
from gaverify.rulebook import RulePage, find_page, rule_pages
from gaverify.rules import shares, unexplained
from gaverify.spec import Spec
from gaverify.verification import verify_spec

PAGES = {page.code: page for page in rule_pages()}
# section 7 of the design; the codes are stable once released
CATALOGUE = {
    "GAV101": "batch-statistics",
    "GAV102": "cross-sample-operation",
    "GAV103": "batch-coupled-loss",
    "GAV104": "batch-dependent-backward",
    "GAV201": "wrong-loss-scale",
    "GAV202": "mean-of-means",
    "GAV203": "empty-micro-batch",
    "GAV301": "aligned-randomness",
    "GAV302": "unalignable-randomness",
    "GAV303": "unrepeatable-backward",
    "GAV401": "state-changed-by-forward",
    "GAV402": "buffer-drift",
    "GAV403": "hidden-state",
    "GAV501": "low-precision-accumulation",
    "GAV502": "missing-gradient",
    "GAV503": "non-finite-gradient",
    "GAV601": "step-inside-window",
    "GAV602": "gradients-not-cleared",
    "GAV603": "gradients-cleared-inside-window",
    "GAV604": "trailing-window-lost",
    "GAV605": "trailing-window-misscaled",
    "GAV606": "clip-per-micro-batch",
    "GAV607": "scheduler-per-micro-batch",
    "GAV608": "scaler-per-micro-batch",
    "GAV609": "step-settings-differ",
    "GAV610": "loss-inputs-differ",
    "GAV701": "ranks-hold-different-gradients",
    "GAV702": "gradients-never-reduced",
    "GAV703": "mean-over-ranks",
    "GAV704": "wrong-rank-scale",
    "GAV705": "gather-without-gradient",
    "GAV706": "shard-local-norm",
    "GAV707": "rank-statistics",
    "GAV708": "synchronised-every-micro-batch",
    "GAV901": "uninformative-batch",
}
AUDITED = {rule.code for rule in rules.EVENTS} | {"GAV605", "GAV610", "GAV701", "GAV702", "GAV706", "GAV707", "GAV708"}
VERIFIED = [rule.code for rule in rules.RULES if rule.code not in AUDITED]
BOTH = [
    "GAV000",
    "GAV101",
    "GAV104",
    "GAV201",
    "GAV202",
    "GAV203",
    "GAV301",
    "GAV302",
    "GAV303",
    "GAV402",
    "GAV502",
    "GAV503",
    "GAV703",
    "GAV704",
    "GAV705",
    "GAV901",
]


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


@pytest.mark.parametrize("code", VERIFIED)
def test_example_and_repair_differ(code: str) -> None:
    for kind in (A_MODEL, A_LOOP) if code in BOTH else (None,):
        example, repair = (code_block(PAGES[code], heading, kind) for heading in ("Example", "Use instead"))
        assert example and repair and example != repair


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
            text = PAGES[code].sections[heading]
            assert A_LOOP in text and code_block(PAGES[code], heading, A_LOOP), (code, heading)
            model = code_block(PAGES[code], heading, A_MODEL)
            assert model or (code == "GAV000" and heading == "Example"), "what is known becomes a rule"


@pytest.mark.parametrize("code", sorted(set(CATALOGUE) - set(VERIFIED)))
def test_audit_examples_are_python(code: str) -> None:
    for heading in ("Example", "Use instead"):
        assert ast.parse(code_block(PAGES[code], heading)).body


@pytest.mark.parametrize("code", BOTH)
def test_examples_of_loops_are_python(code: str) -> None:
    for heading in ("Example", "Use instead"):
        assert ast.parse(code_block(PAGES[code], heading, A_LOOP)).body


def test_explain_after_an_audit_shows_the_training_loop() -> None:
    """GAV202 of an audit: the page has the loop and how its line reads when repaired."""
    printed = CliRunner().invoke(cli, ["explain", "GAV202"]).output
    assert "A training loop:" in printed and "for window in windows(loader, K):" in printed


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


def run(*words: str, flags: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, *flags, "-m", "gaverify", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_explain_on_a_pipe_is_plain_text_of_80_columns() -> None:
    done = run("explain", "gav202")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("GAV202 mean-of-means: ")
    assert [line for line in lines if line in HEADINGS] == list(HEADINGS)
    assert "    full         Σ_k S_k / Σ_k n_k  =  Σ_k (n_k / N) (S_k / n_k),  N = Σ_k n_k" in lines, "as it stands"
    assert "- Hugging Face, Fixing Gradient Accumulation, 2024," in lines


@pytest.mark.parametrize("code", PAGES)
def test_a_page_fits_into_80_columns(code: str) -> None:
    output = CliRunner().invoke(cli, ["explain", code]).output
    wide = [line for line in output.splitlines() if len(line) > 80 and "https://" not in line]
    assert wide == []


def test_the_code_of_a_page_runs_when_it_is_copied_from_a_terminal() -> None:
    output = CliRunner().invoke(cli, ["explain", "GAV102"]).output
    block = output.partition("\nExample\n")[2].partition("\nUse instead\n")[0]
    assert "\n".join(line[4:] for line in block.splitlines()).strip() == code_block(PAGES["GAV102"], "Example")


def test_explain_on_a_terminal_is_styled_and_says_the_same() -> None:
    plain = run("explain", "GAV101").stdout
    styled = run("explain", "GAV101", FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "\x1b[1" in styled
    assert re.sub(r"\x1b\[[0-9;]*m", "", styled) == plain


def test_pages_survive_python_without_docstrings() -> None:
    assert run("explain", "GAV606", flags=("-OO",)).stdout == run("explain", "GAV606").stdout != ""


@pytest.mark.parametrize("words", [("explain", "GAV101"), ("rules",), ("rules", "--format", "json")])
def test_neither_command_imports_torch(words: tuple[str, ...]) -> None:
    code = "import sys; from gaverify.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_explain_exits_with_2_for_what_it_does_not_know() -> None:
    done = run("explain", "GAV105")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gaverify: error: explain: there is no rule `GAV105`; did you mean GAV104 batch-dependent-backward?\n"
    )
    assert run("explain").returncode == 2


def test_rules_prints_a_line_per_rule_on_a_pipe() -> None:
    done = run("rules")
    assert (done.returncode, done.stderr) == (0, "")
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["code", "name", "severity", "finds"]
    for row, page in zip(rows, rule_pages(), strict=False):
        assert re.split(r"  +", row) == [page.code, page.name, page.severity, page.summary]
    assert rows[len(PAGES) :] == ["", "Read one with `gaverify explain CODE`."]


def test_rules_as_json() -> None:
    document = json.loads(run("rules", "--format", "json").stdout)
    assert document["version"] == 1
    assert document["rules"][1] == {
        "code": "GAV101",
        "name": "batch-statistics",
        "severity": "fault",
        "summary": "a normalisation layer uses the statistics of the batch that it is given",
        "patch": PAGES["GAV101"].patch,
    }
    assert len(document["rules"]) == len(PAGES)


def test_rules_takes_no_other_format() -> None:
    assert run("rules", "--format", "yaml").returncode == 2


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
K, device, epochs = args.accum, "cpu", 2
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
TEXT, TAIL = {"GAV202", "GAV203"}, {"GAV604", "GAV605"}
CODES = (
    "GAV101",
    "GAV201",
    "GAV202",
    "GAV203",
    "GAV402",
    "GAV601",
    "GAV602",
    "GAV603",
    "GAV604",
    "GAV605",
    "GAV606",
    "GAV607",
    "GAV608",
    "GAV609",
    "GAV610",
)


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["Example", "Use instead"])
@pytest.mark.parametrize("code", CODES)
def test_a_page_is_right_about_its_example(code: str, heading: str, tmp_path: Path) -> None:
    page = find_page(code)
    loop = code_block(page, heading, A_LOOP) or code_block(page, heading)
    if "for epoch" not in loop:
        loop = "for epoch in range(epochs):\n" + textwrap.indent(loop, "    ")
    script = tmp_path / "train.py"
    script.write_text(HEAD.replace("EMPTY", str(code == "GAV203")) + loop + "\n", encoding="utf-8")
    common = f"--samples {24 if code in TAIL else 32}" + (" --text" if code in TEXT else "")
    result = audit(script, "--batch-size 16 --accum 1", "--batch-size 4 --accum 4", common)
    if heading == "Example":
        assert code in result.faults | result.notes, result
        assert result.faults <= {code}, result
    else:
        assert code not in result.faults | result.notes, result
        assert (result.outcome, result.faults) == ("equivalent", set()), result
