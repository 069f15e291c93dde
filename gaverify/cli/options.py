"""The options that every run takes, one per field of `Spec`, and what their words mean.

Values stay words here: `gaverify.spec` checks them, with those of the files, and reports all problems at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

Command = TypeVar("Command", bound=Callable[..., Any])

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_ARGUMENT = "Argument of the factory; repeatable."
_NUMERIC = (
    "steps",
    "batch_size",
    "seed",
    "classes",
    "ignore_index",
    "lr",
    "rtol",
    "atol",
    "ranks",
    "timeout",
    "time_limit",
)

# (flag, metavar, help) in the order of the help page; metavars repeat the words of `Spec`, and a test compares them
_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--model", "NAME", "Built-in (see `gaverify models`), package.module:factory or file.py:factory."),
    ("--name", "NAME", "How reports call this run.  [the model]"),
    ("--steps", "K", "Micro-batches per full batch.  [4]"),
    ("--batch-size", "B", "Samples in the full batch, where the model's factory takes it."),
    (
        "--weighting",
        "uniform|samples|tokens|none|W,W,…",
        "Weight of each micro-batch: 1/K, n/N, token shares.  [uniform]",
    ),
    ("--device", "cpu|cuda|cuda:N|xpu|mps|auto", "Where to run.  [where the model lives]"),
    ("--dtype", "float32|float64|bfloat16|float16", "Working precision.  [the model's]"),
    ("--autocast", "bfloat16|float16", "Run the forwards under autocast."),
    ("--seed", "N", "Seed of weights, data and random draws.  [0]"),
    ("--mode", "train|eval", "Mode of the model.  [train]"),
    ("--strategy", "accumulate|summed-loss", "K backwards, or one over the summed losses.  [accumulate]"),
    (
        "--reference",
        "full|offload|recompute|auto",
        "Activations of the full batch: on the device, on the host, made again, or what fits.  [full]",
    ),
    ("--ranks", "R", "Run K micro-batches on each of R processes, as torchrun would."),
    ("--engine", "ddp|fsdp2", "How the ranks share the model, with --ranks.  [ddp]"),
    ("--timeout", "SECONDS", "How long the ranks may take for a window."),
    ("--time-limit", "SECONDS", "When to stop looking for the cause; the verdict comes in any case."),
    ("--optimizer", "sgd|adam|adamw", "Optimizer of --trace.  [sgd]"),
    ("--lr", "LR", "Its learning rate."),
    ("--rtol", "R", "Fixed tolerance as in assert_close, with --atol; default: rounding is measured."),
    ("--atol", "A", "See --rtol."),
    ("--input-shape", "N,N,…", "Shape of one sample, for a factory that returns a bare module."),
    ("--loss", "NAME", "Loss of torch.nn.functional, for a bare module."),
    ("--classes", "N", "Classes of the targets, for a bare module."),
    ("--data", "FOLDER", "Real data for a built-in that has some."),
    ("--pretrained", "NAME-OR-FOLDER", "Real weights for a built-in that has some."),
    (
        "--expect",
        "equivalent|divergent|inconclusive",
        "The outcome that counts as a success.  [equivalent]",
    ),
    ("--ignore-index", "N", "Target that counts as padding.  [-100]"),
)


def spec_options(command: Command) -> Command:
    """Adds one option per field of `Spec` to a command; an option that is not given is None and overrides nothing."""
    command = click.option("--diagnose/--no-diagnose", default=None, help="Look for the cause.  [on]")(command)
    command = click.option("--exact/--no-exact", default=None, help="Ask float64 for every parameter.  [off]")(command)
    command = click.option("--spill/--no-spill", default=None, help="Full-batch gradients on disk, in TMPDIR.  [off]")(
        command
    )
    command = click.option("--trace/--no-trace", default=None, help="Show every micro-batch and the step.")(command)
    return plain_options(command)


def plain_options(command: Command, without: Sequence[str] = ()) -> Command:
    """Adds the options that take a value, all but those of `without`, which mean something else to the command."""
    for flag, metavar, text in reversed(_OPTIONS):
        if flag == "--model":
            command = click.option("--model-arg", "model_args", metavar="NAME=VALUE", multiple=True, help=_ARGUMENT)(
                command
            )
        if flag not in without:
            complete = complete_models if flag == "--model" else complete_words
            command = click.option(flag, metavar=metavar, help=text, shell_complete=complete)(command)
    return command


def complete_models(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers the built-ins; a word with a path or a dot in it is completed to Python files and folders."""
    from gaverify.zoo import BUILTINS

    items = [CompletionItem(builtin.name) for builtin in BUILTINS if builtin.name.startswith(start)]
    return items + _paths(start, ".py") if "/" in start or "." in start or not items else items


def complete_specs(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers TOML files and folders."""
    return _paths(start, ".toml")


def complete_devices(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers the words for devices, present or not: asking torch which are there takes too long for a completion."""
    return [CompletionItem(word) for word in ("cpu", "cuda", "xpu", "mps", "auto") if word.startswith(start)]


def complete_words(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers the words of an option's metavar, such as `uniform|samples|tokens|none|W,W,…`."""
    words = (parameter.make_metavar(ctx) if isinstance(parameter, click.Option) else "").split("|")
    return [CompletionItem(word) for word in words if word.islower() and word.startswith(start)] if words[1:] else []


def _paths(start: str, ending: str) -> list[CompletionItem]:
    """Files of an ending and folders that begin with `start`, as the shell would complete them."""
    folder = os.path.dirname(start)
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:
        return []
    found = [os.path.join(folder, name) for name in names if os.path.join(folder, name).startswith(start)]
    shown = [path for path in found if start.rpartition("/")[2].startswith(".") or not _hidden(path)]
    return [
        CompletionItem(path + ("/" if os.path.isdir(path) else ""), type="plain")
        for path in shown
        if path.endswith(ending) or os.path.isdir(path)
    ]


def _hidden(path: str) -> bool:
    return os.path.basename(path).startswith((".", "__"))


def overrides_from(words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Spec` that the options set, with numbers as numbers; what cannot be read stays a word."""
    overrides = {field: word for field, word in words.items() if word is not None}
    for field in _NUMERIC:
        if field in overrides:
            overrides[field] = read_number(overrides[field])
    for field in ("weighting", "input_shape"):
        if field in overrides:
            overrides[field] = _read_numbers(overrides[field])
    overrides["model_args"] = dict(map(_read_argument, overrides.get("model_args", ())))
    return overrides


def read_number(word: str) -> int | float | str:
    """Returns the number that the word spells, or the word."""
    if not _NUMBER.fullmatch(word):
        return word
    try:
        return int(word)
    except ValueError:
        return float(word)


def read_value(word: str) -> str | int | float | bool:
    """Returns the value of a model argument: true or false, a number, or text; quotes make anything text."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if len(word) >= 2 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    return read_number(word)


def _read_numbers(word: str) -> tuple[int | float | str, ...] | str:
    """`3,32,32` as numbers; a word without digits (`uniform`) as it is."""
    parts = [part.strip() for part in word.strip().strip("()[]").split(",")]
    if parts and not parts[-1]:
        parts.pop()  # `16,`, as Python writes a tuple of one
    numbers = tuple(read_number(part) for part in parts)
    return word if not numbers or any(isinstance(number, str) for number in numbers) else numbers


def _read_argument(word: str) -> tuple[str, str | int | float | bool]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise click.UsageError(f"--model-arg takes NAME=VALUE, such as `--model-arg width=32`; got `{word}`")
    return name, read_value(value)
