"""The fields of a spec, what each allows, and what is wrong with one: what was expected, and what to write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gaverify.errors import SpecError, nearest
from gaverify.spec.accepting import Accept

WeightingWord = Literal["uniform", "samples", "tokens", "none"]
DtypeWord = Literal["float32", "float64", "bfloat16", "float16"]
AutocastWord = Literal["bfloat16", "float16"]
ModeWord = Literal["train", "eval"]
StrategyWord = Literal["accumulate", "summed-loss"]
ExpectWord = Literal["equivalent", "divergent", "inconclusive"]
OptimizerWord = Literal["sgd", "adam", "adamw"]
EngineWord = Literal["ddp", "fsdp2"]
ReferenceWord = Literal["full", "offload", "recompute", "auto"]

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
    name: _Text | None = Field(default=None, description="a name for reports", examples=["nightly"])
    model_args: dict[str, _Argument] = Field(
        default_factory=dict, description="text, a number or true/false", examples=[{"width": 32}]
    )
    steps: _Positive = Field(default=4, description="a whole number of at least 1", examples=[4])
    batch_size: _Positive | None = Field(default=None, description="a whole number of at least 1", examples=[8])
    weighting: WeightingWord | tuple[_Finite, ...] = Field(
        default="uniform", description=f"{_words(WeightingWord)}, or one number per micro-batch", examples=["uniform"]
    )
    device: Annotated[str, Field(pattern=r"^(cpu|(cuda|xpu)(:\d+)?|mps|auto)$")] | None = Field(
        default=None, description='"cpu", "cuda", "cuda:N", "xpu", "mps" or "auto"', examples=["cpu"]
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
    ranks: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="a whole number of at least 2", examples=[2]
    )
    engine: EngineWord = Field(default="ddp", description=_words(EngineWord), examples=["ddp"])
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="a number of seconds above 0", examples=[600]
    )
    diagnose: bool = Field(default=True, description="true or false", examples=[True])
    time_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="a number of seconds above 0", examples=[60]
    )
    exact: bool = Field(default=False, description="true or false", examples=[True])
    reference: ReferenceWord = Field(default="full", description=_words(ReferenceWord), examples=["auto"])
    spill: bool = Field(default=False, description="true or false", examples=[True])

    accept: tuple[Accept, ...] = Field(
        default=(),
        description="a list of tables with `code`, `location` and `reason`",
        examples=[({"code": "GAV101", "location": "backbone.*", "reason": "ghost batch norm on purpose"},)],
    )
    expect: ExpectWord | None = Field(default=None, description=_words(ExpectWord), examples=["divergent"])

    @model_validator(mode="after")
    def _agree(self) -> Spec:
        found = [
            f"`{field}` {text}"
            for field, text in conflicts(self.steps * (self.ranks or 1), self.weighting, self.rtol, self.atol)
        ]
        if found:
            raise ValueError("; ".join(found))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as plain strings, numbers, lists and mappings, ready for JSON."""
        return self.model_dump(mode="json")


def conflicts(steps: Any, weighting: Any, rtol: Any, atol: Any) -> Iterator[tuple[str, str]]:
    """Yields (field, sentence) for fields that are right alone and wrong together."""
    if isinstance(weighting, tuple) and isinstance(steps, int) and len(weighting) != steps:
        yield "weighting", f"must have one number per micro-batch: {len(weighting)} numbers, but steps is {steps}"
    if (rtol is None) != (atol is None):
        given, missing = ("rtol", "atol") if atol is None else ("atol", "rtol")
        yield given, f"needs `{missing}` beside it: give both, or neither and let gaverify measure the rounding"


def sentence(field: str, key: str, kind: str, value: Any, *, option: bool) -> str:
    """Returns what is wrong with a value and what to write instead.

    Args:
        field: The field of `Spec`.
        key: The model argument, where one is wrong and not the whole field.
        kind: Pydantic's kind of error, or a whole sentence already.
        value: What was written.
        option: Whether it stands on the command line.
    """
    if " " in kind:
        return kind
    advice = f"write `{example(field, option=option)}`"
    if kind == "missing":
        return f"is missing; {advice}"
    table = field == "model_args" and not key
    expected = "a table of names and values" if table else Spec.model_fields[field].description or ""
    words = re.findall(r'"([^"]+)"', expected)
    near = nearest(value.lower(), words, 0.5) if isinstance(value, str) else ""
    return f"must be {expected}, got {_shown(value)}; " + (f'did you mean "{near}"?' if near else advice)


def _shown(value: Any) -> str:
    """The value as TOML or JSON would write it, cut to what fits a line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def option_name(field: str) -> str:
    """Returns the command line's name of a field."""
    if field == "model_args":
        return "--model-arg"
    return "--" + field.replace("_", "-")


def example(field: str, *, option: bool) -> str:
    """Returns the field's first example as TOML, or as an option."""
    value = (Spec.model_fields[field].examples or [""])[0]
    if not option:
        name = field.replace("_", "-")
        inline = ", ".join(f"{key} = {_shown(item)}" for key, item in value.items()) if isinstance(value, dict) else ""
        return f"{name} = {{ {inline} }}" if inline else f"{name} = {_shown(value)}"
    if isinstance(value, bool):
        return option_name(field)
    if isinstance(value, dict):
        return f"{option_name(field)} " + " ".join(f"{key}={item}" for key, item in value.items())
    return f"{option_name(field)} " + (",".join(map(str, value)) if isinstance(value, tuple) else str(value))


def joined(problems: Sequence[tuple[str, list[str]]]) -> SpecError:
    """One error for the problems of several sources; its text has a line each, with the source in front."""
    several = [SpecError(sentences, source) for source, sentences in problems if sentences]
    if len(several) == 1:
        return several[0]
    lines = "\n".join(map(str, several)).splitlines()
    error = SpecError(lines, f"{len(several)} sources")
    error.args = ("\n".join(lines),)
    return error
