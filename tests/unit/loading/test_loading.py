"""From `--model` to a problem: what users name, what their factories return, and every sentence about what is wrong."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import gaverify
from gaverify.cli import main
from gaverify.errors import MissingPackage, ProblemError, SpecError
from gaverify.loading import load_problem
from gaverify.spec import Spec, parse_spec

MINE = """\
import random
import gaverify
import numpy
import torch
from torch import nn
from torch.nn import functional as F

SIZE = 3

def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

def tuple_of_three(batch_size=8, width=4, noise=0.0):
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    return model, loss, (torch.randn(batch_size, 3), torch.randn(batch_size, 1))

def problem(width=4):
    return gaverify.Problem(*tuple_of_three(width=width), name=None)

def draws():
    model, _, _ = tuple_of_three()
    numbers = [random.random(), numpy.random.rand(), torch.rand(()).item()]
    return model, loss, (torch.tensor([numbers] * 8), torch.zeros(8, 1))

def keywords(**options):
    return tuple_of_three(**options)

def demanding(width, depth): ...

class Net(nn.Module):
    def __init__(self, outputs=5):
        super().__init__()
        self.layer = nn.Linear(6, outputs)

    def forward(self, x):
        return self.layer(x.flatten(1))

class Maker:
    def bound(self): ...

    class Inner:
        @staticmethod
        def make(batch_size=8):
            return tuple_of_three(batch_size)

def raises():
    return [][3]

def leaves():
    raise SystemExit(4)

def parses():
    import argparse

    argparse.ArgumentParser().parse_args(["--unknown"])

def many_lines():
    raise ValueError("one\\ntwo")

def nothing():
    tuple_of_three()

def pair():
    return nn.Linear(1, 1), (torch.ones(8, 1),)

def no_model():
    return loss, nn.Linear(1, 1), torch.ones(8, 1)

def no_loss():
    return gaverify.Problem(nn.Linear(1, 1), "mse", torch.ones(8, 1))

def data_reader(data, pretrained="none"):
    model, loss, batch = tuple_of_three()
    model.told = (data, pretrained)
    return model, loss, batch

built = problem()
net = Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with `mine.py` in it, and Python's import state given back in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def load(model: str, **options: Any) -> gaverify.Problem:
    return load_problem(parse_spec({"model": model, **options}, "test"))


def refused(model: str, **options: Any) -> str:
    with pytest.raises((SpecError, ProblemError)) as caught:
        load(model, **options)
    return str(caught.value)


# --- what can be named --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mine:tuple_of_three", "mine:problem", "mine:keywords", "mine:Maker.Inner.make", "mine:built"]
)
def test_what_can_be_named(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for named in (name, name.replace("mine:", "./mine.py:")):
        assert load(named).name == named
    assert main(["run", "--model", name]) == 0
    assert name in capsys.readouterr().out


def test_modules_of_packages_and_files_that_take_nobodys_place(folder: Path) -> None:
    (folder / "pack" / "age").mkdir(parents=True)
    (folder / "pack" / "age" / "models.py").write_text("from mine import problem as make\n")
    assert isinstance(load("pack.age.models:make"), gaverify.Problem)
    (folder / "fractions.py").write_text("from mine import tuple_of_three as make\n")
    before = sys.modules.get("fractions")
    load("fractions.py:make")
    assert sys.modules.get("fractions") is before


def test_a_file_elsewhere_imports_its_neighbours(folder: Path) -> None:
    for name, width in (("one", 5), ("two", 7)):
        (folder / name).mkdir()
        (folder / name / "layers.py").write_text(f"WIDTH = {width}\n")
        (folder / name / "model.py").write_text(
            "from layers import WIDTH\nfrom mine import tuple_of_three\n"
            "def make():\n    return tuple_of_three(width=WIDTH)\n"
        )
    widths = [load(f"{name}/model.py:make").model[0].out_features for name in ("one", "two", "one")]  # type: ignore[index]
    assert widths == [5, 7, 5], "each gets its own `layers`"


def test_an_import_inside_the_forward_still_works_during_the_run(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "late.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "sub" / "model.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 1)\n"
        "    def forward(self, x):\n        from late import double\n        return double(super().forward(x))\n"
    )
    words = ["--model", "sub/model.py:Net", "--input-shape", "3", "--loss", "mse_loss"]
    assert main(["run", *words]) == 0


def test_arguments_and_options_reach_the_factory(folder: Path) -> None:
    problem = load("mine:tuple_of_three", model_args={"width": 9}, batch_size=12)
    assert problem.model[0].out_features == 9 and len(problem.batch[0]) == 12  # type: ignore[index]
    assert load("mine:keywords", model_args={"width": 2}).model[0].out_features == 2  # type: ignore[index]
    assert load("mine:data_reader", data="d").model.told == ("d", "none")
    assert load("mine:data_reader", data="d", pretrained="p").model.told == ("d", "p")


def test_a_factory_without_batch_size_is_cut_to_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", "mine:problem", "--batch-size", "4", "--format", "json"]) == 0
    assert '"batch_size": 4' in capsys.readouterr().out
    assert main(["run", "--model", "mine:problem", "--batch-size", "9"]) == 2
    assert "--batch-size 9: the factory made a batch of 8" in capsys.readouterr().err


def test_the_seed_decides_and_the_generators_are_restored(folder: Path) -> None:
    (folder / "bad.py").write_text("from mine import draws\ndef make():\n    draws()\n    raise ValueError\n")
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = [random.random(), numpy.random.rand(), torch.rand(()).item()]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    first, again, other = load("mine:draws"), load("mine.py:draws"), load("mine:draws", seed=2**40)
    assert torch.equal(first.batch[0], again.batch[0]) and not torch.equal(first.batch[0], other.batch[0])
    assert refused("bad:make") == "`bad:make` raised ValueError at bad.py:4"
    assert expected == [random.random(), numpy.random.rand(), torch.rand(()).item()]


# --- what is not there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mien:problem", "in the current folder or among the installed packages; did you mean `mine`?"),
        ("zzz.yyy:f", "start gaverify in the folder that holds `zzz`, or write `path/to/yyy.py:factory`"),
        ("mine.problem:x", "`mine` is a module, not a package; an attribute follows a colon: `mine:problem`"),
        ("torch.nnn:Linear", "no module `torch.nnn` in the package `torch`; did you mean `torch.nn`?"),
        ("mine:probelm", "`mine` has no attribute `probelm`; did you mean `problem`?"),
        ("mine:zzz", "`mine` has no attribute `zzz`; it has `Maker`, `Net`, `data_reader`"),
        ("mine:Maker.Iner", "`mine:Maker` has no attribute `Iner`; did you mean `Inner`?"),
        ("mien.py:problem", "no file `mien.py`; did you mean `mine.py`?"),
        ("no/where.py:problem", "no file `no/where.py`; paths start from the current folder"),
        ("mine.py", "is a file; write `mine.py:loss`"),
        ("a/mine:problem", "`a/mine:problem` names no factory; write `package.module:factory` or `file.py:factory`"),
        ("mine:", "names no factory; write `package.module:factory`"),
        (":problem", "names no factory"),
        ("mine.py:problem:x", "`mine.py:problem:x` names no factory; write `package.module:factory`"),
        (".mine:problem", "`.mine:problem` names no factory"),
        ("./nowhere", "`./nowhere` does not exist; write `file.py:factory`"),
        ("../nowhere", "`../nowhere` does not exist"),
        ("/etc/passwd", "`/etc/passwd` is no Python file; write `file.py:factory`"),
        ("n" * 300, "there is no built-in `nnn"),
        ("mine.problem", "`mine.problem` has no colon; write `mine:problem`"),
        ("mine:SIZE", "`mine:SIZE` is an int, not a factory"),
        ("mine:raises", "`mine:raises` raised IndexError at mine.py:47: list index out of range"),
        ("mine:leaves", "`mine:leaves` called sys.exit(4) at mine.py:"),
        ("mine:nothing", "returned None; is its `return` missing? a factory returns a gaverify.Problem, a tuple"),
        ("mine:pair", "returned a tuple of 2; return (model, loss, batch)"),
        ("mine:no_model", "the model is a function, not a torch.nn.Module; the order is (model, loss, batch)"),
        ("mine:no_loss", "the loss is a str; write a function `loss(model, batch)`"),
        ("mine:Maker", "returned a Maker; a factory returns"),
        ("mine:demanding", "`mine:demanding` needs the argument `width`; give `--model-arg width=…`"),
        ("mine:demanding", "needs the argument `depth`"),
        ("mine:Maker.bound", "`mine:Maker.bound` is a method that needs an object; name a function"),
        ("mine:parses", "`mine:parses` called sys.exit(2) at mine.py:"),
        ("mine:many_lines", "`mine:many_lines` raised ValueError at mine.py:"),
        ("mine:Net", "returned only a module, Net; add --input-shape and --loss"),
    ],
)
def test_what_is_missing_or_does_something_else_is_named(folder: Path, name: str, sentence: str) -> None:
    assert sentence in refused(name)
    assert main(["run", "--model", name]) == 2


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import torch\n\n1 / 0\n", "importing `bad` raised ZeroDivisionError at bad.py:3: division by zero"),
        ("import nothing_there\n", "raised ModuleNotFoundError at bad.py:1: No module named 'nothing_there'"),
        ("from mine import absent\n", "ImportError at bad.py:1: cannot import name 'absent' from 'mine'"),
        ("def make(:\n", "importing `bad` raised SyntaxError at bad.py:1: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "sys.exit(3) at bad.py:2; put what the script runs under `if __n"),
    ],
)
def test_an_import_that_raises(folder: Path, source: str, sentence: str) -> None:
    (folder / "bad.py").write_text(source)
    assert sentence in refused("bad:make")
    assert sentence.replace("`bad`", "`bad.py`") in refused("bad.py:make")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from {}.models import net\n", "timm_x"),
        *itertools.product(
            ("import {}\n", "def make():\n    import {}\n"), ("timm_x", "layer", "src.ours.x", "torch.nothing_there")
        ),
    ],
)
def test_a_package_that_is_not_installed_is_told_from_a_wrong_import(
    folder: Path, source: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may be skipped in a folder of specs, the others never: nobody could install them."""
    for path in ("src/ours", ".git", "deep"):
        (folder / path).mkdir(parents=True)
    (folder / "deep" / "layers.py").write_text("")
    monkeypatch.chdir(folder / "deep")  # from where the project's own `src` is not found
    (folder / "deep" / "bad.py").write_text(source.format(name))
    with pytest.raises(ProblemError, match=r"ModuleNotFoundError at .*bad\.py:") as caught:
        load_problem(Spec(model=f"{folder}/deep/bad.py:make"))
    assert isinstance(caught.value, MissingPackage) is (name == "timm_x"), caught.value
    assert (f"install the package that has `{name}`" in str(caught.value)) is (name == "timm_x")


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("mine:problem", {"model_args": {"widht": 1}}, "no argument `widht`; did you mean `width`? It takes `width`"),
        ("mine:raises", {"model_args": {"a": 1}}, "`mine:raises` takes no argument `a`, nor any other"),
        ("mine:problem", {"data": "d"}, "--data: `mine:problem` has no parameter `data` for it"),
        ("mine:problem", {"loss": "mse_loss"}, "brings its own batch and loss; --loss is for a factory that returns"),
        ("mine:built", {"model_args": {"width": 1}}, "is an existing object and cannot use `--model-arg width`"),
        ("mine:built", {"pretrained": "p"}, "is an existing object and cannot use `--pretrained`"),
    ],
)
def test_options_that_do_not_fit(folder: Path, name: str, options: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(name, **options)


# --- bare modules -------------------------------------------------------------------------------------------------

BARE = """\
import torch
from torch import nn
from types import SimpleNamespace


def dense(outputs=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, outputs))


def squashed():
    return nn.Sequential(dense(), nn.Sigmoid())

def logarithms():
    return nn.Sequential(dense(), nn.LogSoftmax(1))

def segmentation():
    return nn.Conv2d(3, 5, 3, padding=1)

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))

def language():
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))

def double():
    return dense().double()

class Wrapped(nn.Module):
    def __init__(self, how="object"):
        super().__init__()
        self.inner, self.how, self.calls = dense(), how, 0
    def forward(self, x):
        self.calls += 1
        y = self.inner(x)
        return {"object": SimpleNamespace(loss=None, logits=y), "tuple": (y, y + 1), "mapping": {"out": y},
                "text": "none", "scalar": y.sum(), "list": [y]}[self.how]
"""


@pytest.fixture
def bare(folder: Path) -> Path:
    (folder / "bare.py").write_text(BARE)
    return folder


@pytest.mark.parametrize(
    ("factory", "loss", "classes", "targets"),
    [
        ("dense", "cross_entropy", 4, (8,)),
        ("logarithms", "nll_loss", 0, (8,)),
        ("dense", "multi_margin_loss", 0, (8,)),
        ("dense", "multilabel_margin_loss", 0, (8, 4)),
        ("dense", "multilabel_soft_margin_loss", 4, (8, 4)),
        ("dense", "mse_loss", 0, (8, 4)),
        ("dense", "l1_loss", 0, (8, 4)),
        ("dense", "smooth_l1_loss", 0, (8, 4)),
        ("dense", "huber_loss", 0, (8, 4)),
        ("squashed", "binary_cross_entropy", 0, (8, 4)),
        ("dense", "binary_cross_entropy_with_logits", 0, (8, 4)),
        ("logarithms", "kl_div", 0, (8, 4)),
        ("dense", "poisson_nll_loss", 0, (8, 4)),
        ("dense", "soft_margin_loss", 0, (8, 4)),
        ("dense", "hinge_embedding_loss", 0, (8, 4)),
        ("segmentation", "cross_entropy", 5, (8, 2, 2)),
        ("segmentation", "mse_loss", 0, (8, 5, 2, 2)),
        ("lazy", "cross_entropy", 0, (8,)),
        ("double", "mse_loss", 0, (8, 4)),
        ("Wrapped", "cross_entropy", 0, (8,)),
    ],
)
def test_bare_modules_get_targets_that_fit(
    bare: Path, factory: str, loss: str, classes: int, targets: tuple[int, ...]
) -> None:
    options = {"classes": classes} if classes else {}
    problem = load(f"bare:{factory}", loss=loss, input_shape=[3, 2, 2], **options)
    assert problem.batch[0].shape == (8, 3, 2, 2) and problem.batch[1].shape == targets
    assert gaverify.verify(problem, diagnose=False).outcome is gaverify.Outcome.EQUIVALENT


@pytest.mark.parametrize("how", ["object", "tuple", "mapping", "list"])
def test_the_loss_finds_its_tensor(bare: Path, how: str) -> None:
    options: dict[str, Any] = {"input_shape": [12], "loss": "cross_entropy", "model_args": {"how": how}}
    problem = load("bare:Wrapped", batch_size=3, **options)
    assert problem.batch_size == 3 and problem.loss(problem.model, problem.batch).dim() == 0
    assert problem.model.calls == 1, "the trial forward ran on a copy"


def test_an_embedding_gets_integers_and_classes_in_the_last_dimension(bare: Path) -> None:
    options: dict[str, Any] = {"input_shape": [7], "loss": "cross_entropy"}
    problem = load("bare:language", **options)
    assert problem.batch[0].dtype == torch.int64 and int(problem.batch[0].max()) < 11
    assert problem.batch[1].shape == (8, 7) and int(problem.batch[1].max()) > 6, "11 classes, not 7"
    words = ["--model", "bare:language", "--input-shape", "7", "--loss", "cross_entropy", "--classes", "11"]
    assert main(["run", *words]) == 0
    assert "12: the output of the model has shape [8, 7, 11]" in refused("bare:language", classes=12, **options)


@pytest.mark.parametrize("name", ["torch.nn:Identity", "mine:net"])
def test_modules_of_others_and_built_ones(folder: Path, name: str) -> None:
    assert len(load(name, input_shape=[6], loss="mse_loss", batch_size=5).batch[1]) == 5


@pytest.mark.parametrize(
    ("factory", "loss", "shape", "options", "sentence"),
    [
        ("dense", "cross_entropy", None, {}, "add --input-shape (such"),
        ("dense", None, [12], {}, "add --loss (such"),
        ("dense", "cross_entropi", [12], {}, "did you mean `cross_entropy`?"),
        ("dense", "CrossEntropyLoss", [12], {}, "did you mean `cross_entropy`?"),
        ("dense", "mse", [12], {}, "did you mean `mse_loss`?"),
        ("dense", "relu", [12], {}, "no loss function `relu`"),
        ("dense", "ctc_loss", [12], {}, "takes lengths beside the model's output; write a factory"),
        ("dense", "triplet_margin_loss", [12], {}, "an anchor, a positive and a negative"),
        ("dense", "cosine_embedding_loss", [12], {}, "takes two inputs and a target"),
        ("dense", "cross_entropy", [12], {"classes": 3}, "that is 4 classes; write --classes 4"),
        ("dense", "mse_loss", [12], {"classes": 3}, "mse_loss has no classes; leave it out"),
        ("dense", "binary_cross_entropy", [12], {}, "binary_cross_entropy_with_logits accepts any"),
        ("dense", "mse_loss", [13], {}, "inputs of shape [8, 13] raised RuntimeError: mat1 and"),
        ("segmentation", "multi_margin_loss", [3, 4, 4], {}, "does not take the output of"),
        ("Wrapped", "mse_loss", [12], {"model_args": {"how": "text"}}, "a str without a tensor"),
        ("Wrapped", "mse_loss", [12], {"model_args": {"how": "scalar"}}, "has shape [] for 8"),
        ("Wrapped", "mse_loss", [12], {"model_args": {"how": "x"}}, "raised KeyError at bare.py:35: 'x'"),
    ],
)
def test_bare_modules_and_options_that_do_not_fit(
    bare: Path, factory: str, loss: str | None, shape: list[int] | None, options: dict[str, Any], sentence: str
) -> None:
    given = {key: value for key, value in {"loss": loss, "input_shape": shape}.items() if value is not None}
    assert sentence in refused(f"bare:{factory}", **given, **options)
