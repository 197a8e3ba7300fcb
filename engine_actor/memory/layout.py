"""The pools of one engine: what of each kind there is. Worked out once, at start, from the model's manifest, the limits
and the memory that is free then; everything else asks for the numbers here.

    id 0           the null block of each pool, on top of the usable ones (C01)
    state slots    one for each resident, and one more for each row of a step
    rings          one for each resident
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_actor.errors import InvalidOption
from engine_actor.limits import EngineLimits
from engine_actor.manifest import DecoderManifest
from engine_actor.memory.block_table import blocks_for
from engine_actor.memory.sizing import blocks_in_memory, state_slots_for
from engine_actor.memory.window_ring import ring_blocks
from engine_actor.options import require_integer


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The pools a decoder allocates, once. `num_blocks` counts the null block 0 where the engine keeps one;
    `state_slots` counts slot 0, which is never written: it stands for a state of zeros. `window_blocks` are those of
    all rings, with their own null block."""

    num_blocks: int
    block_size: int
    state_slots: int = 0
    window_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """num_blocks     usable KV blocks, of `block_bytes` each
    max_residents  requests that may own memory, running or idle
    max_length     longest sequence of a request
    context        what `max_length` would be in a pool that is large enough
    max_columns    blocks of the longest sequence, where step graphs have tables of one width (F247); or None
    state_slots    usable ones; 0: the model has no state
    ring_blocks    usable blocks of all window rings; 0: the model has none
    window         positions that windowed layers see; query_cap: most tokens of a row in a step beside them
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    max_residents: int
    max_length: int
    context: int
    max_columns: int | None
    state_slots: int
    ring_blocks: int
    window: int
    query_cap: int
    first_block_id: int

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def bytes(self) -> int:
        """Of the paged pool."""
        return self.num_blocks * self.block_bytes

    @property
    def limited_by_pool(self) -> bool:
        return self.tokens < self.context

    @property
    def geometry(self) -> PoolGeometry:
        """What the decoder allocates: null blocks and the slot of zeros included."""
        return PoolGeometry(
            num_blocks=self.num_blocks + self.first_block_id,
            block_size=self.block_size,
            state_slots=self.state_slots + 1 if self.state_slots else 0,
            window_blocks=self.ring_blocks + self.first_block_id if self.ring_blocks else 0,
        )


def plan_pools(
    manifest: DecoderManifest,
    limits: EngineLimits,
    *,
    num_blocks: int,
    max_residents: int | None = None,
    max_length: int | None = None,
) -> PoolLayout:
    """The layout around `num_blocks` usable blocks. max_residents: by default as many as a step has rows; max_length:
    by default what context and pool allow. Raises InvalidOption where limits and manifest do not suit each other."""
    require_integer("num_blocks", num_blocks, 1)
    if max_residents is None:
        max_residents = limits.max_batch_size
    require_integer("max_residents", max_residents, 1)
    if max_length is not None:
        require_integer("max_length", max_length, 1)
        if max_length > manifest.context_length:
            raise InvalidOption("max_length", max_length, f"at most {manifest.context_length}")
    if manifest.state_bytes and manifest.max_draft_tokens:
        raise InvalidOption("max_draft_tokens", manifest.max_draft_tokens, "0: a state has no earlier position")
    windowed, size = manifest.windowed, limits.block_size
    if windowed is not None and not limits.chunk_size:
        raise InvalidOption("chunk_size", 0, "at least 1: window rings are made for steps of this length")
    longest = max_length or min(manifest.context_length, num_blocks * size)
    query_cap = min(limits.chunk_size, longest)
    ring = 0 if windowed is None else ring_blocks(query_cap, windowed.window, size)
    return PoolLayout(
        num_blocks=num_blocks,
        block_size=size,
        block_bytes=manifest.paged.block_bytes(size),
        max_residents=max_residents,
        max_length=longest,
        context=max_length or manifest.context_length,
        max_columns=max(1, min(blocks_for(longest, size), num_blocks)) if limits.graph_capture else None,
        state_slots=state_slots_for(max_residents, limits.max_batch_size) if manifest.state_bytes else 0,
        ring_blocks=ring * max_residents,
        window=0 if windowed is None else windowed.window,
        query_cap=query_cap,
        first_block_id=limits.first_block_id,
    )


def pools_in_memory(
    manifest: DecoderManifest,
    limits: EngineLimits,
    *,
    kv_memory: float,
    free_bytes: int,
    max_sessions: int,
    max_model_len: int | None = None,
) -> PoolLayout:
    """The layout of an engine with room for `max_sessions` idle sessions beside a whole batch. kv_memory: bytes if > 1,
    else a share of `free_bytes`. Never more blocks than that many sequences of full length could use. Raises
    InvalidOption where not one block fits."""
    context = min(manifest.context_length, max_model_len or manifest.context_length)
    residents = max_sessions + limits.max_batch_size
    whole = plan_pools(  # as large as it could be of use
        manifest,
        limits,
        num_blocks=residents * blocks_for(context, limits.block_size),
        max_residents=residents,
        max_length=context,
    )
    reserved = manifest.state_bytes * whole.geometry.state_slots
    if manifest.windowed is not None:
        reserved += manifest.windowed.block_bytes(limits.block_size) * whole.geometry.window_blocks
    num_blocks = min(whole.num_blocks, blocks_in_memory(kv_memory, free_bytes, whole.block_bytes, reserved))
    longest = min(context, num_blocks * limits.block_size)
    layout = plan_pools(manifest, limits, num_blocks=num_blocks, max_residents=residents, max_length=longest)
    return replace(layout, context=context)
