"""Gated activations of the feed-forward block: act(gate) * up, with gate and up side by side."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_silu_reference(gate_up: Tensor) -> Tensor:
    """The definition: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_gelu_tanh_reference(gate_up: Tensor) -> Tensor:
    """The definition: gelu(gate) * up, with the tanh form of gelu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up float32 [T, 2I], gate first; returns a new float32 [T, I]."""
    return gated_silu_reference(gate_up)


def gated_gelu_tanh(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up. gate_up float32 [T, 2I], gate first; returns a new float32 [T, I]."""
    return gated_gelu_tanh_reference(gate_up)
