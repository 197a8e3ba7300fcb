"""One pool class for everything that is counted out in equal pieces: paged KV blocks and state slots.

A block is in exactly one of three places:

    free       nobody holds it; `allocate` may issue it
    idle       only the prefix index holds it; its content may be adopted, or the index gives it up when room is needed
    owned      at least one table, reservation or pin holds it

    owner_count(b) = tables + reservations + pins + (1 if the prefix index holds it)            (C03)
    available      = free + idle
    usable         = num_ids - first_id;  ids below first_id are never issued (C01: block 0 is the null block)
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import Enum

from engine_actor.errors import ContractViolation, OutOfBlocks


class Capacity(Enum):
    """Answer to "could k blocks be had?": now, once others give some back, or not even from an empty pool (F327)."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockPool:
    """Ids first_id .. num_ids - 1 with owner counts. Every call is all or nothing.

    order: "fifo" issues the id that has been free for longest; "lowest" the smallest (C02).
    """

    def __init__(self, num_ids: int, first_id: int = 1, order: str = "fifo") -> None:
        if num_ids - first_id < 1:
            raise ValueError(f"a pool of {num_ids} ids whose first is {first_id} has nothing to issue")
        assert order in ("fifo", "lowest")
        self.first_id = first_id
        self.num_ids = num_ids
        self.order = order
        self._owners = [0] * num_ids
        self._indexed = bytearray(num_ids)
        self._free: deque[int] = deque(range(first_id, num_ids))  # ascending, so also a valid heap
        self._heap: list[int] = list(self._free) if order == "lowest" else []
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.generation = 0

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> int:
        return self.num_ids - self.first_id

    @property
    def free_count(self) -> int:
        return len(self._heap) if self.order == "lowest" else len(self._free)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @property
    def available(self) -> int:
        return self.free_count + len(self._idle)

    def free_ids(self) -> list[int]:
        """Free ids in the order in which they would be issued."""
        return sorted(self._heap) if self.order == "lowest" else list(self._free)

    def can_allocate(self, count: int) -> Capacity:
        if count > self.usable:
            return Capacity.NEVER
        return Capacity.OK if count <= self.available else Capacity.LATER

    def owner_count(self, block: int) -> int:
        return self._owners[block] + self._indexed[block]

    def is_indexed(self, block: int) -> bool:
        return bool(self._indexed[block])

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def oldest_idle(self) -> int | None:
        """The idle block that nobody has wanted for longest; of one sequence the tail comes first (F328)."""
        return next(iter(self._idle), None)

    # -- owners ---------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Issues `count` free blocks with one owner each, or raises OutOfBlocks and changes nothing (F129)."""
        if count > self.free_count:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free_count} free of {self.usable}")
        if not count:
            return []
        if self.order == "lowest":
            blocks = [heapq.heappop(self._heap) for _ in range(count)]
        else:
            blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        self.generation += 1
        return blocks

    def pin(self, block: int) -> None:
        """Adds an owner to a block that somebody, or the index, holds (F330)."""
        self._check_range(block)
        if not self._owners[block] and not self._indexed[block]:
            raise ContractViolation(f"try to pin free block {block}")
        self._idle.pop(block, None)
        self._owners[block] += 1
        self.generation += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one owner of each block, in this order; a table is freed tail first, so that tails are evicted first.

        Everything is checked before anything changes: range, null block, an owner to drop, no block twice (F131).
        """
        for block in blocks:
            self._check_range(block)
            if self._owners[block] < 1:
                raise ContractViolation(f"ref_count corrupted: block {block} has no owner to drop")
        if len(set(blocks)) != len(blocks):
            raise ContractViolation(f"a block is listed twice in one free: {list(blocks)}")
        for block in blocks:
            self._owners[block] -= 1
            if not self._owners[block]:
                if self._indexed[block]:
                    self._idle[block] = None
                else:
                    self._push_free(block)
        self.generation += 1

    def hold_for_index(self, block: int) -> None:
        """The prefix index becomes one of the owners of an owned block."""
        assert self._owners[block] and not self._indexed[block], f"block {block} cannot be indexed"
        self._indexed[block] = 1

    def drop_from_index(self, block: int) -> None:
        """The index lets go; an idle block becomes free."""
        assert self._indexed[block], f"block {block} is not indexed"
        self._indexed[block] = 0
        if block in self._idle:
            del self._idle[block]
            self._push_free(block)
        self.generation += 1

    def reset(self) -> None:
        """Back to the state after construction; refused while a block is held (DP-04)."""
        if self.free_count != self.usable:
            raise ContractViolation(f"{self.usable - self.free_count} blocks in use when reset")
        self._free = deque(range(self.first_id, self.num_ids))
        self._heap = list(self._free) if self.order == "lowest" else []
        self.generation += 1

    # -- integrity ------------------------------------------------------------------------------------------------

    def check_integrity(self, expected_owners: Iterable[tuple[int, int]] | None = None) -> None:
        """free + idle + owned == usable, each block in one place; with `expected_owners` (block, count from the live
        tables and reservations), also that each count is exactly what its holders add up to (F133, F181)."""
        free = self.free_ids()
        owned = [b for b in range(self.first_id, self.num_ids) if self._owners[b]]
        if len(free) + len(self._idle) + len(owned) != self.usable or len(set(free)) != len(free):
            raise ContractViolation(
                f"{len(free)} free + {len(self._idle)} idle + {len(owned)} owned != {self.usable} blocks"
            )
        for block in free:
            if self._owners[block] or self._indexed[block]:
                raise ContractViolation(f"free block {block} has an owner")
        for block in self._idle:
            if self._owners[block] or not self._indexed[block]:
                raise ContractViolation(f"idle block {block} is not held by the index alone")
        if expected_owners is not None:
            counts = [0] * self.num_ids
            for block, count in expected_owners:
                self._check_range(block)
                counts[block] += count
            wrong = [b for b in range(self.num_ids) if counts[b] != self._owners[b]]
            if wrong:
                b = wrong[0]
                raise ContractViolation(f"block {b} has {self._owners[b]} owners, its holders say {counts[b]}")

    def _check_range(self, block: int) -> None:
        if not self.first_id <= block < self.num_ids:
            raise ContractViolation(f"block {block} is outside [{self.first_id}, {self.num_ids})")

    def _push_free(self, block: int) -> None:
        if self.order == "lowest":
            heapq.heappush(self._heap, block)
        else:
            self._free.append(block)
