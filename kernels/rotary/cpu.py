"""The C++ version, rotary.cpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import native
from kernels.native.layout import is_dense_rows

_ARGUMENTS = [c_void_p, c_int64, c_void_p, c_void_p] + [c_int64] * 3 + [c_int]
ApplyRotary = Callable[[Tensor, Tensor, Tensor], Tensor]


def bind(library: CDLL) -> ApplyRotary:
    function = native.function(library, "moorage_rotary", _ARGUMENTS)

    def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        assert x.dtype == cos.dtype == sin.dtype == torch.float32, (x.dtype, cos.dtype, sin.dtype)
        assert is_dense_rows(x) and cos.is_contiguous() and sin.is_contiguous()
        tokens, heads, head_size = x.shape
        elements = tokens * heads * head_size
        function(
            x.data_ptr(),
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            head_size // 2,
            torch.get_num_threads() if elements > native.PARALLEL_ELEMENTS else 1,
        )
        return x

    return apply_rotary
