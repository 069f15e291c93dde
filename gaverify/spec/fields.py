"""The one table of options: what each is called, must be and means; specs, the command line and messages read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from typing import Any

from gaverify.errors import SpecError
from gaverify.spec.entries import Accept
from gaverify.spec.options import explain_values, find_wrong, option, options_of
from gaverify.spec.values import (
    DEVICE,
    FLAG,
    INTEGER,
    MODEL_ARGUMENTS,
    SECONDS,
    SHAPE,
    WEIGHTING,
    Kind,
    above_zero,
    one_of,
    seeds,
    text,
    tolerance,
    whole,
)

MODEL = text("a built-in, `package.module:factory` or `file.py:factory`", "NAME", "model")
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
LOSS = replace(text("the name of a loss in `torch.nn.functional`", "NAME"), words=LOSSES)
WEIGHTS = text("a model's name or folder", "NAME-OR-FOLDER")
DTYPE = one_of("float32", "float64", "bfloat16", "float16")
STRATEGY = one_of("accumulate", "summed-loss")
REFERENCE = one_of("full", "offload", "auto")
OUTCOME = one_of("equivalent", "divergent", "inconclusive")
ENTRIES = Kind(
    "a list of tables with `code`, `location` and `reason`",
    "",
    lambda value: all(isinstance(entry, Accept) for entry in value),
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The model to verify and how, as a TOML spec or the command line says it; None leaves the choice to the model.

    Raises:
        ValueError: A value is none of its kind, or values contradict each other.
    """

    model: str = option(
        MODEL,
        "Built-in (see `gaverify models`), or a function that returns model, loss and batch (a factory): "
        "package.module:factory or file.py:factory.",
        MISSING,
        "mlp",
    )
    """Name of the built-in or factory."""
    name: str | None = option(text("a name for reports", "NAME"), "Name in reports.  [the model]", None, "nightly")
    """Name in reports; None: the model's."""
    model_args: Mapping[str, str | int | float | bool] = option(
        MODEL_ARGUMENTS, "Argument of the factory; repeatable.", dict, {"width": 32}, flags="--model-arg"
    )
    """Keyword arguments of the factory; empty: none."""
    steps: int = option(
        whole(1, "K"), "K, micro-batches per optimizer step; not the number of optimizer steps.  [4]", 4
    )
    """K, micro-batches per full batch, per rank."""
    batch_size: int | None = option(
        whole(1, "B"), "Samples in the full batch, if the factory takes `batch_size`.", None, 8
    )
    """B, samples in the full batch; None: the factory decides."""
    weighting: str | tuple[float, ...] = option(
        WEIGHTING,
        "Factor of each loss; uniform: 1/K, samples: share of samples, tokens: share of tokens, none: loss not scaled; "
        "or K numbers.  [uniform]",
        "uniform",
    )
    """Rule, or one number per micro-batch, for the losses' factors."""
    device: str | None = option(DEVICE, "Device to run on.  [the model's]", None, "cpu")
    """Torch device; None: the model's."""
    dtype: str | None = option(
        DTYPE, "Convert the model and the batch to this precision.  [the model's]", None, "float32"
    )
    """Name of the parameters' dtype; None: the model's."""
    autocast: str | None = option(
        one_of("bfloat16", "float16"), "Run the forward passes under autocast.", None, "bfloat16"
    )
    """Autocast dtype of the forwards; None: no autocast."""
    seed: int = option(seeds(63), "Seed of weights, data and random numbers.  [0]", 0)
    """Seed of weights, data and draws."""
    mode: str = option(
        one_of("auto", "train", "eval"),
        "train, eval: all layers, as by model.train() or model.eval(); auto: train, but layers that the factory left "
        "in different modes stay so.  [auto]",
        "auto",
    )
    """`train`, `eval` or `auto`."""
    strategy: str = option(
        STRATEGY, "K backward passes, or a single one of the summed losses.  [accumulate]", "accumulate"
    )
    """K backward passes, or one over the summed losses."""
    trace: bool = option(
        FLAG, "Show each micro-batch's gradient, and a step of SGD.", False, True, flags="--trace/--no-trace"
    )
    """Whether to show every micro-batch and one step of SGD."""
    lr: float = option(above_zero("a number", "LR", 1e30), "Learning rate of that step.  [0.01]", 0.01)
    """Learning rate of the trace."""
    rtol: float | None = option(
        tolerance("R"),
        "Fixed relative tolerance, as in torch.testing.assert_close; needs --atol.  [rounding is measured]",
        None,
        1e-5,
    )
    """Relative tolerance; None: rounding is measured."""
    atol: float | None = option(tolerance("A"), "Fixed absolute tolerance; needs --rtol.", None, 1e-8)
    """Absolute tolerance; None: rounding is measured."""
    input_shape: tuple[int, ...] | None = option(
        SHAPE, "Shape of one sample, if the factory returns only an nn.Module.", None, (3, 32, 32)
    )
    """Shape of one sample, without the batch dimension; None: not given."""
    loss: str | None = option(
        LOSS, "Loss of torch.nn.functional, if the factory returns only an nn.Module.", None, "cross_entropy"
    )
    """Name in `torch.nn.functional`; None: not given."""
    classes: int | None = option(
        whole(1, "N"), "Number of target classes, if the factory returns only an nn.Module.", None, 10
    )
    """Number of target classes; None: not given."""
    data: str | None = option(
        text("a folder", "FOLDER"), "Real data, for built-ins that can use it.", None, "data/mnist"
    )
    """Folder of real data; None: not given."""
    pretrained: str | None = option(WEIGHTS, "Real weights, for built-ins that can use them.", None, "gpt2")
    """Name or folder of real weights; None: not given."""
    ignore_index: int = option(INTEGER, "Target value that marks padding.  [-100]", -100)
    """Target value that counts as padding."""
    ranks: int | None = option(
        whole(2, "R"), "Run K micro-batches on each of R processes (ranks), as torchrun would.", None, 2
    )
    """R, number of processes; None: this process alone."""
    engine: str = option(one_of("ddp", "fsdp2"), "Parallel wrapper of the model, with --ranks.  [ddp]", "ddp")
    """`ddp` or `fsdp2`."""
    timeout: float | None = option(
        SECONDS,
        "Stop the run after this time, without a verdict; with --ranks, the limit of each accumulation window.",
        None,
        600,
    )
    """Seconds; None: no limit."""
    diagnose: bool = option(FLAG, "Search for the cause of a difference.  [on]", True, flags="--diagnose/--no-diagnose")
    """Whether to look for the cause."""
    time_limit: float | None = option(
        SECONDS, "Stop only the search for the cause after this time; the verdict does not depend on it.", None, 60
    )
    """Seconds for the search for the cause; None: no limit."""
    exact: bool = option(FLAG, "Check every parameter in float64.  [off]", False, True, flags="--exact/--no-exact")
    """Whether float64 decides every parameter."""
    reference: str = option(
        REFERENCE,
        "Where to keep the full batch's activations: on the device, in CPU memory, or where they fit.  [full]",
        "full",
        "auto",
    )
    """`full`, `offload` or `auto`."""

    accept: tuple[Accept, ...] = option(ENTRIES, "", ())
    """Divergences that the user accepts; empty: none."""
    expect: str | None = option(OUTCOME, "Outcome that counts as success.  [equivalent]", None, "divergent")
    """Outcome that counts as a success; None: equivalent."""

    def __post_init__(self) -> None:
        if problems := list(explain_spec(vars(self))):
            raise ValueError("; ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as plain strings, numbers, lists and mappings, ready for JSON."""
        # By way of JSON: tuples become the lists that a document holds when it is read back.
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


OPTIONS = options_of(Spec)


def explain_spec(values: Mapping[str, Any], places: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields a sentence for everything that is wrong with the values of fields, with its place in front.

    Fields that are not there have their defaults. Those that are right alone are held against each other.

    Args:
        values: The values of fields.
        places: Where each stands; None: in a call of Python's.
    """
    places = places or {name: f"`{name}`" for name in OPTIONS}
    yield from explain_values(OPTIONS, values, places)
    wrong = {option.name for option, _ in find_wrong(OPTIONS, values)}
    right = {name: values.get(name, each.default) for name, each in OPTIONS.items() if name not in wrong}
    yield from (f"{places[name]}: {text}" for name, text in _conflicts(right))


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
