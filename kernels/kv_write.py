"""Writes the keys and values of a step into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import native
from kernels.layout import dense_rows


def kv_write_reference(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """The definition: cache[slot] = row, rounded to the cache's dtype."""
    key_cache.flatten(0, 1).index_copy_(0, slots, k.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, v.to(value_cache.dtype))


def kv_write(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores k[t] and v[t] at slots[t] of the caches, rounding to nearest even.

    k, v                    float32 [T, Hk, D]; tokens may lie apart, heads are dense
    key_cache, value_cache  bfloat16 or float32 [num_blocks, B, Hk, D], dense
    slots                   int64 [T]: block * B + offset in the block; all different
    """
    library = native.shared_object()
    if library is None or k.is_cuda:
        return kv_write_reference(k, v, key_cache, value_cache, slots)
    assert k.dtype == v.dtype == torch.float32 and slots.dtype == torch.int64, (k.dtype, v.dtype, slots.dtype)
    k, v = dense_rows(k), dense_rows(v)
    tokens, heads, head_size = k.shape
    bf16 = key_cache.dtype == torch.bfloat16
    function = library.moorage_kv_write_bf16 if bf16 else library.moorage_kv_write_f32
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
