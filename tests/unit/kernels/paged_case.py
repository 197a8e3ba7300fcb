"""Random attention problems whose keys and values can be laid into a paged cache in many ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Conversation:
    """One row's whole history: queries, keys and values of every position, [length, heads, D], float32."""

    q: Tensor
    k: Tensor
    v: Tensor


def conversation(
    length: int, q_heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, seed: int
) -> Conversation:
    """Keys and values are rounded to `dtype`, so that every cache of that dtype holds them exactly."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(length, q_heads, head_size, generator=random)
    k, v = (torch.randn(length, kv_heads, head_size, generator=random).to(dtype).float() for _ in range(2))
    return Conversation(q, k, v)


def call_arguments(
    rows: Sequence[tuple[Conversation, int, int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int = 0,
) -> dict[str, Any]:
    """Arguments for one call in which row i computes the positions [start, end) of its conversation.

    Only the blocks that hold positions the call may see are filled; all else in the caches, unwritten tails of blocks
    included, is NaN. Blocks are dealt in an order that depends on `seed`. With a window, blocks wholly
    below it are gone and their table entries are -1.
    """
    columns = max((end + block_size - 1) // block_size for _, _, end in rows)
    kv_heads, head_size = rows[0][0].k.shape[1:]
    num_blocks = columns * len(rows) + 3
    keys = torch.full((num_blocks, block_size, kv_heads, head_size), float("nan"))
    values = keys.clone()
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(rows), columns), -1, dtype=torch.int32)
    for row, (talk, start, end) in enumerate(rows):
        first = max(0, start - window + 1) if window else 0
        for column in range(first // block_size, (end + block_size - 1) // block_size):
            block = free.pop()
            table[row, column] = block
            span = slice(column * block_size, min((column + 1) * block_size, end))
            keys[block, : span.stop - span.start] = talk.k[span]
            values[block, : span.stop - span.start] = talk.v[span]
    lengths = torch.tensor([0] + [end - start for _, start, end in rows])
    return {
        "q": torch.cat([talk.q[start:end] for talk, start, end in rows]),
        "key_cache": keys.to(dtype),
        "value_cache": values.to(dtype),
        "block_table": table,
        "cumulative": lengths.cumsum(0).to(torch.int32),
        "past": torch.tensor([start for _, start, _ in rows], dtype=torch.int32),
        "scale": head_size**-0.5,
        "window": window,
    }


def exact_attention(talk: Conversation, start: int, end: int, window: int = 0) -> Tensor:
    """The textbook formula in float64, for the positions [start, end) of one conversation."""
    group = talk.q.shape[1] // talk.k.shape[1]
    k, v = (x[:end].double().repeat_interleave(group, 1) for x in (talk.k, talk.v))
    scores = torch.einsum("qhd,khd->hqk", talk.q[start:end].double(), k) * talk.q.shape[2] ** -0.5
    query, key = torch.arange(start, end)[:, None], torch.arange(end)
    hidden = key > query
    if window:
        hidden |= key <= query - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).float()
