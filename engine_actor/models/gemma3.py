"""The layer of Gemma 3: a norm before and after both halves."""

from __future__ import annotations

from torch import Tensor

from engine_actor.models.attention import Attention
from engine_actor.models.loading import Loader
from engine_actor.models.mlp import Mlp
from engine_actor.models.step_tensors import StepTensors
from kernels.norm import rms_norm


class Gemma3Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, loader: Loader, layer: int) -> None:
        size, prefix = loader.config.hidden_size, f"model.layers.{layer}."
        self.eps = loader.config.rms_eps
        self.attention = Attention(loader, layer)
        self.mlp = Mlp(loader, layer)
        self.before_attention = loader.vector(f"{prefix}input_layernorm.weight", size)
        self.after_attention = loader.vector(f"{prefix}post_attention_layernorm.weight", size)
        self.before_mlp = loader.vector(f"{prefix}pre_feedforward_layernorm.weight", size)
        self.after_mlp = loader.vector(f"{prefix}post_feedforward_layernorm.weight", size)

    def __call__(self, x: Tensor, step: StepTensors) -> Tensor:
        """x: float32 [tokens, hidden_size], changed in place and returned."""
        attended = self.attention(rms_norm(x, self.before_attention, self.eps), step)
        x += rms_norm(attended, self.after_attention, self.eps)
        x += rms_norm(self.mlp(rms_norm(x, self.before_mlp, self.eps)), self.after_mlp, self.eps)
        return x
