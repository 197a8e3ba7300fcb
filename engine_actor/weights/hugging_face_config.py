"""config.json and generation_config.json of a Hugging Face folder as a `ModelConfig`.

Defaults and older spellings of config.json are transformers' business: its configuration classes fill them in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_actor.errors import UnreadableModel, UnsupportedModel
from engine_actor.weights.config import ModelConfig, RopeConfig
from engine_actor.weights.rope_scaling import linear_divisors, llama3_divisors

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Settings that change the arithmetic and that no module here has: refused unless off.
_MUST_BE_OFF = (
    "quantization_config",
    "mlp_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)


def read_config(folder: Path) -> ModelConfig:
    """Raises UnreadableModel for a missing or damaged file, UnsupportedModel for what Moorage cannot run."""
    raw = _read_json(folder, "config.json")
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        model_types = ", ".join(MODEL_TYPES)
        raise UnsupportedModel(str(folder), f"model_type {model_type!r} is not supported (supported: {model_types})")
    # transformers takes seconds to import, and a GGUF file needs none of it.
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library's own checks raise many types
        raise UnsupportedModel(str(folder), f"config.json: {error}") from error
    try:
        return _translate(folder, config, str(model_type))
    except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise UnsupportedModel(str(folder), f"config.json: {error}") from error


def _translate(folder: Path, config: Any, model_type: str) -> ModelConfig:
    for name in _MUST_BE_OFF:
        if getattr(config, name, None):
            raise UnsupportedModel(str(folder), f"config.json: {name} = {getattr(config, name)!r} is not supported")
    gemma = model_type == "gemma3_text"
    activation = config.hidden_activation if gemma else config.hidden_act
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(str(folder), f"config.json: activation {activation!r} is not supported")
    heads: int = config.num_attention_heads
    head_size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    ropes = config.rope_parameters
    attention_bias = bool(getattr(config, "attention_bias", False))
    rope = _rope(folder, ropes["full_attention"] if gemma else ropes, head_size)
    return ModelConfig(
        architecture="gemma3" if gemma else "llama",
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_size=head_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        rms_eps=config.rms_norm_eps,
        rope=rope,
        local_rope=_rope(folder, ropes["sliding_attention"], head_size) if gemma else rope,
        windows=_windows(config),
        # Qwen 2 always has them, and no key that says so.
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        tie_embeddings=bool(config.tie_word_embeddings),
        activation=_ACTIVATIONS[activation],
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        query_scale=(config.query_pre_attn_scalar if gemma else head_size) ** -0.5,
        eos_token_ids=_end_tokens(folder, config),
    )


def _windows(config: Any) -> tuple[int, ...]:
    layers: int = config.num_hidden_layers
    window: int = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(folder: Path, parameters: Mapping[str, Any], head_size: int) -> RopeConfig:
    theta, kind = float(parameters["rope_theta"]), parameters["rope_type"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(str(folder), "config.json: a partial rotary embedding is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_divisors(head_size, parameters["factor"]))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return RopeConfig(theta, llama3_divisors(head_size, theta, *(parameters[name] for name in names)))
    raise UnsupportedModel(str(folder), f"config.json: rope scaling {kind!r} is not supported (linear, llama3)")


def _end_tokens(folder: Path, config: Any) -> frozenset[int]:
    ids = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        ids = _read_json(folder, "generation_config.json").get("eos_token_id", ids)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableModel(str(folder), f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableModel(str(folder), f"{name} must hold an object, not {type(value).__name__}")
    return value
