"""Writes the keys and values of a step into the paged cache."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import ByDevice
from kernels.kv_write import cpu
from kernels.kv_write.reference import kv_write_reference

__all__ = ["kv_write", "kv_write_reference"]

_KV_WRITE = ByDevice[cpu.KvWrite](kv_write_reference, cpu.bind)


def kv_write(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores k[t] and v[t] at slots[t] of the caches, rounding to nearest even.

    k, v                    float32 [T, Hk, D]; tokens may lie apart, heads are dense
    key_cache, value_cache  bfloat16 or float32 [num_blocks, B, Hk, D], dense
    slots                   int64 [T]: block * B + offset in the block; all different
    """
    _KV_WRITE[k.is_cuda](k, v, key_cache, value_cache, slots)
