"""Gated activations of the feed-forward block: act(gate) * up, with gate and up side by side."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native


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
    library = native.shared_object()
    if library is None or gate_up.is_cuda:
        return gated_silu_reference(gate_up)
    return _gated(library.moorage_gated_silu, gate_up)


def gated_gelu_tanh(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up. gate_up float32 [T, 2I], gate first; returns a new float32 [T, I]."""
    library = native.shared_object()
    if library is None or gate_up.is_cuda:
        return gated_gelu_tanh_reference(gate_up)
    return _gated(library.moorage_gated_gelu_tanh, gate_up)


def _gated(function: Any, gate_up: Tensor) -> Tensor:
    assert gate_up.dtype == torch.float32, gate_up.dtype
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, width)
    # An exponential costs about ten plain operations.
    threads = torch.get_num_threads() if tokens * width * 10 > native.PARALLEL_ELEMENTS else 1
    function(gate_up.data_ptr(), y.data_ptr(), tokens, width, threads)
    return y
