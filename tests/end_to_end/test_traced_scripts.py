"""Training scripts whose fault has a line of its own, and their right twins: what an audit says of each.

A script of `tests/scripts/traced` holds several faults, of which an argument picks one; `--right` repairs it. Comments
mark the lines of each:

- `# fault: NAME`: a user has to change this line.
- `# reads: NAME`: the two runs first differ here because of the fault.
- `# uses: NAME`: the value of the fault goes through here, as in the call of a module that holds it.

A finding names the true line if its location, or a place that it mentions, is marked in one of the first two ways. A
finding that is proven lies at a line with any of these marks: all others are innocent.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from audits import SCRIPTS, Audited, audit
from torch.optim.optimizer import register_optimizer_step_post_hook

pytestmark = pytest.mark.slow

FOLDER = SCRIPTS / "traced"
# Why an audit does not call a fault divergent.
UNFOUND = {
    "first_rows": "the loop changes what it feeds to the model, and the audit takes the rows for other samples: "
    "inconclusive"
}
# The module that holds the line is suspected, or proven where it is called; or nothing explains the difference.
UNNAMED = {"long_words", "norm_of_all", "sparsified", "shifted"}
MARK = re.compile(r"(?:# |; )(fault|reads|uses): ([\w ]+)")
PLACE = re.compile(r"(\w+\.py):(\d+)")


class Fault(NamedTuple):
    """A fault of a script, and the kind of cause that it is."""

    name: str
    script: str
    kind: str


class Side(NamedTuple):
    """What one run is started with: arguments, or constants of its source."""

    arguments: str
    constants: dict[str, str]


# Of each kind the hardest; the twin of the first is audited.
FAULTS = [
    Fault(name, script, kind)
    for kind, scripts in {
        "number": {"speller": "forcing", "autoencoder": "warmup"},
        "buffer, queue, closure": {"clicks": "balancer", "autoencoder": "first_rows"},
        "branch": {"policy": "early_stop", "autoencoder": "lazy_penalty", "speller": "long_words"},
        "mixing": {"policy": "priorities", "tagger": "norm_of_all"},
        "handed value": {"policy": "ranked_rewards", "tagger": "smoothing"},
        "changed gradient": {"speller": "unit_gradients", "clicks": "sparsified"},
        "edited gradient": {"edited": "noised called hooked blended"},
        "unseen edit": {"edited": "shifted"},
    }.items()
    for script, names in scripts.items()
    for name in names.split()
]
FIRST_OF_KIND = [next(fault for fault in FAULTS if fault.kind == kind) for kind in {fault.kind: 0 for fault in FAULTS}]


def per_fault(faults: list[Fault], unfound: Iterable[str] = ()) -> pytest.MarkDecorator:
    """A test per fault; those of `unfound` fail, for the reason given."""

    def case(fault: Fault) -> Any:
        marks = pytest.mark.xfail(strict=True, reason=UNFOUND[fault.name]) if fault.name in unfound else ()
        return pytest.param(fault, id=f"{fault.script} {fault.name}", marks=marks)

    return pytest.mark.parametrize("fault", [case(fault) for fault in faults])


def side(fault: Fault, right: bool, size: int, count: int) -> Side:
    """The settings of a run with micro-batches of `size` rows, in the way in which the script takes them."""
    if fault.script == "tagger":
        return Side("", {"BATCH": str(size), "ACCUM": str(count), "FAULT": f"'{fault.name}'", "RIGHT": str(right)})
    options = ("-b", "-k") if fault.script == "clicks" else ("--batch-size", "--accum")
    arguments = f"--fault {fault.name} {options[0]} {size} {options[1]} {count}"
    return Side(f"{arguments} --right" if right else arguments, {})


def sides(fault: Fault, right: bool) -> dict[str, Side]:
    """A batch of 16 rows, and four micro-batches of 4."""
    return {"full": side(fault, right, 16, 1), "accumulated": side(fault, right, 4, 4)}


def audit_of(fault: Fault, right: bool = False) -> Audited:
    """The audit of a fault, or of its twin."""
    started = sides(fault, right)
    options = [
        word
        for run, given in started.items()
        for name, value in given.constants.items()
        for word in (f"--{run}-set", f"{name}={value}")
    ]
    arguments = [given.arguments or None for given in started.values()]
    return audit(f"traced/{fault.script}.py", *arguments, options=options)


class Enough(Exception):
    """Ends a script after two updates."""


def gradients(script: Path, given: Side, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[torch.Tensor]:
    """The gradients of the first two updates, without gaverify: the script is run in this process."""
    text = script.read_text(encoding="utf-8")
    for name, value in given.constants.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1, name
    copied = folder / script.name
    copied.write_text(text, encoding="utf-8")
    taken: list[torch.Tensor] = []

    def take(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        taken.append(
            torch.cat(
                [(torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten() for weight in weights]
            )
        )
        if len(taken) == 2:
            raise Enough

    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(script.parent))
        patch.setattr(sys, "argv", [script.name, *given.arguments.split()])
        hook = register_optimizer_step_post_hook(take)  # behind what the optimizer's own hooks change
        try:
            runpy.run_path(str(copied), run_name="__main__")
        except Enough:
            pass
        finally:
            hook.remove()
    assert len(taken) == 2
    return taken


def differences(fault: Fault, right: bool, patch: pytest.MonkeyPatch, folder: Path) -> list[float]:
    """How far the accumulated gradients of the first two updates are from the full batch's."""
    script = FOLDER / f"{fault.script}.py"
    full, accumulated = (gradients(script, given, patch, folder) for given in sides(fault, right).values())
    return [float((own - of_full).norm() / of_full.norm()) for of_full, own in zip(full, accumulated, strict=True)]


@per_fault(FAULTS)
def test_plain_torch_tells_the_fault_from_its_twin(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert differences(fault, False, monkeypatch, tmp_path)[0] > 1e-3
    assert max(differences(fault, True, monkeypatch, tmp_path)) < 1e-5


def marked_lines(fault: Fault) -> dict[str, set[tuple[str, int]]]:
    """File name and number of the lines that carry a mark of a fault, by the kind of mark."""
    lines: dict[str, set[tuple[str, int]]] = {"fault": set(), "reads": set(), "uses": set()}
    for path in FOLDER.glob("*.py"):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for mark, names in MARK.findall(text):
                if fault.name in names.split():
                    lines[mark].add((path.name, number))
    assert lines["fault"], fault
    return lines


def places(value: Any) -> set[tuple[str, int]]:
    """Every file name and line that a finding mentions."""
    if isinstance(value, dict):
        own = {(Path(value["file"]).name, value["line"])} if value.get("file") and value.get("line") else set()
        return own.union(*map(places, value.values()))
    if isinstance(value, list):
        return set().union(*map(places, value))
    return {(name, int(line)) for name, line in PLACE.findall(value)} if isinstance(value, str) else set()


def causes(result: Audited) -> list[dict[str, Any]]:
    """The findings that are faults, and GAV000, which says where a difference begins that nothing explains."""
    found = result.document["findings"] if result.out else []
    return [finding for finding in found if finding["severity"] == "fault" or finding["code"] == "GAV000"]


@per_fault(FAULTS, UNFOUND)
def test_a_fault_is_found_at_its_line_and_no_innocent_line_is_proven(fault: Fault) -> None:
    result, marks = audit_of(fault), marked_lines(fault)
    assert (result.code, result.outcome) == (1, "divergent"), str(result)
    found = causes(result)
    proven = set().union(*(places(finding["location"] or {}) for finding in found if finding["proven"]))
    assert proven <= set().union(*marks.values()), str(result)
    is_named = bool(places(found) & (marks["fault"] | marks["reads"]))
    assert is_named == (fault.name not in UNNAMED), str(result)
    if fault.kind == "edited gradient":  # after the last backward pass
        (edited,) = [finding for finding in found if finding["severity"] == "fault"]
        assert (edited["code"], edited["proven"]) == ("GAV606", True), str(result)


@per_fault(FIRST_OF_KIND)
def test_the_twin_is_quiet(fault: Fault) -> None:
    result = audit_of(fault, right=True)
    assert (result.code, result.outcome, causes(result)) == (0, "equivalent", []), str(result)
