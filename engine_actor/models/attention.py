"""Grouped-query attention over the paged pools, for every family."""

from __future__ import annotations

from torch import Tensor

from engine_actor.models.loading import Loader
from engine_actor.models.step_tensors import StepTensors
from kernels.kv_write import kv_write
from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention
from kernels.rotary import apply_rotary


class Attention:
    """Projects, normalises (some families), rotates, writes keys and values into the pools, attends, projects back."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, loader: Loader, layer: int) -> None:
        config = loader.config
        prefix = f"model.layers.{layer}.self_attn."
        size = config.head_size
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, size
        self.rotated = self.heads + self.kv_heads
        self.window = config.windows[layer]
        self.scale = config.query_scale
        self.eps = config.rms_eps
        outputs = {
            "q_proj": self.heads * size,
            "k_proj": self.kv_heads * size,
            "v_proj": self.kv_heads * size,
        }
        self.query_key_value = loader.linear(prefix, outputs, config.hidden_size, bias=config.qkv_bias)
        self.output = loader.linear(prefix, {"o_proj": config.hidden_size}, self.heads * size, bias=config.output_bias)
        self.query_norm = loader.vector(f"{prefix}q_norm.weight", size) if config.qk_norm else None
        self.key_norm = loader.vector(f"{prefix}k_norm.weight", size) if config.qk_norm else None

    def bind(self, key_cache: Tensor, value_cache: Tensor) -> None:
        """key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size], used by every later call."""
        self.key_cache, self.value_cache = key_cache, value_cache

    def __call__(self, x: Tensor, step: StepTensors) -> Tensor:
        """x: float32 [tokens, hidden_size] -> the same shape."""
        tokens = x.shape[0]
        mixed = self.query_key_value(x).view(tokens, self.rotated + self.kv_heads, self.head_size)
        query, key, value = mixed.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), 1)
        cos, sin = step.local_rotary if self.window else step.rotary
        if self.query_norm is None or self.key_norm is None:
            # Queries and keys lie side by side: one call turns both, in place.
            apply_rotary(mixed.narrow(1, 0, self.rotated), cos, sin)
        else:
            query = apply_rotary(rms_norm(query, self.query_norm, self.eps), cos, sin)
            key = apply_rotary(rms_norm(key, self.key_norm, self.eps), cos, sin)
        kv_write(key, value, self.key_cache, self.value_cache, step.slots)
        attended = paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            step.block_table,
            step.cumulative,
            step.past,
            self.scale,
            self.window,
        )
        return self.output(attended.view(tokens, self.heads * self.head_size))
