"""The definition, in plain torch."""

from __future__ import annotations

from torch import Tensor


def kv_write_reference(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """The definition: cache[slot] = row, rounded to the cache's dtype."""
    key_cache.flatten(0, 1).index_copy_(0, slots, k.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, v.to(value_cache.dtype))
