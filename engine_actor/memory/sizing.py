"""How many blocks fit into the memory that is free at start.

    share s of free bytes   floor(floor(free * 0.9 * s) - reserved) / block_bytes)            (F008)
    bytes                   floor((bytes - reserved) / block_bytes)

Reserved is what comes first: state slots (F336) and sliding-window rings. The tenth that a share leaves is for what the
runtime allocates beside the pools.
"""

from __future__ import annotations

import math

from engine_actor.errors import InvalidOption

SHARE_KEPT_FREE = 0.9


def state_slots_for(max_residents: int, max_batch_size: int) -> int:
    """Usable state slots. Each resident keeps one and each row of a step writes to one more, so a step never lacks
    one. A design that clones a state only when it forks gets on with a fifth more than its sequences, floor(1.2 * n)
    (F335); that is the least that any pool gets here."""
    return max(max_residents + max_batch_size, max_batch_size * 12 // 10)


def blocks_in_share(free_bytes: int, share: float, block_bytes: int, reserved_bytes: int = 0) -> int:
    """Usable blocks in a share of the free memory, after `reserved_bytes` for states and sliding-window rings.

    Raises InvalidOption for a share outside (0, 1] and where nothing is left (F004, F009).
    """
    if not 0.0 < share <= 1.0:
        raise InvalidOption("kv_memory", share, "a share in (0, 1] or a number of bytes")
    return blocks_in_bytes(math.floor(free_bytes * SHARE_KEPT_FREE * share), block_bytes, reserved_bytes)


def blocks_in_bytes(budget: int, block_bytes: int, reserved_bytes: int = 0) -> int:
    blocks = (budget - reserved_bytes) // block_bytes
    if blocks < 1:
        raise InvalidOption("kv_memory", budget, f"at least {reserved_bytes + block_bytes} bytes, which is one block")
    return blocks


def blocks_in_memory(kv_memory: float, free_bytes: int, block_bytes: int, reserved_bytes: int = 0) -> int:
    """kv_memory: a share of `free_bytes` if <= 1, else bytes."""
    if kv_memory <= 1.0:
        return blocks_in_share(free_bytes, kv_memory, block_bytes, reserved_bytes)
    if kv_memory > free_bytes:
        raise InvalidOption("kv_memory", int(kv_memory), f"at most the {free_bytes} bytes that are free")
    return blocks_in_bytes(int(kv_memory), block_bytes, reserved_bytes)
