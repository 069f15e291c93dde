"""The options that every run takes, made of the fields of `Spec`; and completion of words with colons in bash.

Values stay words here: `gaverify.spec` checks them, with those of the files, and reports all problems at once.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import BashComplete, CompletionItem, split_arg_string

from gaverify.spec.fields import OPTIONS, option_name
from gaverify.spec.values import FLAG, Kind, read_value

# Completion of words with colons in bash, which breaks `file.py:factory` into three words.


class ColonComplete(BashComplete):
    """Puts a word that bash broke at its colons together again, and completes what stands behind the last of them."""

    _replaced = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the words before the one that is completed, and that one."""
        broken, cursor = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        broken = broken[: cursor + 1] + [""] * (cursor + 1 - len(broken))
        words: list[str] = []
        for at, word in enumerate(broken):
            is_joined = at > 0 and bool(words) and (word == ":" or broken[at - 1] == ":")
            words[-1:] = [words[-1] + word] if is_joined else [*words[-1:], word]
        # bash replaces what stands behind the colon alone, where it broke the word there
        if ":" in broken[-2:]:
            self._replaced = words[-1][: words[-1].rindex(":") + 1]
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Returns the line of an item, without what bash keeps."""
        return f"{item.type},{str(item.value).removeprefix(self._replaced)}"


# The options that every run takes, made of the fields of `Spec`.


Command = TypeVar("Command", bound=Callable[..., Any])


def spec_options(command: Command, without: Sequence[str] = ()) -> Command:
    """Adds one option per field of `Spec` to a command, but for those of `without`, which mean something else to it.

    An option that is not given is None and overrides nothing.
    """
    # Click lists first the option that was added last.
    for name, option in reversed(OPTIONS.items()):
        flag = option_name(name)
        settings: dict[str, Any] = {"metavar": option.kind.metavar, "shell_complete": completing(option.kind)}
        if option.kind is FLAG:
            # None stands for an option that was not given; `--no-…` gives False, which overrides a spec.
            flag, settings = f"{flag}/--no-{flag[2:]}", {"default": None}
        elif name == "model":
            settings["shell_complete"] = complete_models
        elif name == "model_args":
            settings["multiple"] = True
        if option.help and name not in without:
            command = click.option(flag, name, help=option.help, **settings)(command)
    return command


HELP_GROUPS: Mapping[str, Sequence[str]] = {
    "What to verify": (
        *("model", "name", "model_args", "input_shape", "loss", "classes", "data", "pretrained", "batch_size"),
        *("expression", "exclude"),
    ),
    "How to verify": (
        *("steps", "weighting", "device", "dtype", "autocast", "seed", "mode", "strategy", "optimizer", "lr"),
        *("rtol", "atol", "ignore_index", "diagnose", "time_limit", "exact", "reference", "timeout", "jobs"),
        *("stop_at_first", "maxfail"),
    ),
    "Several ranks": ("ranks", "engine"),
}
"""Headings of `gaverify run --help` with their options; the others are about the report."""


class GroupedCommand(click.Command):
    """A command whose help lists its options under the headings of `HELP_GROUPS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of options for each heading."""
        heading_of = {name: heading for heading, names in HELP_GROUPS.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*HELP_GROUPS, "Report")}
        for parameter in self.get_params(ctx):
            # newer versions of click have a help record for arguments, too
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                rows[heading_of.get(parameter.name or "", "Report")].append(record)
        for heading, records in rows.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def names_a_model(word: Path) -> bool:
    """Whether a word stands for what `--model` takes: no path that exists, but for a model that transformers saved."""
    if os.path.exists(word):
        # `save_pretrained` writes no TOML file: a folder that has one holds specs, whatever else lies there.
        return (word / "config.json").is_file() and not any(word.glob("*.toml"))
    return ":" in word.name or not (word.suffix or word.parent.name)


def complete_models(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers the built-ins; a word with a path or a dot in it is completed to Python files and folders."""
    from gaverify.zoo import BUILTINS

    file, colon, name = start.rpartition(":")
    if colon:
        return [CompletionItem(f"{file}:{factory}") for factory in _factories(file) if factory.startswith(name)]
    items = [CompletionItem(builtin.name) for builtin in BUILTINS if builtin.name.startswith(start)]
    return items + _paths(start, ".py") if "/" in start or "." in start or not items else items


def complete_specs(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers what a positional argument takes: TOML files, folders, and all that `--model` takes."""
    items = {item.value: item for item in (*_paths(start, ".toml"), *complete_models(ctx, parameter, start))}
    return list(items.values())


def _factories(file: str) -> list[str]:
    """Returns the public functions and classes of a Python file; its text is read, and none of its code runs."""
    from gaverify.loading.importing import parse_file

    # Completion answers at every press of Tab: importing the file would import torch.
    nodes = (node for node in parse_file(Path(file)).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return [node.name for node in nodes if not node.name.startswith("_")]


def completing(kind: Kind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Returns what offers the words of a kind; devices are there or not, asking torch would take too long."""
    return lambda _, __, start: [CompletionItem(word) for word in kind.words if word.startswith(start)]


def _paths(start: str, ending: str) -> list[CompletionItem]:
    """Files of an ending and folders that begin with `start`, as the shell would complete them."""
    folder = os.path.dirname(start)
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:
        return []
    candidates = [os.path.join(folder, name) for name in names if os.path.join(folder, name).startswith(start)]
    # Files that begin with a dot are offered only to a word that does, as shells do.
    if not start.rpartition("/")[2].startswith("."):
        candidates = [path for path in candidates if not os.path.basename(path).startswith((".", "__"))]
    return [
        CompletionItem(path + ("/" if os.path.isdir(path) else ""), type="plain")
        for path in candidates
        if path.endswith(ending) or os.path.isdir(path)
    ]


def overrides_from(words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Spec` that the options set, with numbers as numbers; what cannot be read stays a word."""
    overrides = {name: word for name, word in words.items() if word is not None}
    for name, word in overrides.items():
        # Flags are booleans already.
        overrides[name] = OPTIONS[name].kind.read(word) if isinstance(word, str) else word
    return overrides | {"model_args": dict(map(_read_argument, overrides.get("model_args", ())))}


def _read_argument(word: str) -> tuple[str, str | int | float | bool]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise click.UsageError(f"--model-arg takes NAME=VALUE, such as `--model-arg width=32`; got `{word}`")
    return name, read_value(value)
