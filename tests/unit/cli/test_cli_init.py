"""init, models and schema: what is written is run, for every kind of model."""

from __future__ import annotations

import json
import re
import sys
import types
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import nn

import gaverify
from gaverify.cli import main
from gaverify.cli.auditing import read_options
from gaverify.cli.scaffolding import KINDS, template
from gaverify.loading.importing import import_factory
from gaverify.spec import OPTIONS, Spec, load_specs, read_specs
from gaverify.zoo import Builtin

# --- `gaverify init`, `models` and `schema` --------------------------------------------------------------------------


@pytest.mark.smoke
def test_init_writes_a_spec_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.toml"
    assert main(["init", str(file)]) == 0
    ((_, spec),) = load_specs([file], {})
    assert spec == Spec(model="mlp")
    assert str(file) in capsys.readouterr().out


@pytest.mark.smoke
def test_init_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.toml"
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert "--force" in capsys.readouterr().err and file.read_text() == "mine"
    assert main(["init", str(file), "--force"]) == 0
    assert file.read_text() != "mine"
    assert main(["init", str(tmp_path / "gone" / "x.toml")]) == 2


@pytest.mark.smoke
def test_the_starter_holds_every_key_and_its_comments_are_right(tmp_path: Path) -> None:
    for field in OPTIONS:
        assert re.search(rf"^(# )?\[?{field.replace('_', '-')}(\]| =)", template("parts/spec"), re.MULTILINE), field
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# (?=[a-z-]+ = |\[)", "", template("parts/spec"), flags=re.MULTILINE))
    ((_, spec),) = load_specs([file], {})
    assert spec.model_args == {"width": 32} and spec.rtol == 1e-5


def test_the_options_of_an_audit_hold_every_key_and_their_comments_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--kind", "audit"]) == 0
    assert "Next: gaverify audit audit.toml" in capsys.readouterr().out
    text = Path("audit.toml").read_text(encoding="utf-8")
    written = read_options(Path("audit.toml")).request
    assert (written.script, written.full) == ("train.py", ("--batch-size", "16", "--accum", "1"))
    Path("all.toml").write_text(re.sub(r"^# (?=[a-zA-Z_-]+ = |\[)", "", text, flags=re.MULTILINE))
    options = read_options(Path("all.toml"))
    given = vars(options.request).items()
    assert [name for name, value in given if value in (None, (), {}, "")] == ["module"]
    assert options.accept and options.expect == "divergent"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.py"], '`script = "train.py"`'),
        (["--model", "net.py:Net"], "leave out `--model`"),
        ([], "`audit.toml` exists already"),
    ],
)
def test_what_cannot_be_an_audits_options(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("audit.toml").touch()
    assert main(["init", "--kind", "audit", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_the_example_of_an_audit_is_no_spec() -> None:
    configs = Path(gaverify.__file__).parent.parent / "configs"
    files = {file for file, _ in read_specs([configs])}
    assert configs / "mlp.toml" in files and configs / "audit" / "audit.toml" not in files


@pytest.mark.slow
@pytest.mark.smoke
def test_the_example_of_an_audit_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(Path(gaverify.__file__).parent.parent / "configs" / "audit")]) == 0
    assert "EQUIVALENT" in capsys.readouterr().out


@pytest.mark.smoke
def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"]


@pytest.mark.smoke
def test_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    zoo = types.ModuleType("gaverify.zoo")
    known = Builtin("mlp", "577", "8 × [16]", "mse", "equivalent", 8)
    zoo.__dict__["BUILTINS"] = (known,)
    monkeypatch.setitem(sys.modules, "gaverify.zoo", zoo)
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "577" in out and "[16]" in out and max(map(len, out.splitlines())) <= 80


# --- `gaverify init --model`: the spec and the factory that it writes are run, for every kind of model ---------------


NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        return self.layers(x)


class Image(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


class Words(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(96, 1))


class Step(Net):
    def training_step(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Sized(nn.Module):
    def __init__(self, width):
        super().__init__()


class Particular(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(2, 2, 2)


class Settings:
    pass


def make(batch_size=8):
    return Net(), lambda m, b: m(b).mean(), torch.randn(batch_size, 7)


built = Net()
size = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("nets_to_init", "forwards_to_init", "sub.nets_to_init", "sub"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "nets_to_init.py").write_text(NET)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "nets_to_init.py").write_text(NET)
    return tmp_path


NET_OF_OTHERS = "import torch\n\nNet = lambda: torch.nn.Linear(16, 10)\n"


def fill_in(folder: Path, **parts: str) -> str:
    """Does as the comments of a factory say, or as a part is given, and returns its text before that."""
    file = folder / "gaverify_model.py"
    written = file.read_text()

    def fill(line: re.Match[str]) -> str:
        return parts.get(line[1].replace(" ", "_"), line[2])

    filled = re.sub(r'gaverify\.fill_in\("the (.+?)"\)  # .*?such as (.*)', fill, written)
    file.write_text(filled.replace("import gaverify\n", "import gaverify\nfrom net_of_others import Net\n"))
    (folder / "net_of_others.py").write_text(NET_OF_OTHERS)
    return written


def missing_parts(out: str) -> list[str]:
    return re.findall(r"^  line \d+: (.*)$", out, re.MULTILINE)


def test_every_kind_has_a_template_and_every_template_a_kind() -> None:
    there = {entry.name for entry in files("gaverify.cli").joinpath("templates").iterdir()}
    assert there == {f"{kind}.txt" for kind in KINDS}


@pytest.mark.parametrize("kind", ["module", "dict", "dataloader"])
def test_a_template_says_what_is_missing_and_runs_once_it_is_filled_in(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--kind", kind]) == 0
    assert missing_parts(capsys.readouterr().out) == ["the loss", "the model", "the inputs", "the targets"]
    written = (folder / "gaverify_model.py").read_text()
    for part in ("model", "inputs", "targets", "loss"):
        assert main(["run", "gaverify.toml"]) == 2
        line = next(n for n, text in enumerate(written.splitlines(), 1) if f'fill_in("the {part}")' in text)
        said = capsys.readouterr().err
        assert f"fill in the {part}: line {line} of gaverify_model.py\n" in said and said.count("\n") == 1
        value = "torch.nn.Linear(16, 10)" if part == "model" else r"\1"
        written = re.sub(rf'gaverify\.fill_in\("the {part}"\)  # .*?such as (.*)', value, written)
        (folder / "gaverify_model.py").write_text(written)
    assert main(["run", "gaverify.toml"]) == 0


@pytest.mark.parametrize(
    ("model", "texts", "parts"),
    [
        ("nets_to_init.py:Net", ["from nets_to_init import Net\n", "model = Net()"], ["loss", "inputs", "targets"]),
        ("nets_to_init:Net", ["model = Net()"], ["loss", "inputs", "targets"]),
        ("sub/nets_to_init.py:Net", ["from sub.nets_to_init import Net"], ["loss", "inputs", "targets"]),
        ("nets_to_init.py:Sized", ["# Sized(width=...)"], ["loss", "arguments of Sized", "inputs", "targets"]),
        ("nets_to_init.py:Step", ["from nets_to_init import Step"], ["inputs", "targets"]),
        (
            "forwards_to_init.py:Language",
            ["# Language(config=...)"],
            ["loss", "arguments of Language", "inputs", "targets"],
        ),
        (
            "forwards_to_init.py:Image",
            ["Image(1, classes=7)", "torch.rand(batch_size, 1, 20, 20)"],
            ["loss", "targets"],
        ),
        (
            "forwards_to_init.py:Towers",
            ["import Towers, Config\n", "Towers(Config(), 3)", "F.cross_entropy(model(*inputs)"],
            ["loss", "targets"],
        ),
        ("forwards_to_init.py:Unclear", ["model = Unclear()"], ["loss", "inputs", "targets"]),
    ],
)
def test_what_the_file_says_is_copied_and_the_rest_is_to_fill_in(
    folder: Path, model: str, texts: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "forwards_to_init.py").write_text(FORWARDS)
    assert main(["init", "new.toml", "--model", model]) == 0
    out = capsys.readouterr().out
    assert "Next: gaverify run new.toml" in out and missing_parts(out) == [f"the {part}" for part in parts]
    written = (folder / "new_model.py").read_text()
    assert [text for text in texts if text not in written] == [] and "@" not in written
    assert main(["run", "new.toml"]) == 2
    assert "fill in the " in capsys.readouterr().err


FORWARDS = """\
from dataclasses import dataclass
import torch
from torch import nn

SIZE = 20


@dataclass
class Config:
    vocabulary: int = 65


class Language(nn.Module):
    def __init__(self, config: Config):
        super().__init__()


class Towers(nn.Module):
    def __init__(self, config, width):
        super().__init__()
        self.users, self.items = nn.Embedding(config.vocabulary, width), nn.Embedding(9, width)

    def forward(self, user, item):
        return self.users(user) * self.items(item)


class Unclear(nn.Module):
    def forward(self, x):
        return x


class Image(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(channels, 2, 5), nn.Flatten(), nn.Linear(2 * 16 * 16, classes))

    def forward(self, pixels):
        return self.layers(pixels)


def other(width):
    towers, image = Towers(Config(), width), Image(width, width)
    image(torch.rand(2, 9, 9, 9))
    Unclear()(torch.rand(2, 9), mask=torch.rand(2))


def main(width, rows):
    print(Language(config=width), Image(width, classes=width), Unclear()(torch.zeros(rows, width)))
    print(Unclear()(torch.zeros(SIZE)), Unclear()(rows))


if __name__ == "__main__":
    spare = Image(3, 5)
    image = Image(1, classes=7)
    x = torch.rand(2, 1, SIZE, SIZE)
    print(image(x).shape)
    towers = Towers(Config(), 3)
    towers(torch.randint(65, (4,)), torch.randint(9, size=[4]))
"""


@pytest.mark.parametrize("kind", ["lightning", "transformers", "transformers-config"])
def test_a_template_says_first_what_to_install(folder: Path, kind: str) -> None:
    assert main(["init", "--kind", kind]) == 0
    assert (folder / "gaverify_model.py").read_text().startswith('"""Needs `pip install ')


@pytest.mark.parametrize("kind", ["dict", "dataloader"])
def test_a_kind_may_be_wished(folder: Path, kind: str) -> None:
    assert main(["init", "--model", "nets_to_init.py:Net", "--kind", kind]) == 0
    fill_in(folder, inputs="torch.randn(batch_size, 7)", targets="torch.randint(3, (batch_size,))")
    assert main(["run", "gaverify.toml"]) == 0


@pytest.mark.parametrize("model", ["mlp", "nets_to_init.py:make"])
def test_what_needs_no_factory_gets_none(folder: Path, model: str) -> None:
    assert main(["init", "--model", model]) == 0
    assert not (folder / "gaverify_model.py").exists()
    assert main(["run", "gaverify.toml"]) == 0


def test_a_checkpoint_is_described_and_loaded(folder: Path) -> None:
    torch.manual_seed(1)
    saved = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).state_dict(prefix="module.layers.")
    torch.save({"epoch": 3, "state_dict": saved}, folder / "last.pt")
    assert main(["init", "--model", "nets_to_init.py:Net", "--checkpoint", "last.pt"]) == 0
    written = fill_in(folder, inputs="torch.randn(batch_size, 7)", targets="torch.randint(3, (batch_size,))")
    assert "module.layers.0.weight: [5, 7]" in written and 'CHECKPOINT = "last.pt"' in written
    assert main(["run", "gaverify.toml"]) == 0
    made, _, _ = import_factory("gaverify_model.py:factory")()
    assert all(torch.equal(value, saved[f"module.{name}"]) for name, value in made.state_dict().items())


def test_a_checkpoint_alone_leaves_the_class_to_fill_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(16, 10).state_dict(), folder / "last.pt")
    assert main(["init", "--checkpoint", "last.pt"]) == 0
    assert missing_parts(capsys.readouterr().out) == ["the loss", "the model", "the inputs", "the targets"]
    fill_in(folder)
    assert main(["run", "gaverify.toml"]) == 0


@pytest.mark.parametrize("words", [["--model", "mlp"], ["--model", "nets_to_init.py:make"], ["--kind", "transformers"]])
def test_a_checkpoint_needs_a_class(folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(16, 10).state_dict(), folder / "last.pt")
    assert main(["init", *words, "--checkpoint", "last.pt"]) == 2
    assert "it needs the class of its model" in capsys.readouterr().err


class Noted:
    pass


def test_a_checkpoint_that_no_factory_can_load_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    torch.save(net.state_dict(), folder / "whole.pt")
    whole = (folder / "whole.pt").read_bytes()
    (folder / "half.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.ckpt").write_bytes(b"")
    (folder / "text.pth").write_text("version https://git-lfs.github.com/spec/v1")
    torch.jit.script(net).save(folder / "scripted.pt")
    torch.save({"epoch": 3}, folder / "epoch.pt")
    torch.save({"note": Noted(), "model": net.state_dict()}, folder / "noted.pt")
    told = {
        "half.pt": "is damaged or not a checkpoint",
        "empty.ckpt": "is damaged or not a checkpoint",
        "text.pth": "is damaged or not a checkpoint",
        "scripted.pt": "is a TorchScript archive without Python code; give the model's class",
        "epoch.pt": "holds no tensors",
        "gone.pt": "cannot be read: No such file",
        "noted.pt": f"holds objects of `{__name__}.Noted`, which `torch.load` refuses by default",
    }
    for name, sentence in told.items():
        assert main(["init", "--checkpoint", name]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"`{name}` {sentence}" in said
    assert not (folder / "gaverify.toml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "mlpp"], "did you mean `mlp`?"),
        (["--model", "nets_to_init.py:Nett"], "did you mean `Net`?"),
        (["--model", "nets_to_init.py"], "`nets_to_init.py` is a file; write `nets_to_init.py:make`"),
        (["--model", "sub.nets_to_init"], "`sub.nets_to_init` is a module; write `sub/nets_to_init.py:make`"),
        (
            ["nets_to_init.py", "--force"],
            "is Python; name a class or factory of it: `gaverify init --model",
        ),
        (["--model", "nets_to_init.py:Settings"], "is a class, but not of torch.nn.Module"),
        (["--model", "nets_to_init.py:built"], "is a Net; name a class or a function that returns it"),
        (["--model", "nets_to_init.py:size"], "is an int; name a class or a function that returns it"),
        (["--model", "nets_to_init.py:Net", "--kind", "transformers"], "is a class; give `--model` the folder"),
        (["--model", "nets_to_init.py:Net", "sub/deep.toml", "--kind", "wrong"], "Invalid value for '--kind'"),
    ],
)
def test_nothing_is_written_for_what_is_not_there(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*.*"))
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert [path for path in sorted(folder.rglob("*.*")) if "__pycache__" not in str(path)] == before


def test_a_factory_that_exists_is_not_overwritten(folder: Path) -> None:
    (folder / "gaverify_model.py").write_text("mine")
    assert main(["init", "--kind", "module"]) == 2
    assert (folder / "gaverify_model.py").read_text() == "mine" and not (folder / "gaverify.toml").exists()
    assert main(["init", "--kind", "module", "--force"]) == 0
    assert (folder / "gaverify_model.py").read_text() != "mine"


LIGHTNING_NET = """\
from lightning import LightningModule
from torch import nn


class lightning_net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(16, 10)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
"""


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["lightning", "transformers-config"])
def test_a_template_that_needs_a_package_runs(folder: Path, kind: str) -> None:
    pytest.importorskip("lightning" if kind == "lightning" else "transformers")
    assert main(["init", "--kind", kind]) == 0
    file = folder / "gaverify_model.py"
    small = "transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100)"
    written = file.read_text().replace('gaverify.fill_in("the model")\n', f"transformers.GPT2LMHeadModel({small})\n")
    file.write_text(written)
    fill_in(folder, model="lightning_net()")
    (folder / "net_of_others.py").write_text(LIGHTNING_NET)
    file.write_text(file.read_text().replace("import Net\n", "import lightning_net\n"))
    assert main(["run", "gaverify.toml"]) == (0 if kind == "lightning" else 1)
    if kind != "lightning":
        assert main(["run", "gaverify.toml", "--weighting", "tokens"]) == 0


@pytest.mark.hf
@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_a_folder_of_transformers(folder: Path, with_tokenizer: bool, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=300, n_positions=128)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "saved")
    if with_tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers

        alphabet = pre_tokenizers.ByteLevel.alphabet()
        vocabulary = {letter: number for number, letter in enumerate(["<end>", *sorted(alphabet)])}
        plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
        fast.save_pretrained(folder / "saved")
    assert main(["init", "--model", "saved"]) == 0
    assert (folder / "gaverify_model.py").exists() is with_tokenizer
    if with_tokenizer:
        fill_in(folder, sentences='["Yes.", "The cat sleeps.", "Rain fell all night.", "No."]')
    assert main(["run", "gaverify.toml"]) == 1, "rows of different length, averaged equally"
    assert "GAV202" in capsys.readouterr().out
    assert main(["run", "gaverify.toml", "--weighting", "tokens"]) == 0


@pytest.mark.hf
@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "T5ForConditionalGeneration", "ViTForImageClassification"]
)
def test_models_by_folder_get_a_batch_that_fits(folder: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, architecture)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    small |= {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 99, "image_size": 32}
    config = kind.config_class(**small, decoder_start_token_id=0)
    config.architectures = [architecture]
    config.save_pretrained(folder / "saved")  # no weights: they are random
    # a verdict, whichever: labels of different length diverge where the loss averages over tokens
    assert main(["run", "--model", "saved", "--weighting", "samples", "--no-diagnose"]) in (0, 1)
