"""The built-in problems: what `gaverify models` lists, without importing torch. Each is built by a file of its own."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from gaverify.errors import SpecError


@dataclass(frozen=True)
class Builtin:
    """What is known of a built-in problem before it is built.

    Args:
        name: What `--model` takes.
        parameters: How many numbers it trains.
        batch: Shape of the default batch.
        loss: In words.
        expect: The outcome at `--steps 4` with the default options.
        default_batch_size: B, where `--batch-size` is not given.
        module: Where its `build(batch_size, …) -> Problem` stands.
    """

    name: str
    parameters: str
    batch: str
    loss: str
    expect: str
    default_batch_size: int
    module: str


BUILTINS: tuple[Builtin, ...] = (
    Builtin(
        name="toy-linear",
        parameters="1",
        batch="2 × 1",
        loss="squared error",
        expect="equivalent (B = 2: take --steps 2)",
        default_batch_size=2,
        module="gaverify.zoo.toy_linear",
    ),
    Builtin(
        name="mlp",
        parameters="577",
        batch="8 × 16",
        loss="squared error",
        expect="equivalent",
        default_batch_size=8,
        module="gaverify.zoo.mlp",
    ),
    Builtin(
        name="mlp-batchnorm",
        parameters="641",
        batch="8 × 16",
        loss="squared error",
        expect="divergent: BatchNorm",
        default_batch_size=8,
        module="gaverify.zoo.mlp_batchnorm",
    ),
    Builtin(
        name="mnist-mlp",
        parameters="567,434",
        batch="32 × 1 × 28 × 28",
        loss="cross entropy",
        expect="equivalent; --data FOLDER reads real digits",
        default_batch_size=32,
        module="gaverify.zoo.mnist_mlp",
    ),
    Builtin(
        name="causal-lm",
        parameters="28,544",
        batch="8 × 32 tokens, ragged",
        loss="cross entropy, padding ignored",
        expect="divergent; equivalent with --weighting tokens",
        default_batch_size=8,
        module="gaverify.zoo.causal_lm",
    ),
    Builtin(
        name="gpt2",
        parameters="126,784",
        batch="8 sentences, ragged",
        loss="the model's own, padding ignored",
        expect="divergent; equivalent with --weighting tokens",
        default_batch_size=8,
        module="gaverify.zoo.gpt2",
    ),
)


def find_builtin(name: str) -> Builtin:
    """Returns the built-in called `name`.

    Raises:
        SpecError: There is none; the sentence names the nearest.
    """
    known = {builtin.name: builtin for builtin in BUILTINS}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=1, cutoff=0.5)
    if near:
        raise SpecError(f"there is no built-in `{name}`; did you mean `{near[0]}`?", "model")
    raise SpecError(
        f"there is no built-in `{name}`; the built-ins are {', '.join(known)}, "
        "and your own model is `package.module:factory` or `file.py:factory`",
        "model",
    )
