"""Gated activations of the feed-forward block: act(gate) * up, with gate and up side by side."""

from __future__ import annotations

from torch import Tensor

from kernels.activation import cpu
from kernels.activation.reference import gated_gelu_tanh_reference, gated_silu_reference
from kernels.dispatch import ByDevice

__all__ = ["gated_gelu_tanh", "gated_gelu_tanh_reference", "gated_silu", "gated_silu_reference"]

_GATED_SILU = ByDevice[cpu.Gated](gated_silu_reference, cpu.bind_silu)
_GATED_GELU_TANH = ByDevice[cpu.Gated](gated_gelu_tanh_reference, cpu.bind_gelu_tanh)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up float32 [T, 2I], gate first; returns a new float32 [T, I]."""
    return _GATED_SILU[gate_up.is_cuda](gate_up)


def gated_gelu_tanh(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up. gate_up float32 [T, 2I], gate first; returns a new float32 [T, I]."""
    return _GATED_GELU_TANH[gate_up.is_cuda](gate_up)
