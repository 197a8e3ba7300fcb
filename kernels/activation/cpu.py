"""The C++ version, activation.cpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_int, c_int64, c_void_p
from functools import partial

import torch
from torch import Tensor

from kernels import native

_ARGUMENTS = [c_void_p] * 2 + [c_int64] * 2 + [c_int]
_OPERATIONS_OF_AN_EXPONENTIAL = 10
Gated = Callable[[Tensor], Tensor]


def _bind(name: str, library: CDLL) -> Gated:
    function = native.function(library, name, _ARGUMENTS)

    def gated(gate_up: Tensor) -> Tensor:
        assert gate_up.dtype == torch.float32, gate_up.dtype
        gate_up = gate_up.contiguous()
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(tokens, width)
        work = tokens * width * _OPERATIONS_OF_AN_EXPONENTIAL
        threads = torch.get_num_threads() if work > native.PARALLEL_ELEMENTS else 1
        function(gate_up.data_ptr(), y.data_ptr(), tokens, width, threads)
        return y

    return gated


bind_silu = partial(_bind, "moorage_gated_silu")
bind_gelu_tanh = partial(_bind, "moorage_gated_gelu_tanh")
