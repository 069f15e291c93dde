"""A model that `transformers` can load, from a folder or the hub, on a random batch that fits its configuration.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaverify.errors import MissingPackage, ProblemError
from gaverify.passes.isolation import mode_set

_TOKENS = 32
"""T: enough for rows of clearly different length, short enough for a first look at a large model."""

_IGNORED = -100  # what the losses of `transformers` leave out

Batch = dict[str, torch.Tensor]


def speaks_transformers(model: nn.Module) -> bool:
    """Whether a module has what a random batch is made from: a configuration and the name of its main input."""
    return hasattr(model, "main_input_name") and hasattr(getattr(model, "config", None), "to_dict")


def random_batch(model: nn.Module, name: str, batch_size: int) -> Batch:
    """Returns a batch with labels for which the model returns a loss; rows of text have different lengths.

    Raises:
        ProblemError: No kind of label gives a loss.
    """
    inputs = _inputs(model, batch_size)
    said = ""
    with mode_set([model], "eval"), torch.no_grad():
        for labels in _labels(model, inputs, batch_size):
            try:
                loss = getattr(model(**inputs, **labels), "loss", None)
            except Exception as error:  # labels of the wrong kind; the next kind may fit
                said = said or f" ({type(error).__name__}: {str(error).strip().splitlines()[0][:120]})"
                continue
            if isinstance(loss, torch.Tensor) and loss.numel() == 1 and bool(torch.isfinite(loss)):
                return inputs | labels
    raise ProblemError(
        f"`{name}`: {type(model).__name__} returns no loss for random `{', '.join(inputs)}` and labels{said}; "
        f"write a factory with a batch of your own: `gaverify init --model {name}`"
    )


def load_pretrained(name: str) -> Any:
    """Returns the model of a folder that `save_pretrained` wrote, or of a name on the hub.

    A folder with a configuration and no weights gives a model with random ones.

    Raises:
        ProblemError: `transformers` is missing, or cannot load it.
    """
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        what = "is a folder" if Path(name).is_dir() else "is a name on the hub"
        raise MissingPackage(
            f"`{name}` {what} for `transformers`, which cannot be imported; run `pip install transformers`"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        raise ProblemError(
            f"`{name}`: transformers cannot load it: {type(error).__name__}: {str(error).strip().splitlines()[0]}; "
            "give a folder that `save_pretrained` wrote, a name on the hub, or `file.py:factory`"
        ) from error
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ProblemError(
            f"`{name}`: its config.json names {f'the class `{architecture}`' if architecture else 'no class'} that "
            f"transformers has; write a factory: `gaverify init --model {name}`"
        )
    try:
        return kind.from_pretrained(name) if _has_weights(Path(name)) else kind(config)
    except Exception as error:
        raise ProblemError(f"`{name}`: {architecture} cannot be built: {type(error).__name__}: {error}") from error


def _has_weights(folder: Path) -> bool:
    return not folder.is_dir() or any(entry.suffix in (".safetensors", ".bin") for entry in folder.iterdir())


def _inputs(model: Any, batch_size: int) -> Batch:
    config = model.config
    main = str(model.main_input_name)
    if main == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return {main: torch.randn(batch_size, getattr(config, "num_channels", 3), height, width)}
    if main == "input_values":
        return {main: torch.randn(batch_size, 8000)}  # half a second of sound
    if main == "input_features":
        return {main: torch.randn(batch_size, config.num_mel_bins, 2 * config.max_source_positions)}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    lengths = torch.linspace(longest, max(2, longest // 4), batch_size).long().unsqueeze(1)
    real = torch.arange(longest) < lengths
    padding = getattr(text, "pad_token_id", None) or 0
    tokens = torch.randint(1, text.vocab_size, (batch_size, longest)).masked_fill(~real, padding)
    return {"input_ids": tokens, "attention_mask": real.long()}


def _labels(model: Any, inputs: Batch, batch_size: int) -> Iterator[Batch]:
    """Yields labels of each kind that heads of `transformers` take, those of the richest head first."""
    classes = int(getattr(model.config, "num_labels", 2) or 2)
    tokens = inputs.get("input_ids")
    if tokens is not None:
        real = inputs["attention_mask"].bool()
        yield {"labels": tokens.masked_fill(~real, _IGNORED)}
        yield {"labels": torch.randint(classes, tokens.shape).masked_fill(~real, _IGNORED)}
    yield {"labels": torch.randint(classes, (batch_size,))}
    yield {"labels": torch.rand(batch_size, classes)}
    if tokens is not None:
        yield {"start_positions": torch.zeros(batch_size).long(), "end_positions": torch.ones(batch_size).long()}
    yield {"labels": torch.randint(1, 5, (batch_size, 6))}  # letters of what is spoken
    yield {}
