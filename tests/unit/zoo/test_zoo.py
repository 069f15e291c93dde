"""The built-in problems: their architectures, the numbers known for them, and what they refuse."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import math
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gaverify
from gaverify.cli import main
from gaverify.errors import ProblemError, SpecError
from gaverify.loading import load_problem
from gaverify.spec import parse_spec
from gaverify.zoo import BUILTINS, find_builtin
from gaverify.zoo.gpt2 import CONTEXT, SENTENCES
from gaverify.zoo.mnist_mlp import drawn_digits, read_digits, read_idx

WITHOUT_TRANSFORMERS = [builtin.name for builtin in BUILTINS if builtin.name != "gpt2"]


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def build(model: str, **options: Any) -> gaverify.Problem:
    return load_problem(parse_spec({"model": model, **options}, "test"))


def refused(model: str, **options: Any) -> str:
    with pytest.raises((SpecError, ProblemError)) as caught:
        build(model, **options)
    return str(caught.value)


def layers(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model.children()]


# --- what is listed -----------------------------------------------------------------------------------------------


def test_listing_the_built_ins_imports_no_torch() -> None:
    code = "import gaverify.zoo, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", WITHOUT_TRANSFORMERS)
def test_the_listed_numbers_are_those_of_the_built_problem(name: str) -> None:
    builtin, problem = find_builtin(name), build(name)
    assert f"{sum(p.numel() for p in problem.model.parameters()):,}" == builtin.parameters
    assert problem.name == name
    first = tensors_of(problem.batch)[0]
    assert len(first) == builtin.default_batch_size
    assert builtin.batch.startswith(" × ".join(map(str, first.shape)))
    for size in (1, 3, 11):
        assert {len(part) for part in tensors_of(build(name, batch_size=size).batch)} == {size}


def test_an_unknown_built_in_names_the_nearest_or_all() -> None:
    for word, near in (("mpl", "mlp"), ("MLP", "mlp"), ("mnist_mlp", "mnist-mlp"), ("gpt-2", "gpt2")):
        with pytest.raises(SpecError, match=f"no built-in `{word}`; did you mean `{near}`"):
            find_builtin(word)
    with pytest.raises(SpecError, match=r"toy-linear, mlp, .*, gpt2, and your own model is `package.module:factory`"):
        find_builtin("zzz")


@pytest.mark.parametrize("name", WITHOUT_TRANSFORMERS)
def test_the_seed_decides_weights_and_data(name: str) -> None:
    def numbers(seed: int) -> torch.Tensor:
        problem = build(name, seed=seed)
        tensors = [*problem.model.parameters(), *tensors_of(problem.batch)]
        return torch.cat([tensor.detach().flatten().float() for tensor in tensors])

    assert torch.equal(numbers(3), numbers(3))
    assert name == "toy-linear" or not torch.equal(numbers(3), numbers(4))


# --- architectures and known numbers ------------------------------------------------------------------------------


def test_toy_linear_has_the_gradient_that_is_known() -> None:
    problem = build("toy-linear")
    assert problem.model.weight.item() == 1.0  # type: ignore[union-attr, operator]
    assert problem.batch[0].flatten().tolist() == [4, 2] and problem.batch[1].flatten().tolist() == [8, 4]
    problem.loss(problem.model, problem.batch).backward()
    assert problem.model.weight.grad.item() == -20.0  # type: ignore[union-attr, operator]


def test_the_mlps() -> None:
    plain, normalised, digits = build("mlp"), build("mlp-batchnorm"), build("mnist-mlp").model
    assert layers(plain.model) == ["Linear", "GELU", "Linear"]
    assert layers(normalised.model) == ["Linear", "BatchNorm1d", "Linear"]
    assert all(torch.equal(a, b) for a, b in zip(plain.batch, normalised.batch, strict=True)), "the same batch"
    assert build("mlp", model_args={"width": 5}).model[0].out_features == 5  # type: ignore[index]
    assert layers(digits) == ["Flatten", *["Linear", "ReLU"] * 3, "Linear"]
    assert [layer.out_features for layer in digits.children() if isinstance(layer, nn.Linear)] == [512, 256, 128, 10]


def test_drawn_digits_look_like_digits() -> None:
    torch.manual_seed(0)
    images, targets = drawn_digits(400)
    assert images.shape == (400, 1, 28, 28) and images.min() >= 0 and images.max() <= 1
    assert targets.unique().tolist() == list(range(10))
    ink = torch.stack([images[targets == digit].sum((1, 2, 3)).mean() for digit in range(10)])
    assert ink.argmin() == 1 and ink.argmax() == 8, "a one has the least ink and an eight the most"


def test_causal_lm_is_tied_and_causal() -> None:
    model = build("causal-lm", model_args={"dropout": 0}).model
    assert model.head.weight is model.tokens.weight
    tokens = torch.randint(1, 64, (1, 32))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :20], after[0, :20]) and not torch.equal(before[0, 20:], after[0, 20:])


def test_causal_lm_pads_ragged_rows() -> None:
    batch = build("causal-lm").batch
    is_valid = batch["labels"] != -100
    assert is_valid.sum(1).tolist() == [4, 8, 12, 16, 20, 24, 28, 32]
    next_tokens = batch["input_ids"][:, 1:][is_valid[:, 1:]]
    assert torch.equal(next_tokens, batch["labels"][:, :-1][is_valid[:, 1:]]), "a label is the next token"
    counted = build("causal-lm", model_args={"padding": "counted"}).batch
    assert torch.equal(counted["labels"] == 0, ~is_valid)


SMALL = {"dropout": 0, "depth": 1, "width": 16, "vocab": 32, "context": 16}


@pytest.mark.parametrize(
    ("arguments", "weighting", "outcome"),
    [
        ({"padding": "counted", "dropout": 0.3}, "uniform", "equivalent"),
        (SMALL, "uniform", "divergent"),
        (SMALL, "tokens", "equivalent"),
    ],
)
def test_causal_lm_diverges_where_padding_is_ignored(arguments: dict[str, Any], weighting: str, outcome: str) -> None:
    problem = build("causal-lm", model_args=arguments)
    verdict = gaverify.verify(problem, steps=4, weighting=weighting, diagnose=False)
    assert verdict.outcome.value == outcome
    assert problem.model.head.weight is problem.model.tokens.weight, "the tie survives"


def test_causal_lm_grows_to_thirty_million_parameters() -> None:
    arguments = {"vocab": 16000, "width": 512, "depth": 7, "heads": 8, "context": 64}
    with torch.device("meta"):  # shapes only
        model = importlib.import_module("gaverify.zoo.causal_lm").CausalLM(**arguments, dropout=0.0)
    assert 29e6 < sum(p.numel() for p in model.parameters()) < 32e6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"heads": 3}, "model argument `heads` = 3 must divide `width` = 32"),
        ({"dropout": 1.5}, "`dropout` must be at least 0 and below 1, got 1.5"),
        ({"padding": "count"}, 'must be "ignored" or "counted", got "count"; did you mean "counted"?'),
        ({"depth": 0}, "`depth` must be at least 1, got 0"),
        ({"width": "wide"}, "`width` of `causal-lm` must be a whole number, got 'wide'"),
        ({"width": True}, "must be a whole number, got True"),
        ({"widht": 8}, "`causal-lm` takes no argument `widht`; did you mean `width`?"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], sentence: str) -> None:
    assert sentence in refused("causal-lm", model_args=arguments)


def test_ignore_index_reaches_the_loss() -> None:
    batch = build("causal-lm", ignore_index=-1).batch
    assert int(batch["labels"].min()) == -1
    assert "--ignore-index 5 is a token" in refused("causal-lm", ignore_index=5)


# --- real digits --------------------------------------------------------------------------------------------------


def idx(*sizes: int, kind: int = 8, content: bytes | None = None) -> bytes:
    data = bytes(n % 10 for n in range(math.prod(sizes))) if content is None else content
    return bytes([0, 0, kind, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + data


def folder_of(path: Path, images: bytes, labels: bytes, mark: str = "-", packed: bool = False) -> Path:
    for name, content in ((f"train-images{mark}idx3-ubyte", images), (f"train-labels{mark}idx1-ubyte", labels)):
        (path / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return path


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_real_files_are_read(tmp_path: Path, mark: str, packed: bool) -> None:
    folder_of(tmp_path, idx(6, 28, 28), idx(6), mark, packed)
    images, targets = build("mnist-mlp", data=str(tmp_path), batch_size=4).batch
    assert images.shape == (4, 1, 28, 28) and targets.tolist() == [0, 1, 2, 3]
    assert torch.allclose(images.flatten()[:12] * 255, torch.tensor([n % 10 for n in range(12)], dtype=torch.float32))


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (b"", idx(4), "idx3-ubyte` is no IDX file"),
        (b"\1\0\10\3", idx(4), "does not start with two zero bytes"),
        (idx(4, 28, 28, kind=0x0D), idx(4), "holds IDX type 0x0d; MNIST's files hold unsigned bytes"),
        (idx(4), idx(4), "has 1 dimensions instead of 3; images and labels swapped?"),
        (idx(4, 28, 28)[:9], idx(4), "is cut off inside its header"),
        (idx(4, 28, 28)[:-1], idx(4), "is cut off: its header announces 3,136 bytes of data, it holds 3,135"),
        (idx(4, 28, 28) + b"x", idx(4), "is too long"),
        (idx(4, 14, 14), idx(4), "holds images of 14 × 14, not 28 × 28"),
        (idx(4, 28, 28), idx(5), "holds 4 images, but"),
        (idx(4, 28, 28), idx(4, content=b"\0\1\2\12"), "holds the label 10; the digits are 0 to 9"),
        (idx(3, 28, 28), idx(3), "holds 3 images, fewer than --batch-size 4"),
        (idx(0, 28, 28), idx(0), "holds 0 images, fewer"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, images: bytes, labels: bytes, sentence: str) -> None:
    folder_of(tmp_path, images, labels)
    message = refused("mnist-mlp", data=str(tmp_path), batch_size=4)
    assert sentence in message and str(tmp_path) in message


def test_missing_data_and_the_folder_of_torchvision(tmp_path: Path) -> None:
    assert "holds no `train-images-idx3-ubyte` (nor `.gz`" in refused("mnist-mlp", data=str(tmp_path))
    assert "there is no folder" in refused("mnist-mlp", data=str(tmp_path / "none"))
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    folder_of(tmp_path / "MNIST" / "raw", idx(2, 28, 28), idx(2))
    assert len(read_digits(str(tmp_path), 2)[1]) == 2


def test_damaged_gzip_files_are_named(tmp_path: Path) -> None:
    packed = gzip.compress(idx(4))
    for content in (b"no gzip", packed[:-9], packed[:12] + b"\xff" * 30):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(ProblemError, match=r"a.gz` is no whole gzip file"):
            read_idx(tmp_path / "a.gz", 1)


# --- GPT-2 --------------------------------------------------------------------------------------------------------


def test_gpt2_without_its_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes the import raise, installed or not
    assert main(["run", "--model", "gpt2"]) == 2
    assert "`gpt2` needs `transformers`; run `pip install transformers`" in capsys.readouterr().err


def test_pretrained_weights_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(name: str) -> None:
        raise OSError(f"{name} is no folder.\nmore lines")

    fake = types.ModuleType("transformers")
    fake.__dict__["AutoModelForCausalLM"] = types.SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    message = refused("gpt2", pretrained="nowhere")
    assert "--pretrained `nowhere`: OSError: nowhere is no folder; give a model's name" in message
    assert "--pretrained brings its own" in refused("gpt2", pretrained="nowhere", model_args={"width": 8})


def test_the_sentences_are_eight_of_different_length_that_fit() -> None:
    lengths = [len(sentence.encode()) for sentence in SENTENCES]
    assert len(set(lengths)) == 8 and max(lengths) <= CONTEXT
    sentence = importlib.import_module("gaverify.zoo.gpt2")._sentence
    assert max(len(sentence(index)) for index in range(100)) <= CONTEXT


@pytest.mark.hf
@pytest.mark.parametrize(
    ("words", "code"),
    [(["--weighting", "tokens"], 0), ([], 1), (["--model-arg", "padding=counted"], 0), (["--batch-size", "9"], 1)],
)
def test_gpt2_as_a_user(words: list[str], code: int) -> None:
    assert main(["run", "--model", "gpt2", *words]) == code


@pytest.mark.hf
def test_gpt2_is_as_listed_and_reads_a_folder(tmp_path: Path) -> None:
    problem = build("gpt2")
    assert f"{sum(p.numel() for p in problem.model.parameters()):,}" == find_builtin("gpt2").parameters
    transformers = importlib.import_module("transformers")
    problem.model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert "--pretrained" in refused("gpt2", pretrained=str(tmp_path / "none"))
    letters = sorted({*"".join(SENTENCES).replace(" ", "Ġ")})
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate([*letters, "<|endoftext|>"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    transformers.GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).save_pretrained(tmp_path)
    assert main(["run", "--model", "gpt2", "--pretrained", str(tmp_path), "--weighting", "tokens"]) == 0


# --- end to end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("toy-linear --steps 2 --strategy summed-loss", 0),
        ("toy-linear --steps 2 --weighting none", 1),
        ("toy-linear", 2),
        ("toy-linear --model-arg batch_size=0", 2),
        ("mlp --steps 3 --weighting samples", 0),
        ("mlp --steps 3", 1),
        ("mlp --steps 9", 2),
        ("mlp-batchnorm --steps 4 --mode eval", 0),
        ("causal-lm --weighting tokens", 0),
        ("mlp --pretrained gpt2", 2),
        ("mlp --loss mse_loss --input-shape 3", 2),
    ],
)
def test_exit_codes(words: str, code: int) -> None:
    assert main(["run", "--no-diagnose", "--model", *words.split()]) == code


def test_options_without_use_are_named() -> None:
    assert refused("mlp", data="d", pretrained="p").count("has no parameter") == 2
    assert "--input-shape, --classes are for a factory" in refused("mlp", input_shape=[3], classes=2)


SPECS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def test_there_is_a_spec_for_each_built_in() -> None:
    assert {f"{builtin.name}.toml" for builtin in BUILTINS} | {"own-model.toml"} <= {spec.name for spec in SPECS}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_shipped_specs_leave_with_what_they_promise(spec: Path) -> None:
    first = spec.read_text(encoding="utf-8").splitlines()[0]
    promised = int(first.removeprefix("# exit ").partition(":")[0])
    if spec.stem == "gpt2" and importlib.util.find_spec("transformers") is None:
        promised = 2
    assert main(["run", str(spec)]) == promised
