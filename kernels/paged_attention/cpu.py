"""The C++ version, paged_attention.cpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import native
from kernels.native.layout import dense_rows

_ARGUMENTS = [c_void_p, c_int64] + [c_void_p] * 6 + [c_int64] * 6 + [c_float, c_int64, c_int]
PagedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int], Tensor]


def bind(library: CDLL) -> PagedAttention:
    over_bf16 = native.function(library, "moorage_paged_attention_bf16", _ARGUMENTS)
    over_f32 = native.function(library, "moorage_paged_attention_f32", _ARGUMENTS)

    def paged_attention(
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        cumulative: Tensor,
        past: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        assert q.dtype == torch.float32 and q.shape[2] % 8 == 0, (q.dtype, q.shape)
        assert key_cache.is_contiguous() and value_cache.is_contiguous()
        assert block_table.dtype == cumulative.dtype == past.dtype == torch.int32
        q, block_table = dense_rows(q), block_table.contiguous()
        tokens, query_heads, head_size = q.shape
        output = torch.empty(tokens, query_heads, head_size)
        function = over_bf16 if key_cache.dtype == torch.bfloat16 else over_f32
        function(
            q.data_ptr(),
            q.stride(0),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            block_table.data_ptr(),
            cumulative.data_ptr(),
            past.data_ptr(),
            output.data_ptr(),
            block_table.shape[0],
            query_heads,
            key_cache.shape[2],
            head_size,
            key_cache.shape[1],
            block_table.shape[1],
            scale,
            window,
            torch.get_num_threads(),
        )
        return output

    return paged_attention
