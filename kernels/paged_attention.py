"""Causal attention of packed rows over keys and values that live in the blocks of a paged cache.

The order of reduction is fixed by absolute positions alone. Keys come in tiles of KEY_TILE positions that
start at multiples of KEY_TILE, whatever the block size; inside a tile the scores' maximum and sum are formed
over the whole tile, with hidden positions as -inf; tiles are merged from the first to the last by online
softmax. Neither the other rows, nor where a chunk of a prompt begins, nor the placement of blocks takes part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import native
from kernels.layout import dense_rows

KEY_TILE = 64
_QUERY_TILE = 16


def paged_attention_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cumulative: Tensor,
    past: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """The definition, in plain torch, on any device.

    Queries are put into tiles of 16 aligned by absolute position, so a query always has the same lane in
    a matrix product of the same shape. Lanes without a query compute zeros and are thrown away.
    """
    device = q.device
    tokens, query_heads, head_size = q.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = query_heads // kv_heads
    cumulative, past, table = cumulative.long(), past.long(), block_table.long()

    # Every token's row and position, and the tile (row, position // 16) that it belongs to.
    lengths = cumulative.diff()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    position = past[row] + torch.arange(tokens, device=device) - cumulative[row]
    tile_ids = row * (1 << 32) + position // _QUERY_TILE
    unique, tile = torch.unique_consecutive(tile_ids, return_inverse=True)
    lane = position % _QUERY_TILE
    count = len(unique)
    tile_row, tile_base = unique >> 32, (unique & 0xFFFFFFFF) * _QUERY_TILE

    queries = q.new_zeros(count, _QUERY_TILE, query_heads, head_size)
    queries[tile, lane] = q * scale
    # [count, kv heads, group * lanes, head size]: all query heads of a kv head share its keys in one product.
    queries = queries.view(count, _QUERY_TILE, kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(count, kv_heads, group * _QUERY_TILE, head_size)

    query_position = tile_base[:, None] + torch.arange(_QUERY_TILE, device=device)  # [count, lanes]
    row_end = (past + lengths)[tile_row]
    last = torch.minimum(tile_base + _QUERY_TILE, row_end) - 1
    first = torch.zeros_like(last)
    if window:
        first = (torch.maximum(tile_base, past[tile_row]) - window + 1).clamp_min(0)

    maximum = q.new_full((count, kv_heads, group * _QUERY_TILE, 1), float("-inf"))
    total = torch.zeros_like(maximum)
    output = torch.zeros_like(queries)
    offsets = torch.arange(KEY_TILE, device=device)
    key_tiles = range(int(first.min()) // KEY_TILE, int(last.max()) // KEY_TILE + 1) if count else range(0)
    for key_tile in key_tiles:
        key_position = key_tile * KEY_TILE + offsets
        active = ((first // KEY_TILE <= key_tile) & (last // KEY_TILE >= key_tile)).nonzero().squeeze(1)
        if not len(active):
            continue
        # Slots that no query of the tile may see can hold anything, NaN included: they are read as zero.
        known = (key_position >= first[active, None]) & (key_position <= last[active, None])
        column = (key_position // block_size).clamp_max(table.shape[1] - 1)
        block = torch.where(known, table[tile_row[active]][:, column], 0)
        slot = torch.where(known, key_position % block_size, 0)
        hidden = ~known[:, :, None, None]
        keys = key_cache[block, slot].float().masked_fill_(hidden, 0.0)  # [active, KEY_TILE, kv heads, D]
        values = value_cache[block, slot].float().masked_fill_(hidden, 0.0)

        seen = key_position <= query_position[active][:, :, None]
        if window:
            seen &= key_position > query_position[active][:, :, None] - window
        seen &= known[:, None, :]
        n = len(active)
        scores = _products(
            queries[active].flatten(0, 1), keys.permute(0, 2, 3, 1).reshape(n * kv_heads, head_size, KEY_TILE)
        ).view(n, kv_heads, group, _QUERY_TILE, KEY_TILE)
        scores = scores.masked_fill_(~seen[:, None, None], float("-inf")).flatten(2, 3)

        new_maximum = torch.maximum(maximum[active], scores.amax(-1, keepdim=True))
        # A lane that has seen nothing yet keeps -inf; 0 in its place makes every exponential 0 and not NaN.
        anchor = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
        weights = torch.exp(scores - anchor)
        rescale = torch.exp(maximum[active] - anchor)
        weighted = _products(
            weights.flatten(0, 1), values.permute(0, 2, 1, 3).reshape(n * kv_heads, KEY_TILE, head_size)
        ).view(n, kv_heads, group * _QUERY_TILE, head_size)
        output[active] = output[active] * rescale + weighted
        total[active] = total[active] * rescale + weights.sum(-1, keepdim=True)
        maximum[active] = new_maximum

    output = output / total  # lanes without a query may be 0 / 0; nothing reads them
    output = output.view(count, kv_heads, group, _QUERY_TILE, head_size).permute(0, 3, 1, 2, 4)
    return output.reshape(count, _QUERY_TILE, query_heads, head_size)[tile, lane]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for each of a batch. Never for one alone: a math library may deal that to threads, and cut its sums."""
    return torch.bmm(a, b) if len(a) > 1 else torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]


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
    library = native.shared_object()
    if library is None or q.is_cuda:
        return paged_attention_reference(q, key_cache, value_cache, block_table, cumulative, past, scale, window)
    assert q.dtype == torch.float32 and q.shape[2] % 8 == 0, (q.dtype, q.shape)
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    assert block_table.dtype == cumulative.dtype == past.dtype == torch.int32
    q, block_table = dense_rows(q), block_table.contiguous()
    tokens, query_heads, head_size = q.shape
    output = torch.empty(tokens, query_heads, head_size)
    bf16 = key_cache.dtype == torch.bfloat16
    function = library.moorage_paged_attention_bf16 if bf16 else library.moorage_paged_attention_f32
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
