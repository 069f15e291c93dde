"""The options of commands, made of tables of options; their completion, and that of words with colons in bash.

Values stay words here: `gaverify.spec` checks them, with those of the files, and reports all problems at once.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import BashComplete, CompletionItem, split_arg_string

from gaverify.spec.options import Option
from gaverify.spec.values import Kind

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


# The arguments and options of a command, made of a table of options.


Command = TypeVar("Command", bound=Callable[..., Any])


def add_options(options: Iterable[Option]) -> Callable[[Command], Command]:
    """Returns what adds an argument or an option to a command for each option of a table, for `read_words`.

    An option that is not given is None, or no words where it repeats; it overrides nothing.
    """

    def add(command: Command) -> Command:
        # Click lists first the option that was added last.
        for option in reversed([option for option in options if option.help or not option.flags]):
            kind = option.kind
            settings: dict[str, Any] = {"metavar": kind.metavar} if kind.metavar else {"is_flag": True, "default": None}
            if kind.words or kind.completes:
                settings["shell_complete"] = partial(complete_kind, kind)
            if option.flags:
                decorate = click.option(*option.flags, option.name, help=option.help, multiple=kind.repeats, **settings)
            elif kind.repeats:
                # Unprocessed: these words may look like options, and belong to the script.
                decorate = click.argument(option.name, nargs=-1, type=click.UNPROCESSED, **settings)
            else:
                decorate = click.argument(option.name, required=False, **settings)
            command = decorate(command)
        return command

    return add


HELP_GROUPS: Mapping[str, Sequence[str]] = {
    "What to verify": (
        *("model", "name", "model_args", "input_shape", "loss", "classes", "data", "pretrained", "batch_size"),
        *("expression", "exclude", "last_failed", "only_list"),
    ),
    "How to verify": (
        *("steps", "weighting", "device", "dtype", "autocast", "seed", "mode", "strategy", "lr"),
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


def complete_kind(kind: Kind, ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    """Offers what a value of the kind may be; devices are there or not, asking torch would take too long."""
    if kind.completes == "model":
        return complete_models(ctx, parameter, start)
    words = [CompletionItem(word) for word in kind.words if word.startswith(start)]
    # The shell itself completes files and folders.
    return [*words, CompletionItem(start, type=kind.completes)] if kind.completes else words


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
