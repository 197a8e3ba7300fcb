"""Whether the reference keeps a query's bits on this device: evidence from random values, not proof."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.paged_attention.reference import KEY_TILE, paged_attention_reference

# The positions [start, end) that a row computes: decodes, a prompt and a later chunk, in and beyond one tile of keys.
_SPANS = ((0, 1), (0, 33), (KEY_TILE + 6, KEY_TILE + 7), (5, KEY_TILE + 21), (2 * KEY_TILE, 2 * KEY_TILE + 1))


@cache
def rows_agree(query_heads: int, kv_heads: int, head_size: int, device: str, threads: int) -> bool:
    """Whether rows have the same bits together, alone and, for the last query, by itself. `threads`: of this moment."""
    random = torch.Generator().manual_seed(0)
    cache_shape = (len(_SPANS), max(end for _, end in _SPANS), kv_heads, head_size)
    keys, values = (torch.randn(cache_shape, generator=random).to(device) for _ in range(2))
    queries = [torch.randn(end - start, query_heads, head_size, generator=random).to(device) for start, end in _SPANS]

    def attend(rows: list[int], q: Tensor, lengths: list[int], past: list[int]) -> Tensor:
        table = torch.tensor([[row] for row in rows], dtype=torch.int32, device=device)  # a row has one large block
        cumulative = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        return paged_attention_reference(q, keys, values, table, cumulative, torch.tensor(past, device=device), 1.0)

    lengths = [len(q) for q in queries]
    together = attend(list(range(len(_SPANS))), torch.cat(queries), lengths, [start for start, _ in _SPANS])
    for row, (whole, q, (start, _)) in enumerate(zip(torch.split(together, lengths), queries, _SPANS, strict=True)):
        alone = attend([row], q, [len(q)], [start])
        piece = attend([row], q[-1:], [1], [start + len(q) - 1])
        if not (torch.equal(alone, whole) and torch.equal(piece, whole[-1:])):
            return False
    return True
