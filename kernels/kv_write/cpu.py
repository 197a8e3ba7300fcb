"""The C++ version, kv_write.cpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import native
from kernels.native.layout import dense_rows

_ARGUMENTS = [c_void_p, c_int64, c_void_p, c_int64] + [c_void_p] * 3 + [c_int64] * 2 + [c_int]
KvWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def bind(library: CDLL) -> KvWrite:
    into_bf16 = native.function(library, "moorage_kv_write_bf16", _ARGUMENTS)
    into_f32 = native.function(library, "moorage_kv_write_f32", _ARGUMENTS)

    def kv_write(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        assert k.dtype == v.dtype == torch.float32 and slots.dtype == torch.int64, (k.dtype, v.dtype, slots.dtype)
        k, v = dense_rows(k), dense_rows(v)
        tokens, heads, head_size = k.shape
        function = into_bf16 if key_cache.dtype == torch.bfloat16 else into_f32
        function(
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            tokens,
            heads * head_size,
            torch.get_num_threads() if k.numel() > native.PARALLEL_ELEMENTS else 1,
        )

    return kv_write
