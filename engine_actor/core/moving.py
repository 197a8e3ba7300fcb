"""A request's cache on its way from one engine to another.

    old engine   read      the blocks of its valid positions, as plain data
    new engine   restore   a dormant request that owns them, as if it had been computed there

A restored cache takes the way of a step: reserve, write, commit, offer full blocks to the prefix index. It is a favour
to one conversation, so no other gives way for it: it takes blocks that nobody holds, idle ones of the index among them,
oldest first, and leaves those that turns are about to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from engine_actor.core.lifecycle import Lifecycle
from engine_actor.decoding.decoder import Decoder
from engine_actor.memory.block_table import blocks_for
from engine_actor.memory.kv_blocks import KvBlocks
from engine_actor.memory.reservation import RowDemand
from engine_actor.options import RequestOptions
from engine_actor.requests.record import RequestRecord, RequestStatus
from engine_actor.requests.request import Request


class Mover:
    """Of one engine; called on its owner thread, between steps."""

    def __init__(self, decoder: Decoder, lifecycle: Lifecycle) -> None:
        self._decoder = decoder
        self._lifecycle = lifecycle
        self._cache = lifecycle.cache
        self._fingerprint = f"{decoder.manifest.cache_identity}, blocks of {self._cache.block_size}"

    def read(self, record: RequestRecord, most_bytes: int) -> KvBlocks | None:
        """None if nothing is cached, if the blocks hold more than `most_bytes`, or where blocks cannot move."""
        self._lifecycle.check_call()
        manifest, size = self._decoder.manifest, self._cache.block_size
        table = self._cache.table(record.id)
        dormant = record.status is RequestStatus.IDLE and record.num_computed_tokens > 0
        if table is None or not dormant or not manifest.blocks_can_move or self._lifecycle.fatal is not None:
            return None
        blocks = table.blocks[: blocks_for(record.num_computed_tokens, size)]
        if len(blocks) * manifest.paged.block_bytes(size) > most_bytes:
            return None
        return KvBlocks(self._fingerprint, record.num_computed_tokens, self._decoder.read_blocks(blocks))

    def restore(self, tokens: Sequence[int], kv: KvBlocks, options: RequestOptions) -> Request | None:
        """None where the cache is of another kind, or where there is no room for it now."""
        self._lifecycle.check_call()
        usable = self._decoder.manifest.blocks_can_move and kv.fingerprint == self._fingerprint
        if not usable or self._lifecycle.fatal is not None or len(tokens) > self._lifecycle.max_length:
            return None
        size, positions = self._cache.block_size, kv.positions
        assert 0 < positions <= len(tokens) and kv.content.shape[1] == blocks_for(positions, size)
        # One token more, since a match leaves one to compute: so it may reach up to the last full block.
        adopted = self._cache.match(options.salt, tokens[: positions + 1]).blocks
        if not self._has_room(positions, adopted):
            return None
        request = self._lifecycle.create(options)
        record = request._record
        with ExitStack() as undo:
            undo.callback(request.close)
            demand = RowDemand(
                request_id=record.id,
                new=True,
                num_computed_tokens=len(adopted) * size,
                target=positions,
                length=positions,
                adopted=adopted,
            )
            reservation = self._cache.reserve([demand])
            undo.callback(reservation.release)
            own = reservation.rows[0].table.blocks[len(adopted) :]
            if own:
                self._decoder.write_blocks(own, kv.content[:, len(adopted) :])
            reservation.commit([positions])
            undo.pop_all()
        record.history.extend(tokens)
        record.num_computed_tokens = positions
        self._lifecycle.requests.settle(record)
        record.status = RequestStatus.IDLE
        self._cache.index_full_blocks(record.id, options.salt, record.history.ids, len(adopted) * size)
        return request

    def _has_room(self, positions: int, adopted: Sequence[int]) -> bool:
        cache, requests = self._cache, self._lifecycle.requests
        if cache.resident_count + len(requests.queue) >= cache.max_residents:
            return False
        # The next step gives a block to each turn that runs and its prompt's to each one that waits, at most.
        running = requests.running_count
        waiting = sum(blocks_for(record.history.length, cache.block_size) for record in requests.queue.values())
        return cache.available - cache.cost_of_new(positions, adopted) >= running + waiting
