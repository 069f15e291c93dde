"""Specs: TOML files and command line words become a validated `Spec`; every problem is reported, not the first."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gaverify.errors import SpecError

WeightingWord = Literal["uniform", "samples", "tokens", "none"]
DtypeWord = Literal["float32", "float64", "bfloat16", "float16"]
AutocastWord = Literal["bfloat16", "float16"]
ModeWord = Literal["train", "eval"]
StrategyWord = Literal["accumulate", "summed-loss"]
OptimizerWord = Literal["sgd", "adam", "adamw"]

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[int, Field(ge=1)]
_Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]
_Argument = str | int | float | bool


def _words(literal: Any) -> str:
    """`"a", "b" or "c"`."""
    *most, last = (json.dumps(word) for word in get_args(literal))
    return f"{', '.join(most)} or {last}"


class Spec(BaseModel):
    """What to verify and how, as a TOML spec or the command line says it.

    Each field's `description` completes the sentence "must be …", and its first example is the remedy that a message
    offers; so a field and its error text stand in one place. `None` leaves the choice to the model (`device`, `dtype`,
    `batch_size`) or to the built-in problem.
    """

    # strict: `steps = "4"` and `steps = true` are mistakes, although Python could read them as numbers
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())

    model: _Text = Field(description="a built-in, `package.module:factory` or `file.py:factory`", examples=["mlp"])
    model_args: dict[str, _Argument] = Field(
        default_factory=dict, description="text, a number or true/false", examples=[{"width": 32}]
    )
    steps: _Positive = Field(default=4, description="a whole number of at least 1", examples=[4])
    batch_size: _Positive | None = Field(default=None, description="a whole number of at least 1", examples=[8])
    weighting: WeightingWord | tuple[_Finite, ...] = Field(
        default="uniform", description=f"{_words(WeightingWord)}, or one number per micro-batch", examples=["uniform"]
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps|auto)$")] | None = Field(
        default=None, description='"cpu", "cuda", "cuda:N", "mps" or "auto"', examples=["cpu"]
    )
    dtype: DtypeWord | None = Field(default=None, description=_words(DtypeWord), examples=["float32"])
    autocast: AutocastWord | None = Field(default=None, description=_words(AutocastWord), examples=["bfloat16"])
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="a whole number from 0 to 2^63 − 1", examples=[0]
    )
    mode: ModeWord = Field(default="train", description=_words(ModeWord), examples=["train"])
    strategy: StrategyWord = Field(default="accumulate", description=_words(StrategyWord), examples=["accumulate"])
    trace: bool = Field(default=False, description="true or false", examples=[True])
    optimizer: OptimizerWord = Field(default="sgd", description=_words(OptimizerWord), examples=["sgd"])
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="a number above 0", examples=[0.01]
    )
    rtol: _Tolerance | None = Field(default=None, description="a number of at least 0", examples=[1e-5])
    atol: _Tolerance | None = Field(default=None, description="a number of at least 0", examples=[1e-8])
    input_shape: Annotated[tuple[_Positive, ...], Field(min_length=1)] | None = Field(
        default=None, description="the sizes of one sample, whole numbers of at least 1", examples=[(3, 32, 32)]
    )
    loss: _Text | None = Field(
        default=None, description="the name of a loss in `torch.nn.functional`", examples=["cross_entropy"]
    )
    classes: _Positive | None = Field(default=None, description="a whole number of at least 1", examples=[10])
    data: _Text | None = Field(default=None, description="a folder", examples=["data/mnist"])
    pretrained: _Text | None = Field(default=None, description="a model's name or folder", examples=["gpt2"])
    ignore_index: int = Field(default=-100, description="a whole number", examples=[-100])
    diagnose: bool = Field(default=True, description="true or false", examples=[True])

    @model_validator(mode="after")
    def _agree(self) -> Spec:
        conflicts = list(_conflicts(self.steps, self.weighting, self.rtol, self.atol))
        if conflicts:
            raise ValueError("; ".join(f"`{field}` {sentence}" for field, sentence in conflicts))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as plain strings, numbers, lists and mappings, ready for JSON."""
        return self.model_dump(mode="json")


def _conflicts(steps: Any, weighting: Any, rtol: Any, atol: Any) -> Iterator[tuple[str, str]]:
    """Yields (field, sentence) for fields that are right alone and wrong together."""
    if isinstance(weighting, tuple) and isinstance(steps, int) and len(weighting) != steps:
        yield "weighting", f"must have one number per micro-batch: {len(weighting)} numbers, but steps is {steps}"
    if (rtol is None) != (atol is None):
        given, missing = ("rtol", "atol") if atol is None else ("atol", "rtol")
        yield given, f"needs `{missing}` beside it: give both, or neither and let gaverify measure the rounding"


def parse_spec(table: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None = None) -> Spec:
    """Returns the spec that a TOML table and the command line's overrides describe.

    Args:
        table: Keys as in `Spec`, with hyphens or underscores.
        source: The file that the table stands in, for messages.
        overrides: Fields of `Spec` that win over the table; `None` values are left out, `model_args` are merged.

    Raises:
        SpecError: Anything is wrong; all problems at once, `$.steps` for the table and `--steps` for overrides.
    """
    in_file, on_line, spec = _check(table, overrides or {})
    if spec is None:
        raise _joined([(source, in_file), ("command line", on_line)])
    return spec


def load_specs(
    paths: Iterable[str | Path], overrides: Mapping[str, Any] | None = None
) -> tuple[tuple[Path, Spec], ...]:
    """Returns the specs of TOML files and of folders of TOML files (sorted by name), each file once.

    A `model = "file.py:factory"`, `data` or `pretrained` that exists beside its spec is resolved against the spec's folder.

    Raises:
        SpecError: All problems of all files at once: missing, unreadable, not TOML, or wrong as in `parse_spec`.
    """
    specs: list[tuple[Path, Spec]] = []
    problems: list[tuple[str, list[str]]] = []
    on_line: dict[str, None] = {}  # an override is wrong in every file, but is reported once
    for file, missing in _files(paths):
        if missing:
            problems.append((str(file), [missing]))
            continue
        table, unreadable = _read(file)
        in_file, from_options, spec = ([unreadable], [], None) if unreadable else _check(table, overrides or {})
        if spec is not None:
            specs.append((file, spec))
        problems.append((str(file), in_file))
        on_line.update(dict.fromkeys(from_options))
    problems.append(("command line", list(on_line)))
    if any(sentences for _, sentences in problems):
        raise _joined(problems)
    return tuple(specs)


def _files(paths: Iterable[str | Path]) -> Iterator[tuple[Path, str]]:
    seen = set()
    for path in map(Path, paths):
        found = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not found:
            yield path, "the folder holds no *.toml file; `gaverify init` writes one"
        for file in found:
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            yield file, "" if file.exists() else "there is no such file or folder"


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """Returns the table, with paths resolved, and "" or the reason why there is none."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at (.*)\)$", str(error))
        where = place[1] if place else "somewhere"
        return {}, f"{where}: not TOML: {str(error).removesuffix(place[0]) if place else error}"
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 text: byte {error.start} cannot be read; save the file as UTF-8"
    except OSError as error:
        return {}, f"cannot be read: {error.strerror or error}"
    return _resolve(table, file.parent), ""


def _resolve(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    resolved = dict(table)
    for key in ("data", "pretrained"):
        value = table.get(key)
        if isinstance(value, str) and value and (folder / value).exists():
            resolved[key] = str(folder / value)
    model = table.get("model")
    if isinstance(model, str):
        file, colon, factory = model.rpartition(":")
        if colon and file.endswith(".py") and (folder / file).exists():
            resolved["model"] = f"{folder / file}:{factory}"
    return resolved


def _check(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[list[str], list[str], Spec | None]:
    """Returns the problems of the table, those of the overrides, and the spec if there are none."""
    options = {field: value for field, value in overrides.items() if value is not None}
    values, written, problems = _normalise(table)
    if options.get("model_args") and isinstance(values.get("model_args", {}), Mapping):
        options["model_args"] = {**values.get("model_args", {}), **options["model_args"]}
    values.update(options)
    spec, wrong = _validate(values)
    if problems and not wrong:
        spec = None
    on_line: list[str] = []
    for field, key, sentence in wrong:
        option = field in options
        place = _option(field) if option else f"$.{written.get(field, field.replace('_', '-'))}"
        place += (f" {key}" if option else f".{key}") if key else ""
        (on_line if option else problems).append(f"{place}: {sentence.replace('‹example›', _example(field, option))}")
    return problems, on_line, spec


def _normalise(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Returns the known fields' values, the keys as they were written, and sentences about unknown keys."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    problems = []
    for key, value in table.items():
        field = key.replace("-", "_")
        if field not in Spec.model_fields:
            near = difflib.get_close_matches(field.lower(), Spec.model_fields, n=1)
            known = ", ".join(name.replace("_", "-") for name in Spec.model_fields)
            advice = f"did you mean `{near[0].replace('_', '-')}`?" if near else f"the keys are {known}"
            problems.append(f"$.{key}: unknown key; {advice}")
        elif field in values:
            problems.append(f"$.{key}: stands here twice, also as `{written[field]}`; keep one")
        else:
            values[field] = tuple(value) if isinstance(value, list) else value
            written[field] = key
    return values, written, problems


def _validate(values: Mapping[str, Any]) -> tuple[Spec | None, list[tuple[str, str, str]]]:
    """Returns the spec, or (field, key in the field, sentence) for every problem."""
    try:
        return Spec.model_validate(values), []
    except ValidationError as error:
        # a union reports each of its members: one sentence per field (and per model argument) is enough
        wrong: dict[tuple[str, str], str] = {}
        for detail in error.errors(include_url=False, include_context=False):
            if detail["loc"]:
                field = str(detail["loc"][0])
                key = str(detail["loc"][1]) if field == "model_args" and len(detail["loc"]) > 1 else ""
                value = values.get(field, {}).get(key) if key else values.get(field)
                wrong.setdefault((field, key), _sentence(field, detail["type"], value, whole=not key))
        sound = {field for field in Spec.model_fields if (field, "") not in wrong}
        facts = {field: values.get(field, Spec.model_fields[field].default) for field in sound}
        pairs = (facts.get(field) for field in ("steps", "weighting"))
        tolerances = (facts.get("rtol"), facts.get("atol")) if {"rtol", "atol"} <= sound else (None, None)
        for field, sentence in _conflicts(*pairs, *tolerances):
            wrong.setdefault((field, ""), sentence)
        return None, [(field, key, sentence) for (field, key), sentence in wrong.items()]


def _sentence(field: str, kind: str, value: Any, *, whole: bool) -> str:
    if kind == "missing":
        return "is missing; write `‹example›`"
    expected = "a table of names and values" if field == "model_args" and whole else Spec.model_fields[field].description
    words = re.findall(r'"([^"]+)"', expected or "")
    near = difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.5) if isinstance(value, str) else []
    advice = f'did you mean "{near[0]}"?' if near else "write `‹example›`"
    return f"must be {expected}, got {_shown(value)}; {advice}"


def _shown(value: Any) -> str:
    """The value as TOML or JSON would write it, cut to what fits a line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _option(field: str) -> str:
    if field == "model_args":
        return "--model-arg"
    return "--" + field.replace("_", "-")


def _example(field: str, option: bool) -> str:
    value = (Spec.model_fields[field].examples or [""])[0]
    if not option:
        name = field.replace("_", "-")
        inline = ", ".join(f"{key} = {_shown(item)}" for key, item in value.items()) if isinstance(value, dict) else ""
        return f"{name} = {{ {inline} }}" if inline else f"{name} = {_shown(value)}"
    if isinstance(value, bool):
        return _option(field)
    if isinstance(value, dict):
        return f"{_option(field)} " + " ".join(f"{key}={item}" for key, item in value.items())
    return f"{_option(field)} " + (",".join(map(str, value)) if isinstance(value, tuple) else str(value))


def _joined(problems: Sequence[tuple[str, list[str]]]) -> SpecError:
    """One error for the problems of several sources; its text has a line each, with the source in front."""
    several = [SpecError(sentences, source) for source, sentences in problems if sentences]
    if len(several) == 1:
        return several[0]
    lines = "\n".join(map(str, several)).splitlines()
    joined = SpecError(lines, f"{len(several)} sources")
    joined.args = ("\n".join(lines),)
    return joined
