"""The one table of options: what each is called, must be and means; specs, the command line and messages read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, NamedTuple

from gaverify.errors import SpecError, nearest
from gaverify.spec.values import (
    ARGUMENT,
    DEVICE,
    ENTRIES,
    FLAG,
    INTEGER,
    SECONDS,
    SEED,
    SHAPE,
    WEIGHTING,
    Accept,
    Kind,
    above_zero,
    one_of,
    text,
    tolerance,
    whole,
)

MODEL = text("a built-in, `package.module:factory` or `file.py:factory`", "NAME")
# those that `gaverify.loading.bare` can call, for completion, which does not import torch
LOSSES = (
    "cross_entropy",
    "nll_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "poisson_nll_loss",
    "soft_margin_loss",
    "hinge_embedding_loss",
)
LOSS = text("the name of a loss in `torch.nn.functional`", "NAME")._replace(words=LOSSES)
WEIGHTS = text("a model's name or folder", "NAME-OR-FOLDER")
DTYPE = one_of("float32", "float64", "bfloat16", "float16")
STRATEGY = one_of("accumulate", "summed-loss")
REFERENCE = one_of("full", "offload", "auto")
OUTCOME = one_of("equivalent", "divergent", "inconclusive")


class Option(NamedTuple):
    """What is known of one field of `Spec`.

    Args:
        kind: What its values must be.
        help: What the help page says; "" for what has no option on the command line.
        example: A right value, which messages offer as the remedy.
    """

    kind: Kind
    help: str
    example: Any


def _set(kind: Kind, help: str, default: Any, example: Any = None) -> Any:
    """A field with a default, or the type of an empty one; it is an example where none is given."""
    metadata = {"option": Option(kind, help, default if example is None else example)}
    return (
        field(default_factory=default, metadata=metadata)
        if default is dict
        else field(default=default, metadata=metadata)
    )


def _optional_field(kind: Kind, example: Any, help: str) -> Any:
    """A field that is None where it is left out: the model decides."""
    return _set(kind, help, None, example)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to verify and how, as a TOML spec or the command line says it; None leaves the choice to the model.

    Raises:
        ValueError: A value is none of its kind, or values contradict each other.
    """

    model: str = _set(
        MODEL,
        "Built-in (see `gaverify models`), or a function that returns model, loss and batch (a factory): "
        "package.module:factory or file.py:factory.",
        MISSING,
        "mlp",
    )
    """Name of the built-in or factory."""
    name: str | None = _optional_field(text("a name for reports", "NAME"), "nightly", "Name in reports.  [the model]")
    """Name in reports; None: the model's."""
    model_args: Mapping[str, str | int | float | bool] = _set(
        ARGUMENT, "Argument of the factory; repeatable.", dict, {"width": 32}
    )
    """Keyword arguments of the factory; empty: none."""
    steps: int = _set(whole(1, "K"), "K, micro-batches per optimizer step; not the number of optimizer steps.  [4]", 4)
    """K, micro-batches per full batch, per rank."""
    batch_size: int | None = _optional_field(
        whole(1, "B"), 8, "Samples in the full batch, if the factory takes `batch_size`."
    )
    """B, samples in the full batch; None: the factory decides."""
    weighting: str | tuple[float, ...] = _set(
        WEIGHTING,
        "Factor of each loss; uniform: 1/K, samples: share of samples, tokens: share of tokens, none: loss not scaled; "
        "or K numbers.  [uniform]",
        "uniform",
    )
    """Rule, or one number per micro-batch, for the losses' factors."""
    device: str | None = _optional_field(DEVICE, "cpu", "Device to run on.  [the model's]")
    """Torch device; None: the model's."""
    dtype: str | None = _optional_field(
        DTYPE, "float32", "Convert the model and the batch to this precision.  [the model's]"
    )
    """Name of the parameters' dtype; None: the model's."""
    autocast: str | None = _optional_field(
        one_of("bfloat16", "float16"), "bfloat16", "Run the forward passes under autocast."
    )
    """Autocast dtype of the forwards; None: no autocast."""
    seed: int = _set(SEED, "Seed of weights, data and random numbers.  [0]", 0)
    """Seed of weights, data and draws."""
    mode: str = _set(
        one_of("auto", "train", "eval"),
        "train, eval: all layers, as by model.train() or model.eval(); auto: train, but layers that the factory left "
        "in different modes stay so.  [auto]",
        "auto",
    )
    """`train`, `eval` or `auto`."""
    strategy: str = _set(
        STRATEGY, "K backward passes, or a single one of the summed losses.  [accumulate]", "accumulate"
    )
    """K backward passes, or one over the summed losses."""
    trace: bool = _set(FLAG, "Show each micro-batch's gradient, and an optimizer step.", False, True)
    """Whether to show every micro-batch and one optimizer step."""
    optimizer: str = _set(one_of("sgd", "adam", "adamw"), "Optimizer whose step --trace shows.  [sgd]", "sgd")
    """Optimizer of the trace."""
    lr: float | None = _optional_field(above_zero("a number", "LR"), 0.01, "Learning rate of that optimizer.")
    """Learning rate of the trace; None: 0.01 for SGD, else 0.001."""
    rtol: float | None = _optional_field(
        tolerance("R"),
        1e-5,
        "Fixed relative tolerance, as in torch.testing.assert_close; needs --atol.  [rounding is measured]",
    )
    """Relative tolerance; None: rounding is measured."""
    atol: float | None = _optional_field(tolerance("A"), 1e-8, "Fixed absolute tolerance; needs --rtol.")
    """Absolute tolerance; None: rounding is measured."""
    input_shape: tuple[int, ...] | None = _optional_field(
        SHAPE, (3, 32, 32), "Shape of one sample, if the factory returns only an nn.Module."
    )
    """Shape of one sample, without the batch dimension; None: not given."""
    loss: str | None = _optional_field(
        LOSS, "cross_entropy", "Loss of torch.nn.functional, if the factory returns only an nn.Module."
    )
    """Name in `torch.nn.functional`; None: not given."""
    classes: int | None = _optional_field(
        whole(1, "N"), 10, "Number of target classes, if the factory returns only an nn.Module."
    )
    """Number of target classes; None: not given."""
    data: str | None = _optional_field(
        text("a folder", "FOLDER"), "data/mnist", "Real data, for built-ins that can use it."
    )
    """Folder of real data; None: not given."""
    pretrained: str | None = _optional_field(WEIGHTS, "gpt2", "Real weights, for built-ins that can use them.")
    """Name or folder of real weights; None: not given."""
    ignore_index: int = _set(INTEGER, "Target value that marks padding.  [-100]", -100)
    """Target value that counts as padding."""
    ranks: int | None = _optional_field(
        whole(2, "R"), 2, "Run K micro-batches on each of R processes (ranks), as torchrun would."
    )
    """R, number of processes; None: this process alone."""
    engine: str = _set(one_of("ddp", "fsdp2"), "Parallel wrapper of the model, with --ranks.  [ddp]", "ddp")
    """`ddp` or `fsdp2`."""
    timeout: float | None = _optional_field(
        SECONDS,
        600,
        "Stop the run after this time, without a verdict; with --ranks, the limit of each accumulation window.",
    )
    """Seconds; None: no limit."""
    diagnose: bool = _set(FLAG, "Search for the cause of a difference.  [on]", True)
    """Whether to look for the cause."""
    time_limit: float | None = _optional_field(
        SECONDS, 60, "Stop only the search for the cause after this time; the verdict does not depend on it."
    )
    """Seconds for the search for the cause; None: no limit."""
    exact: bool = _set(FLAG, "Check every parameter in float64.  [off]", False, True)
    """Whether float64 decides every parameter."""
    reference: str = _set(
        REFERENCE,
        "Where to keep the full batch's activations: on the device, in CPU memory, or where they fit.  [full]",
        "full",
        "auto",
    )
    """`full`, `offload` or `auto`."""

    accept: tuple[Accept, ...] = _set(ENTRIES, "", ())
    """Divergences that the user accepts; empty: none."""
    expect: str | None = _optional_field(OUTCOME, "divergent", "Outcome that counts as success.  [equivalent]")
    """Outcome that counts as a success; None: equivalent."""

    def __post_init__(self) -> None:
        problems = [
            f"`{name}` {reason or sentence(name, key, vars(self), option=False)}"
            for (name, key), reason in wrong(vars(self)).items()
        ]
        if problems:
            raise ValueError("; ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as plain strings, numbers, lists and mappings, ready for JSON."""
        # By way of JSON: tuples become the lists that a document holds when it is read back.
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


OPTIONS: dict[str, Option] = {entry.name: entry.metadata["option"] for entry in fields(Spec)}


def wrong(values: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Returns what is wrong: (field, or field and model argument) → a sentence; "" where it is none of its kind.

    Fields that are not there have their defaults. Those that are right alone are held against each other.
    """
    problems: dict[tuple[str, str], str] = {}
    right: dict[str, Any] = {}
    for entry in fields(Spec):
        name, kind = entry.name, OPTIONS[entry.name].kind
        value = right[name] = values.get(name, entry.default)
        if name == "model_args":
            # What is no table at all has one problem, and no argument that could be named.
            arguments = value if isinstance(value, Mapping) else {"": None} if name in values else {}
            problems |= {(name, key): "" for key, argument in arguments.items() if not kind.fits(argument)}
        # None is right where it is the default: the model decides then.
        elif not kind.fits(value) and (value is not None or entry.default is not None):
            problems[name, ""] = ""
            del right[name]
    return problems | {(field, ""): text for field, text in _conflicts(right)}


def _conflicts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (field, sentence) for fields that are right alone and wrong together."""
    numbers = values.get("weighting")
    # A count that is wrong itself has its own sentence, and says nothing of the weights.
    if isinstance(numbers, tuple) and {"steps", "ranks"} <= values.keys():
        steps = values["steps"] * (values["ranks"] or 1)
        if len(numbers) != steps:
            yield "weighting", f"must have one number per micro-batch: {len(numbers)} numbers, but steps is {steps}"
    missing = [name for name in ("rtol", "atol") if values.get(name, 0) is None]
    if len(missing) == 1 and {"rtol", "atol"} <= values.keys():
        present = "atol" if missing == ["rtol"] else "rtol"
        yield present, f"needs `{missing[0]}` too: give both, or neither to let gaverify measure the rounding"


def sentence(field: str, key: str, values: Mapping[str, Any], *, option: bool) -> str:
    """Returns what is wrong with a value that is none of its kind, and what to write instead.

    Args:
        field: The field of `Spec`.
        key: The model argument, where one is wrong and not the whole field.
        values: What was written for the fields.
        option: Whether it stands on the command line.
    """
    advice = f"write `{example(field, option=option)}`"
    if field not in values:
        return f"is missing; {advice}"
    value = values[field][key] if key else values[field]
    kind = OPTIONS[field].kind
    must = "a table of names and values" if field == "model_args" and not key else kind.must
    near = ""
    if isinstance(value, str):
        # the spelling of "gpu" is closer to "cpu", the one device that it does not mean
        is_gpu = field == "device" and re.fullmatch(r"gpu(:\d+)?", value.lower())
        # 0.5, below the usual 0.6: these words are short, and one wrong letter counts much.
        near = f"cuda{is_gpu[1] or ''}" if is_gpu else nearest(value.lower(), re.findall(r'"([^"]+)"', must), 0.5)
    return f"must be {must}, got {_short_value(value)}; " + (f'did you mean "{near}"?' if near else advice)


def _short_value(value: Any) -> str:
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
    value = OPTIONS[field].example
    if not option:
        name = field.replace("_", "-")
        inline = (
            ", ".join(f"{key} = {_short_value(item)}" for key, item in value.items()) if isinstance(value, dict) else ""
        )
        return f"{name} = {{ {inline} }}" if inline else f"{name} = {_short_value(value)}"
    if isinstance(value, bool):
        return option_name(field)
    if isinstance(value, dict):
        return f"{option_name(field)} " + " ".join(f"{key}={item}" for key, item in value.items())
    return f"{option_name(field)} " + (",".join(map(str, value)) if isinstance(value, tuple) else str(value))


def join_problems(problems: Sequence[tuple[str, list[str]]]) -> SpecError:
    """One error for the problems of several sources; its text has a line each, with the source in front."""
    several = [SpecError(sentences, source) for source, sentences in problems if sentences]
    if len(several) == 1:
        return several[0]
    lines = "\n".join(map(str, several)).splitlines()
    error = SpecError(lines, f"{len(several)} sources")
    # Each line names its source already, which the constructor would put in front once more.
    error.args = ("\n".join(lines),)
    return error
