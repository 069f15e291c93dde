"""`gaverify init`: a spec to start from."""

from __future__ import annotations

from pathlib import Path

import click

from gaverify.errors import GaverifyError

STARTER = """\
# What gaverify verifies, and how. Run it with `gaverify run {name}`; options on the command line win over this file.

# A built-in (`gaverify models` lists them), or your own: "package.module:factory" or "path/to/file.py:factory".
# The factory returns a gaverify.Problem, a tuple (model, loss, batch), or a bare torch.nn.Module.
model = "mlp"

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

# Arguments of the factory.
# [model-args]
# width = 32
"""


@click.command(short_help="Write a spec to start from.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("gaverify.toml"))
@click.option("--force", is_flag=True, help="Overwrite the file.")
def init(file: Path, force: bool) -> int:
    """Writes a commented spec with every key to FILE (gaverify.toml)."""
    try:
        # "x" refuses in the same step that creates: no file slips in between
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(STARTER.format(name=file))
    except FileExistsError:
        raise GaverifyError(f"`{file}` exists already; `--force` overwrites it") from None
    except OSError as error:
        raise GaverifyError(f"cannot write `{file}`: {error.strerror or error}") from None
    click.echo(f"Wrote {file}. Next: gaverify run {file}")
    return 0
