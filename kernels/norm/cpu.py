"""The C++ version, norm.cpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import native
from kernels.native.layout import dense_rows

_ARGUMENTS = [c_void_p, c_int64, c_void_p, c_float, c_void_p] + [c_int64] * 3 + [c_int]
RmsNorm = Callable[[Tensor, Tensor, float], Tensor]


def bind(library: CDLL) -> RmsNorm:
    function = native.function(library, "moorage_rms_norm", _ARGUMENTS)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.dtype == weight.dtype == torch.float32, (x.dtype, weight.dtype)
        x = dense_rows(x)
        y = torch.empty(x.shape)
        elements = y.numel()
        function(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            eps,
            y.data_ptr(),
            x.shape[0],
            x.shape[1] if x.dim() == 3 else 1,
            x.shape[-1],
            torch.get_num_threads() if elements > native.PARALLEL_ELEMENTS else 1,
        )
        return y

    return rms_norm
