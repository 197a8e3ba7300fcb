"""The layer of Llama and its relatives: SmolLM2, Mistral (a window), Qwen 2 (biases), Qwen 3 (normalised heads)."""

from __future__ import annotations

from torch import Tensor

from engine_actor.models.attention import Attention
from engine_actor.models.loading import Loader
from engine_actor.models.mlp import Mlp
from engine_actor.models.step_tensors import StepTensors
from kernels.norm import rms_norm


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, loader: Loader, layer: int) -> None:
        config, prefix = loader.config, f"model.layers.{layer}."
        self.eps = config.rms_eps
        self.attention = Attention(loader, layer)
        self.mlp = Mlp(loader, layer)
        self.attention_norm = loader.vector(f"{prefix}input_layernorm.weight", config.hidden_size)
        self.mlp_norm = loader.vector(f"{prefix}post_attention_layernorm.weight", config.hidden_size)

    def __call__(self, x: Tensor, step: StepTensors) -> Tensor:
        """x: float32 [tokens, hidden_size], changed in place and returned."""
        x += self.attention(rms_norm(x, self.attention_norm, self.eps), step)
        x += self.mlp(rms_norm(x, self.mlp_norm, self.eps))
        return x
