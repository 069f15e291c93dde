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

KINDS = ("module", "dict", "dataloader", "lightning", "checkpoint", "transformers", "transformers-config")


AUDIT = "audit"
"""The kind whose file holds the options of `gaverify audit`, not a spec."""


@dataclass(frozen=True)
class Scaffold:
    """What `gaverify init` writes.

    Args:
        model: What the spec names.
        text: Of the factory's file; empty where the spec needs none.
        advice: What to change before the first run; empty where it runs as it is.
    """

    model: str
    text: str = ""
    advice: str = ""


def scaffold(model: str | None, kind: str | None, spec: Path, factory: Path) -> Scaffold:
    """Returns the spec's model and the factory's text.

    Args:
        model: What `--model` said: a built-in, a class, a factory, a folder or name for transformers, a checkpoint.
        kind: One of `KINDS`, or None to find out.
        spec: The file that the spec will be.
        factory: The file that the factory will be, beside it.

    Raises:
        SpecError: There is no such model, or the kind does not fit it.
        ProblemError: The user's module raised, or holds something else.
    """
    if model is None:
        if kind is None:
            return Scaffold("mlp")
        return _fill_template(kind, spec, factory, {}, "insert your own model and batch")
    # Checkpoints have any ending (.pt, .ckpt, .bin, none): every file that is no code is taken for one.
    if os.path.isfile(model) and not model.endswith((".py", ".toml", ".ipynb")):
        return _of_checkpoint(model, spec, factory)
    if listed := _classes_to_name(model):
        raise SpecError(listed, "model")
    from gaverify.loading.importing import Kind, check_name, kind_of

    meant = kind_of(model)
    if meant is Kind.BUILTIN:
        return Scaffold(model)
    if meant is Kind.TRANSFORMERS:
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
    return _fill_template(chosen, spec, factory, _gaps(model, drawn, spec), _advice(drawn, chosen))


def template(name: str) -> str:
    """Returns a text that is filled in: `templates/KIND` is a factory, `parts/` hold the spec and stand-ins."""
    return files("gaverify.cli").joinpath(f"{name}.txt").read_text(encoding="utf-8")


def _fill_template(kind: str, spec: Path, factory: Path, gaps: dict[str, str], advice: str) -> Scaffold:
    from gaverify.loading.importing import GUESS

    notes = {part: f"  # {GUESS.format(part=f'the {part.lower()}')}" for part in ("LOSS", "INPUTS", "TARGETS")}
    defaults = {
        **{f"{part}NOTE": note for part, note in notes.items()},
        "BUILDNOTE": "",
        "SPEC": str(spec),
        "MODEL": template("parts/step" if kind == "lightning" else "parts/net").rstrip(),
        "BUILD": "Net()",
        "INPUTS": "torch.randn(batch_size, 16)",
        "STAR": "",
        "LOSS": "F.cross_entropy(model(inputs), targets)",
        "TARGETS": "torch.randint(10, (batch_size,))",
        "CHECKPOINT": '"model.pt"',
        "NAME": "FOLDER",
        "TENSORS": "The file is what `torch.save(model.state_dict(), path)` wrote.",
        "CLASS": "AutoModelForCausalLM",
        "FOLDER": '"path/to/folder"',
    }
    text = re.sub(r"@([A-Z]+)@", lambda gap: {**defaults, **gaps}[gap[1]], template(f"templates/{kind}"))
    # A model may bring its own loss: the import would be unused, which linters report.
    if " F." not in text and "(F." not in text:
        text = text.replace("from torch.nn import functional as F\n", "")
    return Scaffold(f"{factory.name}:factory", text, advice)


def _gaps(model: str, drawn: Sketch, spec: Path) -> dict[str, str]:
    from gaverify.loading.importing import GUESS
    from gaverify.loading.inspecting import Guess

    place, _, attribute = model.rpartition(":")
    names = [attribute.partition(".")[0], *drawn.names]
    guess = drawn.guess or Guess()
    gaps = {
        "MODEL": f"from {_module(place, spec.parent)} import {', '.join(names)}",
        "BUILD": f"{attribute}({drawn.arguments})",
        "INPUTS": guess.inputs,
        "STAR": "*" if guess.several else "",
        "LOSS": guess.loss,
        "TARGETS": guess.targets,
    }
    if not drawn.arguments_are_said:
        gaps["BUILDNOTE"] = f"  # {GUESS.format(part='the sizes of the model')}"
    if guess.inputs_are_said:
        gaps["INPUTSNOTE"] = f"  # as in {place}"
    if guess.loss_is_own:
        gaps["LOSSNOTE"] = ""
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


def _advice(drawn: Sketch, kind: str) -> str:
    if "..." in drawn.arguments:
        return f"fill in `{drawn.arguments}` and the batch"
    if kind == "checkpoint":
        return "write the checkpoint's path"
    return "" if drawn.guess is not None else "insert a batch that your model accepts"


def _classes_to_name(model: str) -> str:
    """The sentence for a file or a module without a class behind a colon; "" for every other name."""
    from gaverify.loading.importing import module_classes, parse_file

    file = model if model.endswith(".py") else f"{model.replace('.', os.sep)}.py"
    if ":" in model or "." not in model or not os.path.isfile(file):
        return ""
    classes = module_classes(parse_file(Path(file)))
    if not classes:
        return ""
    named = f"`{model}` has the class" + ("es" if len(classes) > 1 else "")
    return f"{named} {', '.join(f'`{name}`' for name in classes)}; name one: `--model {model}:{classes[0]}`"


def _of_checkpoint(path: str, spec: Path, factory: Path) -> Scaffold:
    from gaverify.loading.checkpoints import tensors_of

    tensors = "It holds:\n" + "\n".join(f"    {line}" for line in tensors_of(path))
    relative = os.path.relpath(path)
    return _fill_template(
        "checkpoint",
        spec,
        factory,
        {"CHECKPOINT": json.dumps(relative), "TENSORS": tensors},
        "insert the checkpoint's model class, and a batch",
    )


def _of_folder(name: str, spec: Path, factory: Path) -> Scaffold:
    """A folder for transformers: sentences where it has a tokenizer, else no factory is needed."""
    folder = Path(name)
    # Sentences need a tokenizer; random tokens, which `gaverify run` makes itself, need no factory.
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return Scaffold(name)
    architecture = "AutoModelForCausalLM"
    if folder.is_dir():
        try:
            named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
        except (OSError, ValueError, AttributeError) as error:
            raise SpecError(f"`{name}/config.json` cannot be read: {error}") from error
        architecture = str(named[0]) if named else architecture
    return _fill_template(
        "transformers", spec, factory, {"CLASS": architecture, "FOLDER": json.dumps(name), "NAME": name}, ""
    )


@click.command(short_help="Write a spec, and a factory for your model.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option(
    "--model",
    metavar="NAME",
    shell_complete=complete_models,
    help="Your model: file.py:Class, package.module:Class, a factory, a transformers folder, or a checkpoint.",
)
@click.option("--kind", type=click.Choice([*KINDS, AUDIT]), help="Template to use.  [chosen by --model]")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init(file: Path | None, model: str | None, kind: str | None, force: bool) -> int:
    """Writes a spec, a commented TOML file with every option, to FILE (gaverify.toml).

    If one is needed, a factory is written next to it: a function that returns model, loss and batch.

    \b
      gaverify init --model net.py:Net            # a class; its batch is guessed
      gaverify init --model checkpoints/last.pt   # code that loads a checkpoint
      gaverify init --kind dataloader             # a template for your own code
      gaverify init --kind audit                  # options for `gaverify audit`
    """
    if kind == AUDIT:
        return _write_audit(file or Path("audit.toml"), model, force)
    file = file or Path("gaverify.toml")
    if file.suffix == ".py":
        # It is the model that stands in the place of the spec; `--force` would write the spec over it.
        advice = _classes_to_name(str(file)) or f"name a class or factory of it: `gaverify init --model {file}:NAME`"
        raise SpecError(f"FILE is the spec to write, a .toml file, but `{file}` is Python; {advice}")
    # The factory is imported as a module, whose name has to be an identifier.
    factory = file.with_name(f"{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_model.py")
    with guests():
        written_scaffold = scaffold(model, kind, file, factory)
    text = (
        template("parts/spec")
        .replace("{name}", str(file))
        .replace('model = "mlp"', f"model = {json.dumps(written_scaffold.model)}")
    )
    texts = {file: text} | ({factory: written_scaffold.text} if written_scaffold.text else {})
    _check_absent(texts, force)
    for path, content in texts.items():
        _write(path, content, force)
        click.echo(
            f"Wrote {path}{f': {written_scaffold.advice}' if path is factory and written_scaffold.advice else ''}."
        )
    _show_guesses(written_scaffold.text)
    click.echo(f"Next: gaverify run {shlex.quote(str(file))}")
    return 0


def _write_audit(file: Path, model: str | None, force: bool) -> int:
    """Writes the options of an audit."""
    if model is not None:
        raise SpecError("--kind audit: leave out `--model`, and name the training script in FILE")
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


def _show_guesses(text: str) -> None:
    """Prints what of a factory is a guess: whoever reads "equivalent" has to know of which loss."""
    from gaverify.loading.importing import guesses_in

    guesses = guesses_in(text)
    if guesses:
        click.echo("Guesses by init, each marked in the file; replace them by your own:")
    for part, code in guesses:
        value = re.sub(r"^(return |\w+ = )", "", code)
        click.echo(f"  {part}: {value}")


def _write(file: Path, text: str, force: bool) -> None:
    try:
        # "x" refuses in the same step that creates: no file slips in between
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise GaverifyError(f"cannot write `{file}`: {error.strerror or error}") from None
