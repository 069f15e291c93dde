"""`gpt2`: GPT-2 through `transformers`, on sentences of different length.

Shapes: B sentences, T tokens of the longest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from gaverify.errors import MissingPackage, ProblemError
from gaverify.passes.batching import Problem
from gaverify.zoo import a_probability, at_least, divides, one_of

IGNORED = -100  # what the losses of `transformers` leave out
END = 256  # the token after the 256 bytes; pads the rows, as GPT-2's end of text does
CONTEXT = 160  # bytes of the longest sentence with room to spare
SENTENCES = (
    "Yes.",
    "The cat sleeps.",
    "Rain fell all night long.",
    "She counted the stars until morning came.",
    "Small steps, taken often, lead further than one leap.",
    "The old bridge held, although nobody could say why it did.",
    "When the last train had left, the station belonged to pigeons again.",
    "A recipe is a promise that the same steps will give the same bread, whoever bakes it.",
)
_RANDOM = {"width": 64, "depth": 2, "heads": 2, "dropout": 0.1}


def build(
    batch_size: int = 8,
    width: int = 64,
    depth: int = 2,
    heads: int = 2,
    dropout: float = 0.1,
    padding: str = "ignored",
    pretrained: str = "",
) -> Problem:
    """Returns GPT-2 with random weights and bytes as tokens, or with real weights and their own tokens.

    Args:
        batch_size: B; from the ninth sentence on, two are joined.
        width: The width of the residual stream, without `pretrained`.
        depth: Number of blocks, without `pretrained`.
        heads: The heads of each block, without `pretrained`.
        dropout: Everywhere, without `pretrained`.
        padding: "ignored": its labels are −100; "counted": it is predicted like any token.
        pretrained: A name or folder for `from_pretrained`; "": random weights.

    Raises:
        ProblemError: `transformers` is missing, or cannot load `pretrained`.
    """
    one_of(("ignored", "counted"), padding=padding)
    random_arguments = {"width": width, "depth": depth, "heads": heads, "dropout": dropout}
    transformers = _transformers()
    texts = [_sentence(index) for index in range(batch_size)]
    if pretrained:
        changed = [name for name, value in random_arguments.items() if value != _RANDOM[name]]
        if changed:
            raise ProblemError(f"model argument `{changed[0]}` is for random weights; --pretrained brings its own")
        model, rows, end = _load_pretrained(transformers, pretrained, texts)
    else:
        at_least(1, width=width, depth=depth)
        divides(heads=heads, width=width)
        a_probability(dropout=dropout)
        model, end = _random(transformers, width, depth, heads, dropout), END
        rows = [list(text.encode()) for text in texts]
    return Problem(model, _own_loss, _pad_rows(rows, end, IGNORED if padding == "ignored" else end), name="gpt2")


def _own_loss(model: nn.Module, batch: Any) -> Any:
    return model(**batch)  # computes the loss from `labels`


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        missing = error.name or "a package"  # `transformers`, or something that it needs itself
        raise MissingPackage(f"`gpt2` needs `{missing}`; run `pip install {missing}`") from error
    except ImportError as error:
        raise ProblemError(f"`gpt2`: `transformers` cannot be imported: {_first_line(error)}") from error


def _sentence(index: int) -> str:
    turn, place = divmod(index, len(SENTENCES))
    # Cut at 60 bytes: the longest sentence has 86, and both together have to fit into CONTEXT.
    return SENTENCES[place] + (f" {SENTENCES[(place + turn) % len(SENTENCES)]}"[:60] if turn else "")


def _random(transformers: Any, width: int, depth: int, heads: int, dropout: float) -> Any:
    config = transformers.GPT2Config(
        vocab_size=END + 1,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=depth,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=END,
        eos_token_id=END,
        use_cache=False,  # keys and values of earlier tokens are for generation; in training they only take memory
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what version 5 falls back to anyway, but with a warning
    return model


def _load_pretrained(transformers: Any, name: str, texts: list[str]) -> tuple[Any, list[list[int]], int]:
    """Returns the model, the tokens of each text and the token that pads."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        rows = [list(tokenizer(text)["input_ids"]) for text in texts]
    except Exception as error:  # a hub, a disk or a file: whatever it is, the name is what the user can change
        raise ProblemError(
            f"--pretrained `{name}`: {type(error).__name__}: {_first_line(error)}; "
            "give a model's name on the hub, or a folder that `save_pretrained` wrote with model and tokenizer"
        ) from error
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.pad_token_id
    return model, rows, 0 if end is None else int(end)


def _pad_rows(rows: list[list[int]], end: int, padding_label: int) -> dict[str, torch.Tensor]:
    """Returns `input_ids`, `attention_mask` and `labels`, each (B, T)."""
    lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    longest = int(lengths.max())
    tokens = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
    real = torch.arange(longest) < lengths
    return {"input_ids": tokens, "attention_mask": real.long(), "labels": tokens.masked_fill(~real, padding_label)}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
