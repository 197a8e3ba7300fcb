"""The only way a table grows: reserve -> validate -> commit, or release.

One reservation covers a whole step (F138). It takes every new block up front; until `commit` nobody else can see them,
and `release` gives all of them back. Of one row:

    table before     [ shared or own, full ][ tail ]
    reserve          [ adopted or own      ][ tail or its private copy ][ new blocks ... ]
    commit(n)        positions [0, n) valid; blocks beyond what n and the whole sequence need go back
    release          exactly the table before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.block_table import BlockTable, blocks_for


class ReservedCache(Protocol):
    """What a reservation asks of the `PagedCache` that made it."""

    pool: BlockPool

    @property
    def changes(self) -> int: ...
    def is_live(self, reservation: Reservation) -> bool: ...
    def end_reservation(self, reservation: Reservation) -> None: ...
    def drop_provisional(self, request_id: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class RowDemand:
    """What one row of a step needs. Not frozen only because a frozen one takes three times as long to make.

    num_computed_tokens  positions that are valid before the step (for a new row: those of the adopted blocks)
    target     positions that will be written up to
    length     of the whole sequence; blocks for all of it are taken at its first chunk (C04)
    adopted    full blocks of an equal prefix, shared with the index; for new rows only
    """

    request_id: int
    new: bool
    num_computed_tokens: int
    target: int
    length: int
    adopted: tuple[int, ...] = ()


@dataclass(slots=True)
class RowReservation:
    """One row's part. `copy` is (shared tail, private copy) where the tail, at index `tail` of the table, must be
    written but has other owners; the row keeps its share of the source until the step ends, and `copy` is None then."""

    demand: RowDemand
    table: BlockTable
    blocks_before: int
    tail: int = 0
    copy: tuple[int, int] | None = None


class ReservationState(Enum):
    RESERVED = "reserved"
    COMMITTED = "committed"
    RELEASED = "released"


class Reservation:
    """Made by PagedCache.reserve. Rows are in the order of the plan."""

    def __init__(self, cache: ReservedCache, rows: list[RowReservation]) -> None:
        self._cache = cache
        self.rows = rows
        self.state = ReservationState.RESERVED
        self.copies = tuple(row.copy for row in rows if row.copy)  # (source, destination), before the forward pass
        self._changes_before = cache.changes

    def validate(self, committed: Sequence[int]) -> None:
        """Proves, without changing anything, that `commit(committed)` will succeed: nothing moved since the
        reservation was made, and every boundary lies between what was valid and what was reserved (F145, F148)."""
        if self.state is not ReservationState.RESERVED:
            raise ContractViolation(f"a {self.state.value} reservation cannot be committed")
        if self._cache.changes != self._changes_before:
            raise ContractViolation("the block pool or a table changed while a step held a reservation")
        if len(committed) != len(self.rows):
            raise ContractViolation(f"{len(committed)} boundaries for {len(self.rows)} rows")
        for row, boundary in zip(self.rows, committed, strict=True):
            demand = row.demand
            if not demand.num_computed_tokens <= boundary <= demand.target:
                raise ContractViolation(
                    f"request {demand.request_id}: {boundary} is outside "
                    f"[{demand.num_computed_tokens}, {demand.target}]"
                )

    def commit(self, committed: Sequence[int]) -> None:
        """Publishes the new boundaries. After one last proof only integers are assigned, and blocks that a narrower
        boundary does not need go back to the pool (F147, F154)."""
        self.validate(committed)
        self.state = ReservationState.COMMITTED
        for row, boundary in zip(self.rows, committed, strict=True):
            table = row.table
            if len(table.blocks) > row.blocks_before:
                keep = max(blocks_for(max(boundary, row.demand.length), table.block_size), row.blocks_before)
                if keep < len(table.blocks):
                    surplus = table.blocks[keep:]
                    del table.blocks[keep:]
                    table.epoch += 1
                    self._cache.pool.free(surplus[::-1])
                table.count = len(table.blocks)
            table.num_computed_tokens = boundary
            table.resident = True
            if row.copy:
                self._drop_source(row)  # the forward pass has run, so the copy is complete
        self._cache.end_reservation(self)

    def _drop_source(self, row: RowReservation) -> None:
        assert row.copy is not None
        source, row.copy = row.copy[0], None
        self._cache.pool.free([source])

    def abandon(self) -> None:
        """After a failure inside `commit` or `release`: nothing more is undone. What a row holds stays in its table, so
        that removing the request gives it back (F176); only the share of a copied source, which no table shows, is
        given back at once. Does nothing if the step has ended."""
        if not self._cache.is_live(self):
            return
        self._cache.end_reservation(self)
        for row in self.rows:
            row.table.count = len(row.table.blocks)
            row.table.resident = True
        for row in self.rows:
            if row.copy:
                self._drop_source(row)

    def release(self) -> None:
        """Gives everything back; the tables are what they were. Does nothing the second time (F143, F144)."""
        if self.state is ReservationState.RELEASED:
            return
        if self.state is ReservationState.COMMITTED:
            raise ContractViolation("a committed reservation cannot be released")
        self.state = ReservationState.RELEASED
        pool = self._cache.pool
        for row in reversed(self.rows):
            table = row.table
            blocks = table.blocks[row.blocks_before :]
            if row.demand.new:
                blocks = table.blocks[:]
                table.blocks.clear()
                self._cache.drop_provisional(row.demand.request_id)
            else:
                del table.blocks[row.blocks_before :]
                if row.copy:
                    table.blocks[row.tail], copied = row.copy
                    blocks.insert(0, copied)
                    row.copy = None
            table.epoch += 1
            pool.free(blocks[::-1])
        self._cache.end_reservation(self)
