"""The C++ product of linear.cpp."""

from __future__ import annotations

from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import native

_PRODUCT = [c_void_p] * 4 + [c_int64] * 3 + [c_int]
_PACK = [c_void_p] * 2 + [c_int64] * 2 + [c_int]


class NativeLinear:
    """Each element is one chain over k. Arguments as for `PackedLinear`."""

    row_invariant = True

    def __init__(self, library: CDLL, weight: Tensor, bias: Tensor | None) -> None:
        bf16 = weight.dtype == torch.bfloat16
        self.kind = "native-bf16" if bf16 else "native-fp32"
        suffix = "bf16" if bf16 else "f32"
        self._function = native.function(library, f"moorage_linear_{suffix}", _PRODUCT)
        self._n, self._k = weight.shape
        weight = weight.contiguous()
        packed_size = native.function(library, "moorage_linear_packed_size", [c_int64] * 2, c_int64)
        self._packed = torch.empty(packed_size(self._n, self._k), dtype=weight.dtype)
        pack = native.function(library, f"moorage_linear_pack_{suffix}", _PACK)
        pack(weight.data_ptr(), self._packed.data_ptr(), self._n, self._k, torch.get_num_threads())
        self._bias = None if bias is None else bias.float().contiguous()
        self.nbytes = weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self._pointers = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.shape[1] == self._k, (x.dtype, x.shape)
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self._n)
        packed, bias = self._pointers
        self._function(x.data_ptr(), packed, bias, y.data_ptr(), rows, self._n, self._k, torch.get_num_threads())
        return y
