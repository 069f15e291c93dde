"""Models of the `transformers` library from small configurations with random weights, in training mode.

Shapes: B = 8 rows of 12 tokens, 32 × 32 pixels or 400 samples of sound; every dropout is on. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from problems import Case, fault, quiet
from torch import nn

from gaverify import Problem

_WORDS = 64
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MASKED = {"mask_time_prob": 0.3, "mask_time_length": 2, "mask_feature_prob": 0.2, "mask_feature_length": 2}
_DROPPED = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_SMALL = {
    **_ENDS,
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1}
_BART = {
    **_ENDS,
    "vocab_size": _WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "encoder_layerdrop": 0.3,
    "decoder_layerdrop": 0.3,
    "decoder_start_token_id": 2,
}
_T5 = {
    "vocab_size": _WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_VISION = {
    **_DROPPED,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}
_SOUND = {
    **_MASKED,
    **{name: size for name, size in _SMALL.items() if name != "max_position_embeddings"},
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.3,
    "ctc_zero_infinity": True,
    "ctc_loss_reduction": "mean",
    "num_labels": 3,
}
_LENGTHS = torch.tensor([12, 5, 9, 3, 12, 7, 4, 10])


def _loss(model: nn.Module, batch: dict[str, Any]) -> Any:
    return model(**batch)


def _rows() -> dict[str, torch.Tensor]:
    mask = (torch.arange(12)[None] < _LENGTHS[:, None]).long()
    return {"input_ids": torch.randint(5, _WORDS, (8, 12)) * mask, "attention_mask": mask}


def _text() -> Any:
    from transformers import BatchEncoding

    rows = _rows()
    return BatchEncoding({**rows, "labels": rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)})


def _classes() -> dict[str, torch.Tensor]:
    return {**_rows(), "labels": torch.randint(3, (8,))}


def _translations() -> dict[str, torch.Tensor]:
    labels = torch.randint(5, _WORDS, (8, 12))
    return {**_rows(), "labels": labels.masked_fill(torch.arange(12)[None] >= _LENGTHS.flip(0)[:, None], -100)}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(3, (8,))}


def _sounds() -> dict[str, torch.Tensor]:
    lengths = torch.tensor([400, 300, 350, 200, 400, 250, 320, 400])
    mask = (torch.arange(400)[None] < lengths[:, None]).long()
    values = torch.randn(8, 400) * mask
    return {"input_values": values, "attention_mask": mask, "labels": torch.randint(5, _WORDS, (8, 6))}


def _spectra() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(8, 8, 40), "labels": _translations()["labels"]}


def _pairs() -> dict[str, Any]:
    words = torch.randint(5, _WORDS, (8, 10))
    words[:, -1] = 2
    return {"input_ids": words, "pixel_values": torch.randn(8, 3, 32, 32), "return_loss": True}


def _built(family: str, head: str, batch: Callable[[], Any], changes: dict[str, Any]) -> Callable[[], Problem]:
    def build() -> Problem:
        import transformers

        torch.manual_seed(0)
        settings = getattr(transformers, f"{family}Config")(**changes)
        return Problem(getattr(transformers, family + head)(settings), _loss, batch())

    return build


_TOKENS = {"weighting": "tokens"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_CLIP = {
    "text_config": {**_SMALL, "max_position_embeddings": 16},
    "vision_config": {name: size for name, size in _VISION.items() if "dropout" not in name and name != "num_labels"},
    "projection_dim": 16,
}
_WHISPER = {
    **_BART,
    **_MASKED,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 32,
    "apply_spec_augment": True,
}
_SWIN = {
    **_DROPPED,
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 3,
    "drop_path_rate": 0.3,
}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}

_GPT2 = {"vocab_size": _WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_OPT = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "layerdrop": 0.3,
}
_SWITCH = {
    **_T5,
    "num_decoder_layers": 2,
    "num_experts": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "router_jitter_noise": 0.1,
    "add_router_probs": False,
    "router_z_loss_coef": 0.0,
    "router_aux_loss_coef": 0.0,
}
_BERT = {**_SMALL, "num_labels": 3}
_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_CLASSIFIER, _WRITER, _TRANSLATOR = "ForSequenceClassification", "ForCausalLM", "ForConditionalGeneration"
_SEER = "ForImageClassification"

_Row = tuple[str, str, Callable[[], Any], dict[str, Any], str, dict[str, Any]]
_HEALTHY: list[_Row] = [
    ("Bert", _CLASSIFIER, _classes, _BERT, "dropout everywhere", {}),
    ("DebertaV2", _CLASSIFIER, _classes, _DEBERTA, "its own dropout, as a function", {}),
    ("GPT2", "LMHeadModel", _text, _GPT2, "tied weights", _TOKENS),
    ("Llama", _WRITER, _text, _GROUPED, "dropout in the fused attention", _TOKENS),
    ("OPT", _WRITER, _text, _OPT, "layers are dropped", _TOKENS),
    ("Bart", _TRANSLATOR, _translations, _BART, "two stacks of dropped layers", _TOKENS),
    ("T5", _TRANSLATOR, _translations, _T5, "relative positions", _TOKENS),
    ("SwitchTransformers", _TRANSLATOR, _translations, _SWITCH, "experts draw for the tokens they are sent", _TOKENS),
    ("Mixtral", _WRITER, _text, {**_GROUPED, **_EXPERTS}, "experts that float64 has no kernel for", _TOKENS),
    ("ViT", _SEER, _images, _VISION, "patches", {}),
    ("Swin", _SEER, _images, _SWIN, "windows folded into the batch, drop-path", {}),
    ("Wav2Vec2", "ForCTC", _sounds, _SOUND, "masks drawn by NumPy, a loop over the samples", {}),
    ("Whisper", _TRANSLATOR, _spectra, _WHISPER, "SpecAugment drawn by NumPy", _TOKENS),
]

HEALTHY: list[Case] = [
    quiet(family + head, _built(family, head, batch, changes), why, **more)
    for family, head, batch, changes, why, more in _HEALTHY
]
FAULTY: list[Case] = [
    fault("GPT2LMHeadModel", _built("GPT2", "LMHeadModel", _text, _GPT2), "GAV202", "ragged rows"),
    fault("CLIPModel", _built("CLIP", "Model", _pairs, _CLIP), "GAV103", "in-batch negatives"),
    fault(
        "ResNetForImageClassification", _built("ResNet", _SEER, _images, _RESNET), "GAV101", "BatchNorm in every block"
    ),
]
