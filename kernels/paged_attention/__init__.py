"""Causal attention of packed rows over keys and values that live in the blocks of a paged cache.

The order of reduction is fixed by absolute positions alone. Keys come in tiles of KEY_TILE positions that
start at multiples of KEY_TILE, whatever the block size; inside a tile the scores' maximum and sum are formed
over the whole tile, with hidden positions as -inf; tiles are merged from the first to the last by online
softmax. Neither the other rows, nor where a chunk of a prompt begins, nor the placement of blocks takes part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import ByDevice
from kernels.paged_attention import cpu
from kernels.paged_attention.probe import rows_agree
from kernels.paged_attention.reference import paged_attention_reference

__all__ = ["PAGED_ATTENTION", "attention_is_row_invariant", "paged_attention", "paged_attention_reference"]

PAGED_ATTENTION = ByDevice[cpu.PagedAttention](paged_attention_reference, cpu.bind)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cumulative: Tensor,
    past: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of every packed query over its own row's positions, up to and including its own.

    q                       float32 [T, Hq, D]; D a multiple of 8 up to 256; tokens may lie apart
    key_cache, value_cache  bfloat16 or float32 [num_blocks, B, Hk, D], dense; this step's keys are already in
    block_table             int32 [R, C]: physical blocks in order of position, padded with -1
    cumulative              int32 [R + 1]: row r owns the tokens [cumulative[r], cumulative[r + 1])
    past                    int32 [R]: query t of row r sits at position past[r] + t - cumulative[r]
    scale                   multiplies the scores
    window                  0, or how many of the last positions a query sees, its own included
    Returns a new dense float32 [T, Hq, D].
    """
    run = PAGED_ATTENTION[q.is_cuda]
    return run(q, key_cache, value_cache, block_table, cumulative, past, scale, window)


def attention_is_row_invariant(query_heads: int, kv_heads: int, head_size: int, device: str) -> bool:
    """Whether a query's result is the same bits in any batch: of the native version by construction; of the reference,
    whose small products are a math library's, by a probe, once for each shape and number of threads."""
    if PAGED_ATTENTION.kind(device == "cuda") == "native":
        return True
    return rows_agree(query_heads, kv_heads, head_size, device, torch.get_num_threads())
