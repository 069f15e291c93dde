"""`gaverify init`: a commented spec, a factory for a model, or an audit's options, written from templates."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gaverify.cli.options import complete_models
from gaverify.cli.streams import guests
from gaverify.errors import GaverifyError, SpecError

if TYPE_CHECKING:
    from gaverify.loading.inspecting import Sketch

KINDS = ("module", "dict", "dataloader", "lightning", "transformers", "transformers-config")


AUDIT = "audit"
"""The kind whose file holds the options of `gaverify audit`, not a spec."""


@dataclass(frozen=True)
class Scaffold:
    """The files that `gaverify init` writes.

    Args:
        model: The model that the spec names.
        text: The text of the factory's file; empty where the spec needs none.
    """

    model: str
    text: str = ""


def scaffold(model: str | None, checkpoint: str | None, kind: str | None, spec: Path, factory: Path) -> Scaffold:
    """Returns the spec's model and the factory's text.

    Args:
        model: The value of `--model`: a built-in, a class, a factory, a folder or name for transformers.
        checkpoint: The value of `--checkpoint`.
        kind: One of `KINDS`, or None to find out.
        spec: The file that the spec will be.
        factory: The file that the factory will be, beside it.

    Raises:
        SpecError: There is no such model or checkpoint, or the kind does not fit it.
        ProblemError: The user's module raised, or holds something else.
    """
    gaps = {} if checkpoint is None else _gaps_of_checkpoint(checkpoint)
    if model is None:
        if kind is None and checkpoint is None:
            return Scaffold("mlp")
        written = _fill_template(kind or "module", spec, factory, gaps)
    else:
        written = _of_model(model, kind, spec, factory, gaps)
    if checkpoint is not None and "load_state_dict" not in written.text:
        raise SpecError("--checkpoint: it needs the class of its model; write `--model file.py:Class`", "model")
    return written


def _of_model(model: str, kind: str | None, spec: Path, factory: Path, gaps: dict[str, str]) -> Scaffold:
    from gaverify.loading.importing import NameKind, check_name, kind_of

    meant = kind_of(model)
    if meant is NameKind.BUILTIN:
        return Scaffold(model)
    if meant is NameKind.TRANSFORMERS:
        return _of_folder(model, spec, factory)
    check_name(model)
    from gaverify.loading.inspecting import sketch

    drawn = sketch(model)
    if drawn is None:
        return Scaffold(model)
    chosen = kind or ("lightning" if drawn.has_training_step else "module")
    if chosen.startswith("transformers"):
        raise SpecError(
            f"--kind {chosen}: `{model}` is a class; give `--model` the folder that `save_pretrained` wrote"
        )
    return _fill_template(chosen, spec, factory, gaps | _gaps_of_class(model, drawn, spec))


def template(name: str) -> str:
    """Returns a text that is filled in: `templates/KIND` is a factory, `parts/` hold the spec and stand-ins."""
    return files("gaverify.cli").joinpath(f"{name}.txt").read_text(encoding="utf-8")


def _fill_template(kind: str, spec: Path, factory: Path, gaps: dict[str, str]) -> Scaffold:
    model, inputs, folder = "Net()", "torch.randn(batch_size, 16)", "AutoModelForCausalLM.from_pretrained(FOLDER)"
    defaults = {
        "SPEC": str(spec),
        "IMPORT": "",
        "STATE": "",
        "BUILD": f'gaverify.fill_in("the model")  # import its class above; such as {model}',
        "LOAD": "",
        "INPUTS": f'gaverify.fill_in("the inputs")  # such as {inputs}',
        "STAR": "",
        "CALL": "inputs",
        "NAME": "FOLDER",
        "FOLDER": '"path/to/folder"',
        "CLASS": f'gaverify.fill_in("the model")  # such as transformers.{folder}',
    }
    text = re.sub(r"@([A-Z]+)@", lambda gap: {**defaults, **gaps}[gap[1]], template(f"templates/{kind}"))
    return Scaffold(f"{factory.name}:factory", text)


def _gaps_of_class(model: str, drawn: Sketch, spec: Path) -> dict[str, str]:
    place, _, attribute = model.rpartition(":")
    names = [attribute.partition(".")[0], *drawn.names]
    gaps = {
        "IMPORT": f"\nfrom {_module(place, spec.parent)} import {', '.join(names)}\n",
        "BUILD": f"{attribute}({drawn.arguments})",
    }
    if not drawn.arguments_are_said:
        gaps["BUILD"] = f'gaverify.fill_in("the arguments of {attribute}")  # {gaps["BUILD"]}'
    if drawn.inputs:
        several = len(drawn.inputs) > 1
        text = ", ".join(drawn.inputs)
        gaps["INPUTS"] = f"{f'({text})' if several else text}  # as in {place}"
        gaps |= {"STAR": "*", "CALL": "*inputs"} if several else {}
    return gaps


def _module(place: str, folder: Path) -> str:
    """The name by which a factory in `folder` imports a module, or a file below it or below the current folder."""
    if not place.endswith(".py"):
        return place
    # The factory's own folder is the first place of imports, the working folder the second.
    for start in (folder, Path()):
        parts = Path(os.path.relpath(place, start)).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            return ".".join(parts)
    raise SpecError(f"`{place}` cannot be imported from `{folder.resolve()}`; run `gaverify init` in the file's folder")


def _gaps_of_checkpoint(path: str) -> dict[str, str]:
    from gaverify.loading.checkpoints import tensors_of

    tensors = "\n".join(f"    {line}" for line in tensors_of(path))
    state = template("parts/state").replace("@CHECKPOINT@", json.dumps(os.path.relpath(path)))
    load = "\n    model.load_state_dict(state(CHECKPOINT))"
    return {"STATE": state.replace("@TENSORS@", tensors), "LOAD": load}


def _of_folder(name: str, spec: Path, factory: Path) -> Scaffold:
    """A folder for transformers: sentences where it has a tokenizer, else no factory is needed."""
    folder = Path(name)
    # Sentences need a tokenizer; random tokens, which `gaverify run` makes itself, need no factory.
    if not any(folder.glob("tokenizer*")):
        return Scaffold(name)
    gaps = {"FOLDER": json.dumps(name), "NAME": name}
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise SpecError(f"`{name}/config.json` cannot be read: {error}") from error
    if named:
        gaps["CLASS"] = f"transformers.{named[0]}.from_pretrained(FOLDER)"
    return _fill_template("transformers", spec, factory, gaps)


@click.command(short_help="Write a spec, and a factory for your model.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option(
    "--model",
    metavar="NAME",
    shell_complete=complete_models,
    help="Your model: file.py:Class, package.module:Class, a factory, or a transformers folder.",
)
@click.option("--checkpoint", metavar="FILE", type=click.Path(), help="The weights that it is to have.")
@click.option("--kind", type=click.Choice([*KINDS, AUDIT]), help="Template to use.  [chosen by --model]")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init(file: Path | None, model: str | None, checkpoint: str | None, kind: str | None, force: bool) -> int:
    """Writes a spec, a commented TOML file with every option, to FILE (gaverify.toml).

    If one is needed, a factory is written next to it: a function that returns model, loss and batch. It holds what
    the file of the model says; what is missing, you fill in.

    \b
      gaverify init --model net.py:Net                        # a class
      gaverify init --model net.py:Net --checkpoint last.pt   # with these weights
      gaverify init --kind dataloader                         # another template
      gaverify init --kind audit                              # options for `gaverify audit`
    """
    if kind == AUDIT:
        return _write_audit(file or Path("audit.toml"), model or checkpoint, force)
    file = file or Path("gaverify.toml")
    if file.suffix == ".py":
        # It is the model that stands in the place of the spec; `--force` would write the spec over it.
        advice = f"name a class or factory of it: `gaverify init --model {file}:NAME`"
        raise SpecError(f"FILE is the spec to write, a .toml file, but `{file}` is Python; {advice}")
    # The factory is imported as a module, whose name has to be an identifier.
    factory = file.with_name(f"{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_model.py")
    with guests():
        written_scaffold = scaffold(model, checkpoint, kind, file, factory)
    text = (
        template("parts/spec")
        .replace("{name}", str(file))
        .replace('model = "mlp"', f"model = {json.dumps(written_scaffold.model)}")
    )
    texts = {file: text} | ({factory: written_scaffold.text} if written_scaffold.text else {})
    _check_absent(texts, force)
    for path, content in texts.items():
        _write(path, content, force)
        click.echo(f"Wrote {path}.")
    parts = [
        f"  line {number}: {part[1]}"
        for number, line in enumerate(written_scaffold.text.splitlines(), 1)
        if (part := re.search(r'gaverify\.fill_in\("(.+?)"\)', line))
    ]
    if parts:
        click.echo("\n".join([f"Fill in, in {factory}:", *parts]))
    click.echo(f"Next: gaverify run {shlex.quote(str(file))}")
    return 0


def _write_audit(file: Path, model: str | None, force: bool) -> int:
    """Writes the options of an audit."""
    if model is not None:
        raise SpecError("--kind audit: leave out `--model` and `--checkpoint`, and name the training script in FILE")
    if file.suffix != ".toml":
        raise SpecError(f'FILE is the .toml file to write, not `{file}`; name the script in it: `script = "{file}"`')
    _check_absent([file], force)
    _write(file, template("parts/audit").replace("{name}", str(file)), force)
    click.echo(f"Wrote {file}: write your script and its arguments into it.")
    click.echo(f"Next: gaverify audit {shlex.quote(str(file))}")
    return 0


def _check_absent(paths: Iterable[Path], force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            raise GaverifyError(f"`{path}` exists already; `--force` overwrites it")


def _write(file: Path, text: str, force: bool) -> None:
    try:
        # "x" refuses in the same step that creates: no file slips in between
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise GaverifyError(f"cannot write `{file}`: {error.strerror or error}") from None
