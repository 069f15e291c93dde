"""How many operations a verdict launches beside the bare passes, and how often it waits for the device.

Both are exact counts, which hang on no clock. Where the host is the limit, they are the cost of a verdict on a GPU.
Today's counts as a table: `python tests/simulated -- python tests/simulated/test_launches.py [MODEL ...]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

import gaverify
from gaverify import Outcome, Verdict

DEVICE = torch.ops.simulated
LAYERS, STEPS = 6, 4
PRECISIONS = ("tf32-conv", "tf32", "autocast", "bfloat16", "ieee")

# The most launches, as a multiple of those of the bare passes, and the most waits, in the order of PRECISIONS.
# A verdict that has become cheaper lowers its bounds: to what the table prints and a few per cent.
BOUNDS: dict[str, tuple[tuple[float, int], ...]] = {
    "vit": ((3.9, 37), (3.9, 37), (2.9, 36), (3.3, 38), (1.54, 22)),
    "resnet-groupnorm": ((4.1, 23), (4.1, 23), (2.1, 22), (3.4, 24), (1.34, 17)),
    "resnet-batchnorm": ((14.2, 130), (14.2, 130), (10.8, 129), (13.4, 131), (11.6, 123)),
    "mlp": ((2.16, 21), (2.16, 21), (3.7, 30), (4.8, 33), (2.16, 21)),
    "gpt2": ((1.44, 82), (3.4, 160), (2.7, 158), (3.1, 160), (1.44, 82)),
    "gpt2-padded": ((7.4, 490), (8.1, 493), (6.6, 493), (7.6, 493), (7.4, 490)),
    "bert": ((3.6, 61), (5.4, 81), (4.3, 78), (3.8, 68), (3.6, 61)),
    "llama": ((1.1, 80), (1.1, 80), (2.1, 148), (2.2, 150), (1.1, 80)),
}
CODES = {"resnet-batchnorm": ["GAV101"], "gpt2-padded": ["GAV202"]}
OF_TRANSFORMERS = ("gpt2", "gpt2-padded", "bert", "llama")


class Case(NamedTuple):
    """A model on the device, its loss and its batch."""

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    batch: Any


class Counts(NamedTuple):
    """Of one verdict."""

    verdict: Verdict
    bare: int
    launches: int
    waits: int

    @property
    def ratio(self) -> float:
        return self.launches / self.bare


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1])


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def labelled(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(32, *shape, generator=generator).to("cuda", dtype)
    return inputs, torch.randint(0, 10, (32,), generator=generator).cuda()


def text(rows: int, length: int, vocabulary: int, *, padded: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(5, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    if not padded:
        return {"input_ids": tokens.cuda(), "labels": tokens.cuda()}
    lengths = torch.linspace(length // 8, length, rows).long()
    mask = (torch.arange(length) < lengths[:, None]).long()
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens.cuda(), "attention_mask": mask.cuda(), "labels": labels.cuda()}


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(LAYERS))
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


class Residual(nn.Module):
    def __init__(self, normalisation: Callable[[int], nn.Module]) -> None:
        super().__init__()
        layers = [(nn.Conv2d(32, 32, 3, padding=1, bias=False), normalisation(32)) for _ in range(2)]
        self.layers = nn.Sequential(*layers[0], nn.ReLU(), *layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu(x + self.layers(x))


def vit(dtype: torch.dtype) -> Case:
    return Case(VisionTransformer().to("cuda", dtype), classify, labelled((3, 32, 32), dtype))


def resnet(normalisation: Callable[[int], nn.Module], dtype: torch.dtype) -> Case:
    blocks = [Residual(normalisation) for _ in range(LAYERS)]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *ends)
    return Case(model.to("cuda", dtype), classify, labelled((3, 4, 4), dtype))


def mlp(dtype: torch.dtype) -> Case:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1))]
    return Case(nn.Sequential(*layers, nn.Linear(128, 10)).to("cuda", dtype), classify, labelled((128,), dtype))


def gpt2(dtype: torch.dtype, *, padded: bool = False) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=1000, n_positions=64)
    return Case(GPT2LMHeadModel(config).to("cuda", dtype), own_loss, text(16, 32, 1000, padded=padded))


def bert(dtype: torch.dtype) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=2000)).to("cuda", dtype)
    return Case(model, own_loss, {**text(32, 16, 2000, padded=True), "labels": (torch.arange(32) % 2).cuda()})


def llama(dtype: torch.dtype) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=1000)).to("cuda", dtype)
    return Case(model, own_loss, text(16, 32, 1000))


MODELS: dict[str, Callable[[torch.dtype], Case]] = {
    "vit": vit,
    "resnet-groupnorm": lambda dtype: resnet(lambda channels: nn.GroupNorm(4, channels), dtype),
    "resnet-batchnorm": lambda dtype: resnet(nn.BatchNorm2d, dtype),
    "mlp": mlp,
    "gpt2": gpt2,
    "gpt2-padded": lambda dtype: gpt2(dtype, padded=True),
    "bert": bert,
    "llama": llama,
}


def train(case: Case, autocast: str | None) -> None:
    """The bare passes: the full batch's, and those of the micro-batches."""
    for steps in (1, STEPS):
        leaves = list(case.batch.values()) if isinstance(case.batch, dict) else list(case.batch)
        for rows in zip(*(leaf.chunk(steps) for leaf in leaves), strict=True):
            part = dict(zip(case.batch, rows, strict=True)) if isinstance(case.batch, dict) else rows
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast is not None):
                loss = case.loss(case.model, part) / steps
            loss.backward()
        case.model.zero_grad()


def count(model: str, precision: str) -> Counts:
    torch.backends.cudnn.conv.fp32_precision = "ieee" if precision == "ieee" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    autocast = "bfloat16" if precision == "autocast" else None
    torch.manual_seed(0)
    case = MODELS[model](torch.bfloat16 if precision == "bfloat16" else torch.float32)
    case.model.train()
    # once for what is done at the first time only
    for _ in range(2):
        DEVICE.reset_counters()
        train(case, autocast)
        bare = int(DEVICE.operations())
        DEVICE.reset_counters()
        verdict = gaverify.verify(*case, steps=STEPS, autocast=autocast)
        launches, waits = int(DEVICE.operations()), int(DEVICE.synchronisations())
    return Counts(verdict, bare, launches, waits)


@pytest.fixture
def _switches() -> Iterator[None]:
    """Puts the switches of TF32 back."""
    switches = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = [switch.fp32_precision for switch in switches]
    yield
    for switch, precision in zip(switches, before, strict=True):
        switch.fp32_precision = precision


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.hf] if m in OF_TRANSFORMERS else []) for m in MODELS]
)
def test_a_verdict_launches_and_waits_no_more_than(model: str, precision: str) -> None:
    launches, waits = BOUNDS[model][PRECISIONS.index(precision)]
    counted = count(model, precision)
    faults = [finding.code for finding in counted.verdict.findings if finding.severity == "fault"]
    assert faults == CODES.get(model, [])
    assert counted.verdict.outcome is (Outcome.DIVERGENT if faults else Outcome.EQUIVALENT)
    assert counted.ratio <= launches, f"{counted.launches} launches against {counted.bare} of the bare passes"
    assert counted.waits <= waits, DEVICE.synchronised_by()


def print_table(models: list[str]) -> None:
    """Prints what is counted today."""
    for model in models:
        for precision in PRECISIONS:
            counted = count(model, precision)
            method = getattr(counted.verdict, "method", "")
            outcome = counted.verdict.outcome.value
            faults = [finding.code for finding in counted.verdict.findings if finding.severity == "fault"]
            print(
                f"{model:17}{precision:10}{counted.bare:6}{counted.ratio:7.2f} x{counted.waits:6}",
                outcome, *faults, method, flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    print_table(sys.argv[1:] or list(MODELS))
