"""Specs in both directions: what is right is read, what is wrong is named, all of it at once."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import gaverify
from gaverify.errors import SpecError
from gaverify.spec import OPTIONS, Spec, load_specs, parse_spec, read_specs
from gaverify.verdict.settings import Settings


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(table: dict[str, object], **overrides: object) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        parse_spec(table, "a.toml", overrides)
    return caught.value.problems


def test_defaults() -> None:
    spec = parse_spec({"model": "mlp"}, "a.toml", {})
    assert (spec.steps, spec.weighting, spec.seed, spec.mode, spec.strategy) == (4, "uniform", 0, "auto", "accumulate")
    assert spec.device is None and spec.diagnose and spec.ignore_index == -100


OBJECTS = {"model", "loss", "batch", "split", "progress"}
"""What a call is given as Python objects; a spec names its model and its loss."""
ONLY_IN_SPECS = {"model_args", "input_shape", "classes", "data", "pretrained", "ranks", "accept", "expect"}
"""How a spec's model is made, how many processes run it, and which outcome is fine."""


def test_a_call_takes_the_options_of_a_spec_with_the_same_defaults() -> None:
    in_calls = {
        name: parameter.default
        for name, parameter in inspect.signature(gaverify.verify).parameters.items()
        if name not in OBJECTS
    }
    in_specs = {entry.name: entry.default for entry in fields(Spec) if entry.name not in OBJECTS | ONLY_IN_SPECS}
    assert in_calls == in_specs


def test_settings_are_options_of_specs_that_a_call_takes_too() -> None:
    assert {entry.name for entry in fields(Settings)} <= OPTIONS.keys() - ONLY_IN_SPECS - OBJECTS


def test_hyphens_and_underscores_are_alike() -> None:
    assert parse_spec({"model": "m", "batch-size": 8}, "a", {}) == parse_spec({"model": "m", "batch_size": 8}, "a", {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weighting", "tokens"),
        ("weighting", [0.1, 0.2, 0.3, 1]),
        ("device", "cuda:1"),
        ("input-shape", [3, 32, 32]),
        ("lr", 1),
        ("strategy", "summed-loss"),
        ("model-args", {"width": 32, "bias": True, "rate": 0.5, "kind": "x"}),
    ],
)
def test_right_values(key: str, value: object) -> None:
    spec = parse_spec({"model": "m", key: value}, "a.toml", {})
    assert spec.to_dict()[key.replace("-", "_")] == value


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"steps": 0}, "$.steps: must be a whole number of at least 1, got 0; write `steps = 4`"),
        ({"steps": "4"}, '$.steps: must be a whole number of at least 1, got "4"; write `steps = 4`'),
        ({"steps": True}, "$.steps: must be a whole number of at least 1, got true; write `steps = 4`"),
        ({"mode": "evl"}, '$.mode: must be "auto", "train" or "eval", got "evl"; did you mean "eval"?'),
        ({"batch_size": -1}, "$.batch_size: must be a whole number of at least 1, got -1; write `batch-size = 8`"),
        ({"stpes": 4}, "$.stpes: unknown key; did you mean `steps`?"),
        ({"lr": float("nan")}, "$.lr: must be a number above 0 and at most 1e+30, got NaN; write `lr = 0.01`"),
        ({"model-args": {"a": [1]}}, "$.model-args.a: must be text, a number or true/false, got [1]"),
        ({"model-args": 3}, "$.model-args: must be a table of names and values, got 3"),
        ({"weighting": [0.5, 0.5]}, "$.weighting: must have one number per micro-batch: 2 numbers, but steps is 4"),
        ({"weighting": [0.5, "x"]}, "$.weighting: must be"),
        ({"weighting": "token"}, 'did you mean "tokens"?'),
        ({"device": "gpu"}, '$.device: must be "cpu", "cuda", "cuda:N", "xpu", "mps" or "auto", got "gpu"'),
        ({"rtol": 0.1}, "$.rtol: needs `atol` too"),
        ({"rtol": -1, "atol": 0}, "$.rtol: must be a number of at least 0, got -1"),
        ({"input-shape": []}, "$.input-shape: must be"),
        ({"batch-size": 8, "batch_size": 8}, "$.batch_size: is given twice, also as `batch-size`"),
    ],
)
def test_wrong_values(table: dict[str, object], expected: str) -> None:
    (problem,) = problems({"model": "m", **table})
    assert expected in problem


def test_missing_model() -> None:
    assert problems({}) == ('$.model: is missing; write `model = "mlp"`',)


def test_all_problems_at_once() -> None:
    found = problems({"steps": 0, "mode": "x", "modle": "m", "rtol": 0.1})
    assert len(found) == 5
    for place in ("$.steps", "$.mode", "$.modle", "$.model", "$.rtol"):
        assert sum(problem.startswith(f"{place}:") for problem in found) == 1, place


def test_overrides_win_and_are_named_as_options() -> None:
    assert parse_spec({"model": "m", "steps": 2}, "a", {"steps": 8, "seed": None}).steps == 8
    with pytest.raises(SpecError, match=r"command line: --steps: must be .*; write `--steps 4`"):
        parse_spec({"model": "m"}, "a.toml", {"steps": 0})


def test_model_args_are_merged() -> None:
    spec = parse_spec({"model": "m", "model-args": {"a": 1, "b": 2}}, "a", {"model_args": {"b": 3}})
    assert spec.model_args == {"a": 1, "b": 3}
    kept = parse_spec({"model": "m", "model-args": {"a": 1}}, "a", {"model_args": {}})
    assert kept.model_args == {"a": 1}
    assert problems({"model": "m", "model-args": {"a": []}}, model_args={"b": 3})[0].startswith("$.model-args.a: must")


def test_round_trip_through_json() -> None:
    spec = parse_spec({"model": "m", "weighting": [0.25] * 4, "input-shape": [3, 8]}, "a", {})
    assert parse_spec(json.loads(json.dumps(spec.to_dict())), "again", {}) == spec


def test_spec_is_checked_when_built_directly_and_frozen() -> None:
    with pytest.raises(ValueError, match="one number per micro-batch"):
        Spec(model="m", weighting=(1.0,))
    with pytest.raises(FrozenInstanceError):
        Spec(model="m").steps = 3  # type: ignore[misc]


def test_folders_and_files_each_once(tmp_path: Path) -> None:
    b = write(tmp_path, "b.toml", 'model = "b"')
    write(tmp_path, "a.toml", 'model = "a"')
    write(tmp_path, "notes.txt", "no spec")
    assert [spec.model for _, spec in load_specs([b, tmp_path], {})] == ["b", "a"]


def test_all_problems_of_all_files(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'model = "a"\nsteps = 0')
    write(tmp_path, "b.toml", 'model = "b"\nsteps 3')
    (tmp_path / "c.toml").write_bytes(b'model = "\xff"')
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError) as caught:
        load_specs([tmp_path, tmp_path / "empty", tmp_path / "gone.toml"], {"mode": "x"})
    text = str(caught.value)
    assert "a.toml: $.steps: must be" in text
    assert "b.toml: line 2, column 7: not TOML: " in text
    assert "c.toml: not UTF-8 text" in text
    assert "empty: the folder holds no *.toml file" in text
    assert "gone.toml: there is no such file or folder" in text
    assert text.count("--mode:") == 1
    assert len(caught.value.problems) == 6


def test_links_that_lead_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.toml").symlink_to(tmp_path / "b.toml")
    (tmp_path / "b.toml").symlink_to(tmp_path / "a.toml")
    with pytest.raises(SpecError, match="there is no such file"):
        load_specs([tmp_path])


def test_options_of_an_audit_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "audit.toml"
    file.write_text('script = "train.py"\nfull = "--batch 8"\n')
    with pytest.raises(SpecError) as caught:
        load_specs([file])
    assert caught.value.problems == ("holds the options of an audit, not a spec; run it with `gaverify audit`",)


@pytest.mark.parametrize(("name", "words"), [("net.py", "--model {}:factory"), ("out.json", "gaverify report {}")])
def test_what_is_no_spec_is_told_where_it_belongs(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(SpecError) as caught:
        load_specs([tmp_path / name])
    assert words.format(tmp_path / name) in str(caught.value)


def test_a_misspelt_model_is_the_model_that_lacks() -> None:
    with pytest.raises(SpecError, match="did you mean `model`"):
        parse_spec({"modle": "mlp"}, "a.toml")
    with pytest.raises(SpecError, match="did you mean `mode`"):
        parse_spec({"model": "mlp", "modle": "mlp"}, "a.toml")


def test_what_is_read_and_what_is_not(tmp_path: Path) -> None:
    """A byte-order mark is no fault; a file without end, or nested too deep for Python's reader, is one."""
    (tmp_path / "a.toml").write_bytes(b'\xef\xbb\xbfmodel = "a"')
    write(tmp_path, "b.toml", "model = " + "[" * 5000 + "]" * 5000)
    write(tmp_path, "c.toml", 'model = "c"\n' + "#" * (1 << 20))
    os.mkfifo(tmp_path / "d.toml")
    entries = read_specs([tmp_path, "/dev/zero"])
    assert [type(entry) for _, entry in entries] == [Spec, *[SpecError] * 4]
    texts = [str(entry) for _, entry in entries[1:]]
    assert "too deep in each other" in texts[0] and "1 MiB" in texts[1]
    assert all("it is no regular file" in text for text in texts[2:])


def test_what_only_a_trace_reads() -> None:
    (problem,) = problems({"model": "m"}, lr=0.1)
    assert problem == "--lr: has an effect only with a trace; add `--trace`, or leave it out"
    assert parse_spec({"model": "m", "lr": 0.1, "trace": True}, "a", {"trace": False, "lr": 0.2}).trace is False


def test_what_only_ranks_read() -> None:
    told = "has an effect only on several ranks; add `--ranks 2`, or leave it out"
    assert problems({"model": "m"}, engine="fsdp2", timeout=5.0) == (f"--engine: {told}",)
    assert parse_spec({"model": "m", "ranks": 2}, "a", {"engine": "fsdp2"}).engine == "fsdp2"


def test_weights_of_ranks_are_counted_whatever_else_is_wrong() -> None:
    (problem,) = problems({"model": "m"}, steps=2, ranks=2, weighting=(0.25,) * 4, seed=-1)
    assert problem.startswith("--seed: ")


def test_paths_are_resolved_where_they_exist(tmp_path: Path) -> None:
    write(tmp_path, "mine.py", "")
    (tmp_path / "digits").mkdir()
    here = write(tmp_path, "a.toml", 'model = "mine.py:make"\ndata = "digits"\npretrained = "gpt2"')
    elsewhere = write(tmp_path, "b.toml", 'model = "other.py:make"\ndata = "nowhere"')
    (_, a), (_, b) = load_specs([here, elsewhere], {})
    assert a.model == f"{tmp_path / 'mine.py'}:make"
    assert (a.data, a.pretrained) == (str(tmp_path / "digits"), "gpt2")
    assert (b.model, b.data) == ("other.py:make", "nowhere")
