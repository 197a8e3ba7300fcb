"""Sliding-window layers keep a ring of blocks for each request instead of its whole sequence.

With a window of W positions, steps of at most C tokens a row and blocks of B positions, a ring has

    R = ceil((C + W - 1) / B) blocks;     position p lives in block ring[(p // B) mod R], offset p mod B

so that a whole step can be written while every position that its queries see is still there. A ring is taken when its
request is admitted and stays the same for life; only what it holds moves on:

    positions   ... [past - W + 1 ........ past)[past .. past + count)
                     seen by the first query     written by this step; these replace positions before past - W + 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.block_table import blocks_for
from engine_actor.memory.reservation import RowDemand


def ring_blocks(cap: int, window: int, block_size: int) -> int:
    """R, for steps of at most `cap` tokens a row (F224)."""
    return blocks_for(cap + window - 1, block_size)


class Ring:
    """`written`: positions below it were written at some time, also by steps that were rolled back."""

    __slots__ = ("blocks", "written")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.written = 0


class WindowRings:
    """The rings of all residents. `cap`: most tokens of one row in one step."""

    def __init__(self, pool: BlockPool, window: int, cap: int, block_size: int) -> None:
        self.pool = pool
        self.cap = cap
        self.ring_size = ring_blocks(cap, window, block_size)
        self._window = window
        self._positions = self.ring_size * block_size
        self._rings: dict[int, Ring] = {}
        self._live: WindowReservation | None = None

    @property
    def available(self) -> int:
        """Requests that could still get a ring."""
        return self.pool.free_count // self.ring_size

    def owners(self) -> set[int]:
        return set(self._rings)

    def blocks(self, request_id: int) -> list[int]:
        """Block of position p: blocks[(p // B) mod R]."""
        return self._rings[request_id].blocks

    # -- a step -------------------------------------------------------------------------------------------------------

    def reserve(self, demands: Sequence[RowDemand]) -> WindowReservation:
        """A ring for each new row, or OutOfBlocks and no change. Raises ContractViolation for a row of more tokens than
        the rings were made for: it would overwrite what its own queries see (F228)."""
        if self._live is not None:
            raise ContractViolation("a second reservation of rings while one is live")
        for demand in demands:
            if demand.target - demand.num_computed_tokens > self.cap:
                raise ContractViolation(
                    f"request {demand.request_id}: {demand.target - demand.num_computed_tokens} tokens in a step, "
                    f"its ring is for {self.cap}"
                )
            if demand.new is not (demand.request_id not in self._rings) or (demand.new and demand.num_computed_tokens):
                raise ContractViolation(f"request {demand.request_id} and its ring disagree about what was computed")
        new = [demand for demand in demands if demand.new]
        size = self.ring_size
        blocks = self.pool.allocate(size * len(new))
        for i, demand in enumerate(new):
            self._rings[demand.request_id] = Ring(blocks[i * size : (i + 1) * size])
        for demand in demands:
            ring = self._rings[demand.request_id]
            ring.written = max(ring.written, demand.target)
        self._live = WindowReservation(self, [demand.request_id for demand in new])
        return self._live

    def is_live(self, reservation: WindowReservation) -> bool:
        return self._live is reservation

    def end_reservation(self, reservation: WindowReservation) -> None:
        assert self._live is reservation
        self._live = None

    def drop(self, request_id: int) -> None:
        """Gives a ring back, last block first."""
        self.pool.free(self._rings.pop(request_id).blocks[::-1])

    # -- between steps ------------------------------------------------------------------------------------------------

    def owns(self, request_id: int) -> bool:
        return request_id in self._rings

    def remove(self, request_id: int) -> None:
        assert self._live is None
        self.drop(request_id)

    def holds(self, request_id: int, length: int) -> bool:
        """Whether all positions that a query at `length` sees are still in the ring."""
        return self.keeps(request_id, max(0, length - self._window + 1))

    def keeps(self, request_id: int, position: int) -> bool:
        """Whether no later position has taken this one's place."""
        ring = self._rings.get(request_id)
        return ring is not None and position + self._positions >= ring.written

    def check_integrity(self) -> None:
        """Every ring has R blocks of its own. Linear."""
        for request_id, ring in self._rings.items():
            if len(ring.blocks) != self.ring_size:
                raise ContractViolation(
                    f"request {request_id}: a ring of {len(ring.blocks)} blocks instead of {self.ring_size}"
                )
            if len(set(ring.blocks)) != len(ring.blocks):
                raise ContractViolation(f"request {request_id}: a block is twice in its ring {ring.blocks}")
        self.pool.check_integrity(self._holders())

    def _holders(self) -> Iterator[tuple[int, int]]:
        return ((block, 1) for ring in self._rings.values() for block in ring.blocks)


class WindowReservation:
    """Made by WindowRings.reserve; `new`: requests that got a ring in this step."""

    def __init__(self, rings: WindowRings, new: list[int]) -> None:
        self._rings = rings
        self._new = new
        self._generation = rings.pool.generation

    def validate(self, committed: Sequence[int]) -> None:
        """Proves that `commit` will succeed; every boundary suits a ring."""
        if not self._rings.is_live(self) or self._rings.pool.generation != self._generation:
            raise ContractViolation("the window pool changed while a step held a reservation")

    def commit(self) -> None:
        self._rings.end_reservation(self)

    def release(self) -> None:
        """New rings go back, and what the step wrote into others is overwritten by the next one. Does nothing the
        second time."""
        if not self._rings.is_live(self):
            return
        self._rings.end_reservation(self)
        for request_id in reversed(self._new):
            self._rings.drop(request_id)

    def abandon(self) -> None:
        """Nothing more is undone: removing a request gives its ring back (F176)."""
        if self._rings.is_live(self):
            self._rings.end_reservation(self)
