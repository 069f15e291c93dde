"""`gaverify init`: a spec to start from, and a factory for a model of one's own."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from gaverify.cli.options import complete_models
from gaverify.cli.scaffolding import KINDS, scaffold
from gaverify.cli.streams import guests
from gaverify.errors import GaverifyError

STARTER = """\
# What gaverify verifies, and how. Run it with `gaverify run {name}`; options on the command line win over this file.

# A built-in (`gaverify models` lists them), or your own: "package.module:factory" or "path/to/file.py:factory".
# The factory returns a gaverify.Problem, a tuple (model, loss, batch), or a bare torch.nn.Module.
model = "mlp"

# How reports call this spec, beside its file.
# name = "nightly"

# K: how many micro-batches the full batch is cut into.
steps = 4

# The weight of each micro-batch's loss: "uniform" (1/K), "samples" (its share of the samples), "tokens" (its share of
# the targets that are not ignore-index), "none" (a plain sum), or K numbers such as [0.5, 0.5].
weighting = "uniform"
# ignore-index = -100

# batch-size = 8
# seed = 0
# mode = "train"                # or "eval"
# strategy = "accumulate"       # or "summed-loss": one backward over the summed losses
# diagnose = true               # look for the cause of a difference
# exact = false                 # true: ask float64 for every parameter, at 3 to 6 times the price

# Where the full batch does not fit: its activations on the host ("offload"), made again in the backward ("recompute"),
# or the first of both that fits ("auto"); its gradients on disk.
# reference = "full"
# spill = false

# The same on several ranks, K micro-batches each, as torchrun would start them.
# ranks = 2
# engine = "ddp"                # or "fsdp2"
# timeout = 600                 # seconds that a window on the ranks may take

# Where and in which precision; left out, the model says it.
# device = "cpu"                # "cuda", "cuda:1", "mps", "auto"
# dtype = "float32"             # "float64", "bfloat16", "float16"
# autocast = "bfloat16"         # or "float16"

# A factory that returns a bare module needs these: the shape of one sample, a loss of torch.nn.functional, classes.
# input-shape = [3, 32, 32]
# loss = "cross_entropy"
# classes = 10

# Built-ins that have some: real data, real weights.
# data = "data/mnist"
# pretrained = "gpt2"

# Show every micro-batch, then one step of this optimizer.
# trace = true
# optimizer = "sgd"             # "adam", "adamw"
# lr = 0.01

# Fixed tolerances as in torch.testing.assert_close, both or neither. Left out, gaverify measures the rounding.
# rtol = 1e-5
# atol = 1e-8

# The outcome that counts as a success, for a test of a test.
# expect = "divergent"

# Divergences that are known and wanted; the location is a pattern. `gaverify baseline` writes the entries.
# accept = [{ code = "GAV101", location = "backbone.*", reason = "ghost batch norm on purpose" }]

# Arguments of the factory.
# [model-args]
# width = 32
"""


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
    text = STARTER.replace("{name}", str(file)).replace('model = "mlp"', f"model = {json.dumps(made.model)}")
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
