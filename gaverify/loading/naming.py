"""Finds out what `--model` names without importing torch, so that an unknown name is answered at once."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from enum import Enum, auto
from pathlib import Path

from gaverify.errors import SpecError
from gaverify.loading.importing import check_file, no_module
from gaverify.loading.texts import check_attribute, first_function, parse_file
from gaverify.zoo import BUILTINS, find_builtin

WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pt2", ".onnx")
"""Endings of files that hold a model's numbers, not its code."""

_HUB = re.compile(r"[\w.-]+/[\w.-]+")


class Kind(Enum):
    """What a name stands for."""

    BUILTIN = auto()
    FACTORY = auto()
    """`package.module:factory` or `file.py:factory`."""
    TRANSFORMERS = auto()
    """A folder that `save_pretrained` wrote, or `organisation/name` on the hub."""


def kind_of(name: str) -> Kind:
    """Returns what a name stands for.

    Raises:
        SpecError: It stands for nothing that can be run; the sentence says what to write instead.
    """
    if any(builtin.name == name for builtin in BUILTINS):
        return Kind.BUILTIN
    place = Path(name)
    if name.endswith(WEIGHTS) or (name.endswith((".toml", ".ipynb")) and os.path.isfile(name)):
        raise SpecError(_file_that_is_no_model(name), "model")
    if os.path.isdir(name):
        if (place / "config.json").is_file():
            return Kind.TRANSFORMERS
        raise SpecError(_folder_that_is_no_model(name, place), "model")
    if ":" in name or name.endswith(".py"):
        if wrong := _describe_malformed(name):
            raise SpecError(wrong, "model")
        return Kind.FACTORY
    if _HUB.fullmatch(name) and not os.path.exists(place.parent):
        return Kind.TRANSFORMERS
    raise SpecError(_describe_unknown_name(name), "model")


def check_name(name: str) -> None:
    """Raises `SpecError` for a name that cannot be found, where that is certain without running any of the user's code.

    A module that is not at the top of its package, or that defines its names as it runs, is left to the import.
    """
    if kind_of(name) is not Kind.FACTORY:
        return
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        return
    if place.endswith(".py"):
        check_file(Path(place))
        check_attribute(parse_file(Path(place)), place, attribute)
        return
    top = place.partition(".")[0]
    if os.sep in place or "/" in place or top in sys.modules:
        return
    module_spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    if module_spec is None:
        raise SpecError(no_module(place, top), "model")
    if top == place and not module_spec.submodule_search_locations:
        check_attribute(parse_file(Path(module_spec.origin or "")), place, attribute)


def _describe_malformed(name: str) -> str:
    """What is wrong with a name that has a colon; "" where only the import can tell."""
    place, _, attribute = os.path.splitdrive(name)[1].rpartition(":")
    if ":" in place:
        return f"`{name}` has more than one colon; write `package.module:factory` or `file.py:factory`"
    if re.fullmatch(r"\.+[\w.]*", place) and not place.endswith(".py"):
        plain = place.strip(".") or "package.module"
        return f"`{name}` is relative to a package, and there is none here; write `{plain}:{attribute or 'factory'}`"
    return ""


def _file_that_is_no_model(name: str) -> str:
    if name.endswith(".toml"):
        return f"`{name}` is a spec, not a model; write `gaverify run {name}`"
    if name.endswith(".ipynb"):
        return f"`{name}` is a notebook; put the factory into a .py file and write `file.py:factory`"
    if not os.path.exists(name):
        return (
            f"checkpoint not found: `{name}`; for one that exists, "
            f"`gaverify init --model {name}` writes a factory that loads it"
        )
    return (
        f"`{name}` holds weights, not the model's code; `gaverify init --model {name}` writes a factory that loads it"
    )


def _folder_that_is_no_model(name: str, folder: Path) -> str:
    if any(folder.glob("*.toml")):
        return f"`{name}` is a folder of specs; write `gaverify run {name}`"
    modules = sorted(entry.name for entry in folder.glob("*.py") if entry.name != "__init__.py")
    if modules:
        example = Path(name, modules[0])
        return f"`{name}` is a folder; name a file in it and a factory: `{example}:{first_function(str(example))}`"
    return f"`{name}` is a folder without `config.json`, `*.py` or `*.toml`; write `file.py:factory`"


def _describe_unknown_name(name: str) -> str:
    """The sentence for a word without a colon: a built-in that is misspelt, or a factory with a dot for the colon."""
    place, dot, attribute = name.rpartition(".")
    if dot and attribute and all(part.isidentifier() for part in place.split(".")):
        file = os.path.join(*place.split("."))
        top = place.partition(".")[0]
        is_module = top in sys.modules or importlib.util.find_spec(top) is not None
        if is_module or os.path.isfile(f"{file}.py") or os.path.isdir(file):
            return f"there is no built-in `{name}`; a factory follows a colon: `{place}:{attribute}`"
    if os.path.isfile(file := f"{name}.py"):
        return f"`{name}` names a module without a factory; write `{file}:{first_function(file)}`"
    if "/" in name or os.sep in name:
        if os.path.exists(name):
            return f"`{name}` is a file without a factory; write `file.py:factory`"
        return f"there is no file or folder `{name}`; paths start from the current folder"
    try:
        find_builtin(name)
    except SpecError as error:
        return error.problems[0]
    return f"`{name}` is not a model; write `package.module:factory` or `file.py:factory`"
