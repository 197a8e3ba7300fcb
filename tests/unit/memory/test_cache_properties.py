"""Tables, reservations, forks, rewinds and prefix reuse together, against a dictionary of token sequences.

The memory is an array of token ids, written and copied exactly as a decoder would. Whatever happens, reading a
request's valid positions through its table gives its tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_actor.errors import ContractViolation, OutOfBlocks
from engine_actor.memory.block_table import blocks_for
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.reservation import RowDemand
from engine_actor.memory.step_reservation import StepReservation
from tests.support.engine_room import row_of

POISON = -7
tokens_lists = st.lists(st.integers(0, 1), min_size=1, max_size=7)


class CacheMachine(RuleBasedStateMachine):
    """`tokens`: request -> its whole sequence; `valid`: resident request -> how many positions must be readable."""

    @initialize(
        size=st.integers(1, 4),
        blocks=st.integers(1, 12),
        order=st.sampled_from(["fifo", "lowest"]),
        reuse=st.booleans(),
    )
    def build(self, size: int, blocks: int, order: str, reuse: bool) -> None:
        self.size = size
        self.cache = CacheManager(blocks, size, 100, block_order=order, prefix_reuse=reuse)
        self.memory = np.full((blocks + 1, size), POISON)
        self.tokens: dict[int, list[int]] = {}
        self.valid: dict[int, int] = {}
        self.next_id = 1
        self.live: tuple[StepReservation, list[RowDemand]] | None = None

    def salt(self, request: int) -> bytes:
        return b"odd" if request % 2 else b""

    # -- between steps ------------------------------------------------------------------------------------------------

    @rule(tokens=tokens_lists)
    def create(self, tokens: list[int]) -> None:
        self.tokens[self.next_id] = tokens
        self.next_id += 1

    @precondition(lambda self: self.tokens and self.live is None)
    @rule(data=st.data(), more=tokens_lists)
    def append(self, data: st.DataObject, more: list[int]) -> None:
        self.tokens[data.draw(st.sampled_from(sorted(self.tokens)))] += more

    @precondition(lambda self: self.valid and self.live is None)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.valid)))
        self.cache.remove(request)
        del self.valid[request], self.tokens[request]

    @precondition(lambda self: self.valid and self.live is None)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.valid)))
        self.cache.remove(request)
        del self.valid[request]

    @precondition(lambda self: self.valid and self.live is None)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.valid)))
        length = data.draw(st.integers(1, len(self.tokens[request])))
        kept = self.cache.truncate(request, length)
        wanted = min(length, self.valid[request])
        assert wanted - self.size < kept <= wanted and (kept == wanted or kept % self.size == 0)
        self.valid[request] = kept
        del self.tokens[request][length:]
        table = self.cache.table(request)
        assert table is not None and len(table.blocks) == blocks_for(kept, self.size)

    @precondition(lambda self: any(self.valid.values()) and self.live is None)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([r for r, n in sorted(self.valid.items()) if n]))
        positions = data.draw(st.integers(1, self.valid[parent]))
        child = self.next_id + (parent - self.next_id) % 2  # of the same tenant
        self.next_id = child + 1
        kept = self.cache.fork(parent, child, positions)
        assert positions - self.size < kept <= positions and (kept == positions or kept % self.size == 0)
        self.tokens[child] = list(self.tokens[parent])
        self.valid[child] = kept

    # -- a step -------------------------------------------------------------------------------------------------------

    def draw_demand(self, data: st.DataObject, request: int) -> RowDemand:
        tokens, whole = self.tokens[request], len(self.tokens[request])
        new = request not in self.valid
        adopted = self.cache.match(self.salt(request), tokens).blocks if new else ()
        committed = len(adopted) * self.size if new else self.valid[request]
        target = data.draw(st.integers(committed, max(committed, whole)))
        return row_of(request, new, committed, target, whole, adopted)

    @precondition(lambda self: self.tokens and self.live is None)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1, max_size=4))
        demands = [self.draw_demand(data, request) for request in requests]
        idle = sum(self.cache.pool.is_idle(block) for demand in demands for block in demand.adopted)
        fits = idle + sum(self.cache.paged.blocks_to_add(demand) for demand in demands) <= self.cache.available
        before = {r: list(self.cache.table(r).blocks) for r in self.valid}  # type: ignore[union-attr]
        try:
            reservation = self.cache.reserve(demands)
        except OutOfBlocks:
            assert not fits  # the planner's sum never promises too much
            assert {r: self.cache.table(r).blocks for r in self.valid} == before  # type: ignore[union-attr]
            return
        self.live = reservation, demands
        for row in reservation.rows:
            assert len(row.table.blocks) >= blocks_for(row.demand.length, self.size)

    @precondition(lambda self: self.live is not None)
    @rule()
    def refuse_changes(self) -> None:
        for request in self.valid:
            with pytest.raises(ContractViolation):
                self.cache.remove(request)
        with pytest.raises(ContractViolation, match="second reservation"):
            self.cache.reserve([])

    def execute(self) -> None:
        """What the decoder does: copies, then writes."""
        assert self.live is not None
        reservation, demands = self.live
        for source, destination in reservation.copies:
            self.memory[destination] = self.memory[source]
        for row, demand in zip(reservation.rows, demands, strict=True):
            for position in range(demand.num_computed_tokens, demand.target):
                block = row.table.blocks[position // self.size]
                assert self.cache.pool.owner_count(block) == 1, "a block with another owner was written to (C03)"
                self.memory[block, position % self.size] = self.tokens[demand.request_id][position]

    @precondition(lambda self: self.live is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.live is not None
        self.execute()
        reservation, demands = self.live
        boundaries = [data.draw(st.integers(d.num_computed_tokens, d.target)) for d in demands]
        reservation.validate(boundaries)
        reservation.commit(boundaries)
        self.live = None
        for demand, boundary in zip(demands, boundaries, strict=True):
            self.valid[demand.request_id] = boundary
            self.cache.index_full_blocks(
                demand.request_id,
                self.salt(demand.request_id),
                self.tokens[demand.request_id],
                demand.num_computed_tokens,
            )

    @precondition(lambda self: self.live is not None)
    @rule()
    def roll_back(self) -> None:
        assert self.live is not None
        self.execute()
        self.live[0].release()
        self.live = None
        for block in self.cache.pool.free_ids():
            self.memory[block] = POISON

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        self.cache.check_integrity()
        assert set(self.cache.paged.residents()) == set(self.valid)
        assert self.cache.resident_count == len(self.valid)
        pool = self.cache.pool
        for request, count in self.valid.items():
            table: Any = self.cache.table(request)
            assert table.num_computed_tokens == count
            if self.live is None:
                read = [int(self.memory[divmod(table.slot(p), self.size)]) for p in range(count)]
                assert read == self.tokens[request][:count]
                if count % self.size:  # what is still written to is not indexed
                    assert not pool.is_indexed(table.blocks[count // self.size])

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        if self.live is not None:
            self.live[0].release()
        for request in self.valid:
            self.cache.remove(request)
        self.cache.check_integrity()
        assert self.cache.available == self.cache.pool.usable


TestCache = CacheMachine.TestCase
