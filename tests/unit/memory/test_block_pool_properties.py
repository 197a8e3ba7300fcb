"""BlockPool against a dictionary: random owners, pins and index holds, both orders."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_actor.errors import ContractViolation, OutOfBlocks
from engine_actor.memory.block_pool import BlockPool, Capacity

block_ids = st.integers(-1, 9)


class PoolMachine(RuleBasedStateMachine):
    @initialize(usable=st.integers(1, 7), first=st.integers(0, 2), order=st.sampled_from(["fifo", "lowest"]))
    def build(self, usable: int, first: int, order: str) -> None:
        self.pool = BlockPool(usable + first, first, order)
        self.ids = range(first, first + usable)
        self.owners = dict.fromkeys(self.ids, 0)
        self.indexed: set[int] = set()
        self.free = list(self.ids)
        self.idle: list[int] = []

    def give_back(self, block: int) -> None:
        self.free.append(block)
        if self.pool.order == "lowest":
            self.free.sort()

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        assert self.pool.allocate(count) == self.free[:count]
        for block in self.free[:count]:
            self.owners[block] = 1
        del self.free[:count]

    @rule(block=block_ids)
    def pin(self, block: int) -> None:
        if block not in self.ids or (not self.owners[block] and block not in self.indexed):
            with pytest.raises(ContractViolation):
                self.pool.pin(block)
            return
        self.pool.pin(block)
        self.owners[block] += 1
        if block in self.idle:
            self.idle.remove(block)

    @rule(blocks=st.lists(block_ids, max_size=4))
    def release(self, blocks: list[int]) -> None:
        if len(set(blocks)) < len(blocks) or any(self.owners.get(b, 0) < 1 for b in blocks):
            with pytest.raises(ContractViolation):
                self.pool.free(blocks)
            return
        self.pool.free(blocks)
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                if block in self.indexed:
                    self.idle.append(block)
                else:
                    self.give_back(block)

    @rule(block=block_ids)
    def hold_for_index(self, block: int) -> None:
        if self.owners.get(block, 0) and block not in self.indexed:
            self.pool.hold_for_index(block)
            self.indexed.add(block)

    @rule(block=block_ids)
    def drop_from_index(self, block: int) -> None:
        if block in self.indexed:
            self.pool.drop_from_index(block)
            self.indexed.remove(block)
            if block in self.idle:
                self.idle.remove(block)
                self.give_back(block)

    @rule()
    def reset(self) -> None:
        if len(self.free) < len(self.ids):
            with pytest.raises(ContractViolation, match="in use when reset"):
                self.pool.reset()
            return
        self.pool.reset()
        self.free = list(self.ids)

    @invariant()
    def equals_the_model(self) -> None:
        pool = self.pool
        assert pool.free_ids() == self.free
        assert pool.oldest_idle() == (self.idle[0] if self.idle else None)
        assert (pool.free_count, pool.idle_count) == (len(self.free), len(self.idle))
        assert pool.available == len(self.free) + len(self.idle) and pool.usable == len(self.ids)
        for block in self.ids:
            assert pool.owner_count(block) == self.owners[block] + (block in self.indexed)
            assert pool.is_indexed(block) == (block in self.indexed)
            assert pool.is_idle(block) == (block in self.idle)
        for count in range(10):
            later = Capacity.OK if count <= pool.available else Capacity.LATER
            assert pool.can_allocate(count) is (Capacity.NEVER if count > len(self.ids) else later)
        pool.check_integrity(self.owners.items())


TestBlockPool = PoolMachine.TestCase
