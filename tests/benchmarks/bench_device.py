"""What a verdict, and the search for a cause, cost on models that others wrote: against the two bare passes.

    python tests/benchmarks/bench_device.py [--device cpu|cuda] [--dtype bfloat16] [--autocast bfloat16] [--only NAME …]

The architectures are those of `transformers`, from a config and with random weights, their losses their own. Some
diverge as they are (padding, BatchNorm, pairs, a sum); then the row holds the whole diagnosis. On a CPU: processor time
on one thread, memory the ratio of high-water marks of fresh processes. On a GPU: seconds between synchronisations,
memory the ratio of the most that was allocated. The last rows are the median, 95 % and worst ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import measuring
import torch
import transformers as hf

import gaverify
from gaverify import Problem
from gaverify.passes.batching import fresh
from gaverify.passes.precision import DTYPES

STEPS, ROWS, TOKENS, SIDE, CLASSES = measuring.STEPS, 8, 64, 64, 10
_TEXT = {"vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_WIDE = {**_TEXT, "intermediate_size": 1024}
_PADDED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def _words(length: int = TOKENS, *, padded: bool = False, labels: str = "labels") -> dict[str, torch.Tensor]:
    """Rows of tokens that are their own targets; padded ones lose more and more of them."""
    ids = torch.randint(2, 2000, (ROWS, length))
    targets = ids.clone()
    for row in range(ROWS if padded else 0):
        targets[row, length - length * row // 10 :] = -100
    return {"input_ids": ids, labels: targets}


def _classified() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 2000, (ROWS, TOKENS)), "labels": torch.randint(CLASSES, (ROWS,))}


def _pictures(side: int = SIDE) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, side, side), "labels": torch.randint(CLASSES, (ROWS,))}


def _pairs() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 2000, (ROWS, 16))
    return {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, SIDE, SIDE)}


def _segments() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE), "labels": torch.randint(CLASSES, (ROWS, SIDE, SIDE))}


def _sounds() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(ROWS, 4000), "labels": torch.randint(1, 30, (ROWS, 5))}


def _translated() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 2000, (ROWS, TOKENS)), "labels": _words(32, padded=True)["labels"]}


_SEEN = {"num_labels": CLASSES, "image_size": SIDE}
_LAYERS = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
_DECODERS = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 2000}
_EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
_T5 = {"vocab_size": 2000, "d_model": 256, "d_ff": 1024, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
_SOUND = {**_LAYERS, "vocab_size": 32, "conv_dim": (64,) * 7, "num_conv_pos_embeddings": 16, "mask_time_prob": 0.0}
_WINDOWS = {"embed_dim": 48, "depths": [2, 4], "num_heads": [3, 6], "window_size": 4}
_STAGES = {"num_labels": CLASSES, "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
_VISION = {**_LAYERS, "image_size": SIDE, "patch_size": 16}
_GPT2 = {"vocab_size": 2000, "n_embd": 256, "n_layer": 4, "n_head": 4}

Built = tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]
_CLASSIFIER, _WRITER, _TRANSLATOR = "ForSequenceClassification", "ForCausalLM", "ForConditionalGeneration"
_SEER = "ForImageClassification"
_PADDED_WORDS = partial(_words, padded=True)
MODELS: dict[str, Built] = {
    "gpt2": ("GPT2", "LMHeadModel", _GPT2, _words),
    "gpt2-padded": ("GPT2", "LMHeadModel", _GPT2, _PADDED_WORDS),
    "llama": ("Llama", _WRITER, _WIDE, _words),
    "qwen2-padded": ("Qwen2", _WRITER, {**_WIDE, "num_key_value_heads": 2}, _PADDED_WORDS),
    "mixtral": ("Mixtral", _WRITER, {**_WIDE, **_EXPERTS}, _words),
    "mamba": ("Mamba", _WRITER, {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 2}, _words),
    "bloom": ("Bloom", _WRITER, {"vocab_size": 2000, "hidden_size": 256, "n_layer": 4, "n_head": 4}, _words),
    "bert-masked": ("Bert", "ForMaskedLM", _WIDE, _PADDED_WORDS),
    "bert": ("Bert", _CLASSIFIER, {**_WIDE, "num_labels": CLASSES}, _classified),
    "albert": ("Albert", _CLASSIFIER, {**_WIDE, "num_labels": CLASSES}, _classified),
    "deberta": ("Deberta", _CLASSIFIER, {**_WIDE, "num_labels": CLASSES}, _classified),
    "t5": ("T5", _TRANSLATOR, _T5, _translated),
    "bart": ("Bart", _TRANSLATOR, {**_DECODERS, **_HEADS, **_PADDED}, _translated),
    "vit": ("ViT", _SEER, {**_LAYERS, **_SEEN, "patch_size": 8}, _pictures),
    "swin": ("Swin", _SEER, {**_SEEN, **_WINDOWS}, _pictures),
    "convnext": ("ConvNext", _SEER, {"num_labels": CLASSES}, _pictures),
    "resnet": ("ResNet", _SEER, _STAGES, _pictures),
    "mobilenet": ("MobileNetV2", _SEER, _SEEN, _pictures),
    "regnet": ("RegNet", _SEER, _STAGES, _pictures),
    "segformer": ("Segformer", "ForSemanticSegmentation", {"num_labels": CLASSES}, _segments),
    "clip": ("CLIP", "Model", {"text_config": {**_WIDE, **_PADDED}, "vision_config": _VISION}, _pairs),
    "wav2vec2": ("Wav2Vec2", "ForCTC", _SOUND, _sounds),
}


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    more = {"return_loss": True} if isinstance(model, hf.CLIPModel) else {}
    found: torch.Tensor = model(**batch, **more).loss
    return found


def problem_of(name: str, device: str, dtype: str | None) -> Problem:
    """Builds a model with its batch where they are measured."""
    torch.manual_seed(0)
    family, head, settings, batch = MODELS[name]
    kind = DTYPES[dtype] if dtype else None
    model = getattr(hf, family + head)(getattr(hf, f"{family}Config")(**settings)).to(device, kind).train()
    return Problem(model, _loss, fresh(batch(), torch.device(device), kind), batch_size=ROWS)


def verified(problem: Problem, autocast: str | None) -> gaverify.Verdict:
    """The whole verification."""
    return gaverify.verify(problem, steps=STEPS, autocast=autocast)


def in_fresh_process(kind: str, name: str, device: str, dtype: str, autocast: str) -> None:
    """Runs one side, for the memory measurement."""
    torch.set_num_threads(1)
    {"bare": measuring.bare, "verified": verified}[kind](problem_of(name, device, dtype or None), autocast or None)


def _measured(run: Callable[[], object], device: str) -> tuple[float, int]:
    """Seconds, and on a GPU the most that was allocated."""
    if device == "cpu":
        started = time.process_time()
        run()
        return time.process_time() - started, 0
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated()


def row(name: str, device: str, dtype: str | None, autocast: str | None) -> float:
    """Prints what one model costs; returns its ratio."""
    problem = problem_of(name, device, dtype)
    measuring.bare(problem, autocast)
    seconds, held = min(_measured(lambda: measuring.bare(problem, autocast), device) for _ in range(3))
    found: list[gaverify.Verdict] = []
    took, peak = _measured(lambda: found.append(verified(problem, autocast)), device)
    if device == "cpu":
        words = (name, device, dtype or "", autocast or "")
        sides = [("bench_device", "in_fresh_process", kind, *words) for kind in ("verified", "bare")]
        peak, held = (measuring.peak_of(*side) for side in sides)
    verdict = found[0]
    codes = ", ".join(finding.code for finding in verdict.findings if finding.severity == "fault")
    label = f"{name} ({seconds:.2f} s, {held / 1e6:.0f} MB): {verdict.outcome.value} {codes or verdict.method}"
    wanted = "<= 10, <= 1.3" if codes else "<= 1.3, <= 1.05"
    measuring.show(label, f"{took / seconds:.1f} × time, {peak / held:.2f} × memory", wanted)
    return took / seconds


def main() -> None:
    """Prints a row per model, then the ratios of those that diverge and of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--autocast", choices=["bfloat16", "float16"])
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios = sorted(row(name, options.device, options.dtype, options.autocast) for name in options.only)
    at = {"median": median(ratios), "95 %": ratios[int(0.95 * (len(ratios) - 1))], "worst": ratios[-1]}
    for word, ratio in at.items():
        measuring.show(word, f"{ratio:.1f} × time", {"median": "<= 10", "95 %": "<= 25", "worst": "<= 60"}[word])


if __name__ == "__main__":
    main()
