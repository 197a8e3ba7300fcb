"""Small random models of every family, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 256
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
    "bos_token_id": None,
    "pad_token_id": None,
}

_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama_biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 9, "head_dim": 16}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A float32 model whose logits are of order 1 to 10, with no weight left at a value that hides a mistake."""
    config_class, model_class, options = _FAMILIES[family]
    model: PreTrainedModel = model_class(config_class(**(_COMMON | options | changes)))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * (0.5 if "embed" in name else 1.2 * parameter.shape[1] ** -0.5))
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(parameter + noise * 0.3)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """transformers' logits of every position: float32 [len(tokens), vocab]."""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()
