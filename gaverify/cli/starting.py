"""`gaverify init`: a spec to start from, and a factory for a model of one's own."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from gaverify.cli.options import complete_models
from gaverify.cli.scaffolding import KINDS, scaffold, template
from gaverify.cli.streams import guests
from gaverify.errors import GaverifyError


@click.command(short_help="Write a spec, and a factory for your model.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("gaverify.toml"))
@click.option(
    "--model",
    metavar="NAME",
    shell_complete=complete_models,
    help="Yours: file.py:Class, package.module:Class, a factory, a folder for transformers, a checkpoint.",
)
@click.option("--kind", type=click.Choice(KINDS), help="Which template.  [found out from --model]")
@click.option("--force", is_flag=True, help="Overwrite the files.")
def init(file: Path, model: str | None, kind: str | None, force: bool) -> int:
    """Writes a commented spec with every key to FILE (gaverify.toml), and a factory beside it where one is needed.

    \b
      gaverify init --model net.py:Net             # a class: its batch is found out where that is possible
      gaverify init --model checkpoints/last.pt    # a checkpoint: what it holds, and how it is loaded
      gaverify init --kind dataloader              # a template with a stand-in, to put your own in
    """
    factory = file.with_name(f"{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_model.py")
    with guests():
        made = scaffold(model, kind, file, factory)
    text = (
        template("parts/spec")
        .replace("{name}", str(file))
        .replace('model = "mlp"', f"model = {json.dumps(made.model)}")
    )
    _write(file, text, [factory] if made.text else [], force)
    click.echo(f"Wrote {file}.")
    if made.text:
        _write(factory, made.text, [], force)
        click.echo(f"Wrote {factory}{f': {made.advice}' if made.advice else ''}.")
    click.echo(f"Next: gaverify run {shlex.quote(str(file))}")
    return 0


def _write(file: Path, text: str, others: Sequence[Path], force: bool) -> None:
    """Writes a file that does not exist yet; nothing where one of the others exists."""
    for path in (file, *others):
        if path.exists() and not force:
            raise GaverifyError(f"`{path}` exists already; `--force` overwrites it")
    try:
        # "x" refuses in the same step that creates: no file slips in between
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise GaverifyError(f"`{file}` exists already; `--force` overwrites it") from None
    except OSError as error:
        raise GaverifyError(f"cannot write `{file}`: {error.strerror or error}") from None
