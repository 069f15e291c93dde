"""What people have at hand works, or the sentence says what to type; a name that does not exist is answered at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gaverify
from gaverify.cli import main
from gaverify.errors import ProblemError, SpecError
from gaverify.loading import load_problem
from gaverify.loading.bare import first_batch
from gaverify.loading.importing import NameKind, check_name, kind_of
from gaverify.spec import Spec

NET = """\
import gaverify
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 5))

    def forward(self, x):
        return self.layers(x)

class Step(Net):
    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self(inputs), targets), "index": batch_idx}

class Whole(Step):
    def setup(self, stage):
        self.data = data()

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=8)

class Manual(Whole):
    automatic_optimization = False

class Skips(Whole):
    def training_step(self, batch):
        return None

class Own(Net):
    def forward(self, x, y):
        return {"loss": nn.functional.cross_entropy(self.layers(x), y)}

class Criterion(nn.Module):
    def forward(self, logits, targets):
        return nn.functional.cross_entropy(logits.softmax(1).log(), targets)

def data():
    return TensorDataset(torch.randn(16, 3), torch.randint(5, (16,)))

def plain_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def module_loss():
    return Net(), nn.CrossEntropyLoss(), tuple(data()[:8])

def functional_loss():
    return Net(), nn.functional.cross_entropy, list(data()[:8])

def loader():
    return Net(), plain_loss, DataLoader(data(), batch_size=8)

def workers():
    return Net(), plain_loss, DataLoader(data(), batch_size=8, num_workers=1, multiprocessing_context="spawn")

def loader_and_criterion():
    return gaverify.Problem(Net(), nn.CrossEntropyLoss(), DataLoader(data(), batch_size=8))

def step():
    return Step(), DataLoader(data(), batch_size=8)

def whole():
    return Whole()

def dictionary():
    return Own(), {"x": torch.randn(8, 3), "y": torch.randint(5, (8,))}

def only_loader():
    return DataLoader(data(), batch_size=8)

def empty_loader():
    return Net(), plain_loss, DataLoader(data(), batch_size=32, drop_last=True)

def dataset():
    return Net(), plain_loss, data()

def not_built():
    return Net

def a_dictionary():
    return {"model": Net()}

def own_criterion():
    return Net(), Criterion(), tuple(data()[:8])

def criterion_of_three():
    return Net(), nn.CrossEntropyLoss(), (torch.randn(8, 3), torch.randint(5, (8,)), torch.ones(8))

def wrong_loss_of_a_list():
    return Net(), lambda model, batch: model(batch["x"]).mean(), [torch.randn(8, 3), torch.randint(5, (8,))]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net_of_people", raising=False)
    (tmp_path / "net_of_people.py").write_text(NET)
    return tmp_path


def refused(model: str, **options: object) -> str:
    with pytest.raises((SpecError, ProblemError)) as caught:
        load_problem(Spec(model=model, **options))
    return str(caught.value)


WORKING = ["module_loss", "functional_loss", "loader", "workers", "loader_and_criterion", "step", "whole", "Whole"]


@pytest.mark.parametrize("factory", [*WORKING, "dictionary"])
def test_what_works(folder: Path, factory: str) -> None:
    assert main(["run", "--model", f"net_of_people.py:{factory}"]) == 0


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("only_loader", "returned a DataLoader; a loader is accepted in place of the batch"),
        ("empty_loader", "the DataLoader yields no batch"),
        ("dataset", "return a batch of it, or `DataLoader(dataset, batch_size=8)`"),
        ("not_built", "returned a type; return an object of it, `Net()`"),
        ("a_dictionary", "returned a dict; return gaverify.Problem(model="),
        ("Step", "`net_of_people.py:Step` has a training_step and no data; return (module, batch)"),
        ("Manual", "automatic_optimization = False"),
    ],
)
def test_what_the_sentence_says_to_type(folder: Path, factory: str, said: str) -> None:
    assert said in refused(f"net_of_people.py:{factory}")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("Skips", "its training_step returned None"),
        ("own_criterion", "this one takes `logits`: write `lambda model, batch: criterion(model(batch[0]), batch[1])`"),
        ("criterion_of_three", "the loss is CrossEntropyLoss, which compares outputs with targets, and the batch is a"),
        ("wrong_loss_of_a_list", "list indices must be integers"),
    ],
)
def test_what_goes_wrong_in_the_loss(folder: Path, factory: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", f"net_of_people.py:{factory}"]) == 2
    err = capsys.readouterr().err
    assert said in err and "give batch_size=" not in err


def test_a_list_of_samples_is_still_told_apart() -> None:
    model = nn.Linear(3, 1)
    batch = [{"x": [torch.randn(3), torch.randn(3), torch.randn(3)]} for _ in range(4)]
    with pytest.raises(ProblemError, match=r"was read as 4 samples: if it holds 3, give batch_size=3"):
        gaverify.verify(model, lambda model, batch: model(batch["x"]), batch, steps=2)


def test_a_criterion_is_found_wrong_all_the_same() -> None:
    """A loss that is taken as it comes must not hide a fault: a sum over the batch is not divided by K."""
    verdict = gaverify.verify(nn.Linear(3, 5), nn.MSELoss(reduction="sum"), (torch.randn(8, 3), torch.randn(8, 5)))
    assert [finding.code for finding in verdict.findings if finding.severity == "fault"] == ["GAV201"]


def test_batches_that_are_no_loaders_pass_through() -> None:
    for batch in (torch.ones(3), {"dataset": torch.ones(3)}, [torch.ones(3)], "text"):
        assert first_batch(batch) is batch
    assert first_batch(iter([1, 2])) == 1


def test_files_with_relative_imports(folder: Path) -> None:
    source = "from net_of_people import *\nfrom ..widths import WIDTH\ndef make(): return Net(WIDTH), *loader()[1:]\n"
    (folder / "project" / "models").mkdir(parents=True)
    (folder / "project" / "widths.py").write_text("WIDTH = 7\n")
    (folder / "project" / "models" / "net.py").write_text(source)
    problem = load_problem(Spec(model="project/models/net.py:make"))
    assert problem.model.layers[0].out_features == 7  # type: ignore[union-attr, index]


def run_python(*words: str) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


def test_a_file_beside_the_model_may_be_called_like_a_package_of_gaverify(folder: Path) -> None:
    (folder / "rich.py").write_text("raise RuntimeError('not this one')\n")
    assert "EQUIVALENT" in run_python("-m", "gaverify", "run", "--model", "net_of_people.py:loader")
    (folder / "uses_it.py").write_text("from rich import colours\n")
    assert "`rich` in `.` has the name of a package that gaverify needs: rename it" in refused("uses_it.py:make")


def test_spawned_workers_find_the_file(folder: Path) -> None:
    """Also where its name is no module's, or another module's."""
    names = ("net_of_people.py", "my-net.py", "click.py")
    for name in names:
        (folder / name).write_text("class Net:\n    pass\n")
    assert run_python("-c", CHILD, *names) == "Net\n" * 3


CHILD = """\
import multiprocessing, sys
from gaverify.loading.importing import import_factory
kinds = [import_factory(name + ":Net") for name in sys.argv[1:]]
assert "site-packages" in sys.modules["click"].__file__
with multiprocessing.get_context("spawn").Pool(1) as pool:
    for kind in kinds:
        print(pool.apply(repr, (kind,)).rpartition(".")[2].rstrip("'>"))
"""


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mlpp", "did you mean `mlp`?"),
        ("torch.nn.Linear", "has no colon; write `torch.nn:Linear`"),
        ("net_of_people", "is a module; write `net_of_people.py:data`"),
        ("net_of_people.py:Nett", "did you mean `Net`?"),
        ("net_of_people:wolrkers", "did you mean `workers`?"),
        ("nowhere_at_all:f", "there is no module `nowhere_at_all`"),
        ("absent.py:f", "there is no file `absent.py`"),
        ("model.pt", "`model.pt` does not exist; write `file.py:factory`"),
        ("weights.pt", "holds weights, not the model's code; write `gaverify init --checkpoint weights.pt`"),
        ("a.toml", "is a spec; write `gaverify run a.toml`"),
        ("a.ipynb", "is no Python file; write `file.py:factory`"),
        ("specs", "is a folder; write `gaverify run specs`"),
        ("code", "is a folder; write `code/m.py:make`"),
        ("empty", "is a folder; write `file.py:factory`"),
        ("x" * 5000 + ".py:f", "there is no file"),
    ],
)
def test_unknown_names_are_answered_without_torch(folder: Path, name: str, said: str) -> None:
    for path in ("a.toml", "weights.pt", "a.ipynb", "specs/a.toml", "code/m.py", "empty/notes.txt"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("def make(): ...\n" if "/" in path else "")
    with pytest.raises(SpecError) as caught:
        check_name(name)
    assert said in str(caught.value)
    assert main(["run", "--model", name]) == 2


def test_the_answer_comes_before_torch(folder: Path) -> None:
    code = """
import sys
from gaverify.cli import main
for name in ("mlpp", "net_of_people.py:Nett", "net_of_people.py:only_loader"):
    main(["run", "--model", name])
    print("torch" in sys.modules)
"""
    assert run_python("-c", code).split() == ["False", "False", "True"]


def test_names_that_only_running_the_module_tells_are_let_pass(folder: Path) -> None:
    sources = ("globals()['late'] = 1", "from os.path import *", "def __getattr__(name): ...", "late: int = 1")
    for source in (*sources, "a = (late := 1)"):
        (folder / "lazy_names.py").write_text(source)
        check_name("lazy_names.py:late")


def test_kinds(folder: Path) -> None:
    (folder / "saved").mkdir()
    (folder / "saved" / "config.json").write_text("{}")
    assert kind_of("mlp") is NameKind.BUILTIN and kind_of("a:b") is NameKind.FACTORY
    assert kind_of("saved") is kind_of("organisation/name") is NameKind.TRANSFORMERS
