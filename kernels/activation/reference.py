"""The definition, in plain torch."""

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
