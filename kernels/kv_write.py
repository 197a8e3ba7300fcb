"""Writes the keys and values of a step into the paged cache."""

from __future__ import annotations

from torch import Tensor


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
    kv_write_reference(k, v, key_cache, value_cache, slots)
