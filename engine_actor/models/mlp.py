"""The gated MLP of every family."""

from __future__ import annotations

from torch import Tensor

from engine_actor.models.loading import Loader
from kernels.activation import gated_gelu_tanh, gated_silu

_GATES = {"silu": gated_silu, "gelu_tanh": gated_gelu_tanh}


class Mlp:
    """down(activation(gate(x)) * up(x)), with gate and up as one linear."""

    def __init__(self, loader: Loader, layer: int) -> None:
        config = loader.config
        prefix = f"model.layers.{layer}.mlp."
        inner = config.intermediate_size
        self.gate_up = loader.linear(prefix, {"gate_proj": inner, "up_proj": inner}, config.hidden_size)
        self.down = loader.linear(prefix, {"down_proj": config.hidden_size}, inner)
        self.gate = _GATES[config.activation]

    def __call__(self, x: Tensor) -> Tensor:
        """x: float32 [tokens, hidden_size] -> the same shape."""
        return self.down(self.gate(self.gate_up(x)))
