"""A transformers model as a GGUF file, in the layout of the usual converters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA3_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _pairs_together(value: np.ndarray, heads: int) -> np.ndarray:
    """Llama converters interleave the two halves of every rotated head."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def _stored_name(name: str, architecture: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{suffix}"
    _, _, layer, inner = module.split(".", 3)
    modules = _MODULES | (_GEMMA3_NORMS if architecture == "gemma3" else {})
    return f"blk.{layer}.{modules[inner]}.{suffix}"


def _stored_value(name: str, value: np.ndarray, architecture: str, heads: int, kv_heads: int) -> np.ndarray:
    if architecture == "llama" and ".q_proj." in name:
        return _pairs_together(value, heads)
    if architecture == "llama" and ".k_proj." in name:
        return _pairs_together(value, kv_heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return value + 1
    return value


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType,
    *,
    architecture: str = "llama",
    rope_divisors: np.ndarray | None = None,
    leave_out: str = "",
    others: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Matrices as `kind`, or as `others` says of their module ("attn_v"); vectors as float32. `leave_out`: the stored
    name of a tensor that is not written."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(6)
    ropes = config.rope_parameters
    ropes = ropes["full_attention"] if architecture == "gemma3" else ropes
    writer.add_rope_freq_base(ropes["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.astype(np.float32))
    for name, parameter in model.named_parameters():
        stored = _stored_name(name, architecture)
        if stored == leave_out:
            continue
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        value = _stored_value(name, parameter.detach().numpy(), architecture, heads, kv_heads)
        tensor_kind = (others or {}).get(stored.split(".")[-2], kind) if value.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantize(value, tensor_kind), raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
