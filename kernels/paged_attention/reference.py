"""The definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

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
        in_range = (key_position >= first[active, None]) & (key_position <= last[active, None])
        column = (key_position // block_size).clamp_max(table.shape[1] - 1)
        block = torch.where(in_range, table[tile_row[active]][:, column], 0)
        slot = torch.where(in_range, key_position % block_size, 0)
        hidden = ~in_range[:, :, None, None]
        keys = key_cache[block, slot].float().masked_fill_(hidden, 0.0)  # [active, KEY_TILE, kv heads, D]
        values = value_cache[block, slot].float().masked_fill_(hidden, 0.0)

        visible = key_position <= query_position[active][:, :, None]
        if window:
            visible &= key_position > query_position[active][:, :, None] - window
        visible &= in_range[:, None, :]
        n = len(active)
        scores = _products(
            queries[active].flatten(0, 1), keys.permute(0, 2, 3, 1).reshape(n * kv_heads, head_size, KEY_TILE)
        ).view(n, kv_heads, group, _QUERY_TILE, KEY_TILE)
        scores = scores.masked_fill_(~visible[:, None, None], float("-inf")).flatten(2, 3)

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
