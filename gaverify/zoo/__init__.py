"""The built-in problems: what `gaverify models` lists, without importing torch. Each is built by a file of its own."""

from __future__ import annotations

from dataclasses import dataclass

from gaverify.errors import ProblemError, SpecError, nearest

# Checks of the built-ins' own arguments, as sentences.


def at_least(least: int, **arguments: int) -> None:
    """Raises `ProblemError` for the first argument below `least`."""
    for name, value in arguments.items():
        if value < least:
            raise ProblemError(f"model argument `{name}` must be at least {least}, got {value}")


def a_probability(**arguments: float) -> None:
    """Raises `ProblemError` for the first argument outside 0 ≤ p < 1."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ProblemError(f"model argument `{name}` must be at least 0 and below 1, got {value}")


def one_of(choices: tuple[str, ...], **arguments: str) -> None:
    """Raises `ProblemError` for the first argument that is none of the words."""
    for name, value in arguments.items():
        if value not in choices:
            near = nearest(value, choices)
            advice = f'; did you mean "{near}"?' if near else ""
            words = " or ".join(f'"{choice}"' for choice in choices)
            raise ProblemError(f'model argument `{name}` must be {words}, got "{value}"{advice}')


def divides(**arguments: int) -> None:
    """Raises `ProblemError` unless the first argument divides the second, as heads divide a width."""
    (part, count), (total, size) = arguments.items()
    if count < 1 or size % count:
        raise ProblemError(f"model argument `{part}` = {count} must divide `{total}` = {size}")


@dataclass(frozen=True)
class Builtin:
    """The description of a built-in problem before it is built.

    Args:
        name: The value of `--model` that chooses it.
        parameters: How many numbers it trains.
        batch: Shape of the default batch.
        loss: In words.
        expect: The outcome at `--steps 4` with the default options.
        default_batch_size: B, where `--batch-size` is not given.
    """

    name: str
    parameters: str
    batch: str
    loss: str
    expect: str
    default_batch_size: int

    @property
    def module(self) -> str:
        """Where its `build(batch_size, …) -> Problem` stands."""
        return f"gaverify.zoo.{self.name.replace('-', '_')}"


BUILTINS: tuple[Builtin, ...] = (
    Builtin("toy-linear", "1", "2 × 1", "squared error", "equivalent (B = 2: take --steps 2)", 2),
    Builtin("mlp", "577", "8 × 16", "squared error", "equivalent", 8),
    Builtin("mlp-batchnorm", "641", "8 × 16", "squared error", "divergent: BatchNorm", 8),
    Builtin(
        "mnist-mlp", "567,434", "32 × 1 × 28 × 28", "cross entropy", "equivalent; --data FOLDER reads real digits", 32
    ),
    Builtin(
        "causal-lm",
        "28,544",
        "8 × 32 tokens, ragged",
        "cross entropy, padding ignored",
        "divergent; equivalent with --weighting tokens",
        8,
    ),
    Builtin(
        "gpt2",
        "126,784",
        "8 sentences, ragged",
        "the model's own, padding ignored",
        "divergent; equivalent with --weighting tokens",
        8,
    ),
)


def find_builtin(name: str) -> Builtin:
    """Returns the built-in called `name`.

    Raises:
        SpecError: There is none; the sentence names the nearest.
    """
    by_name = {builtin.name: builtin for builtin in BUILTINS}
    if name in by_name:
        return by_name[name]
    near = nearest(name.lower().replace("_", "-"), by_name, 0.5)
    if near:
        raise SpecError(f"there is no built-in `{name}`; did you mean `{near}`?", "model")
    raise SpecError(
        f"there is no built-in `{name}`; the built-ins are {', '.join(by_name)}, "
        "and your own model is `package.module:factory` or `file.py:factory`",
        "model",
    )
