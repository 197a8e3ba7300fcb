"""The definition, in plain torch, and all there is: a copy has no sum in it, and torch does it at memory speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block `source` to block `destination` for every (source, destination) of `pairs`.

    All sources are read before any destination is written, so a block may be in both roles.

    key_cache, value_cache  [num_blocks, B, Hk, D], any dtype and device
    """
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=key_cache.device).unbind(1)
    for cache in (key_cache, value_cache):
        cache.index_copy_(0, destinations, cache.index_select(0, sources))
