"""Recurrent and convolutional states: one slot of a second `BlockPool` holds what a model remembers of a sequence.

A step reads a row's state from its committed slot and writes it to another one, taken by the reservation:

    before      slot = s       reserved = 0        (s = 0: no state yet, the model starts from zeros)
    reserve     slot = s       reserved = w        the model reads s and writes w
    commit      slot = w       reserved = 0        s goes back
    release     slot = s       reserved = 0        w goes back

So a rolled-back step never finds a destroyed state, and a forked request simply shares the slot until its own first
step: nothing is copied, and nobody writes into a slot that somebody reads (F347).

A state exists at one position only. Whoever needs it at another one computes the sequence again from its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.reservation import RowDemand


class StateTable:
    """One request's slots; `num_computed_tokens`: tokens that the state in `slot` has seen."""

    __slots__ = ("num_computed_tokens", "reserved", "slot")

    def __init__(self) -> None:
        self.slot = 0
        self.reserved = 0
        self.num_computed_tokens = 0


class FixedStates:
    """Slots are ids of `pool`, whose first is 1."""

    def __init__(self, pool: BlockPool) -> None:
        assert pool.first_id == 1
        self.pool = pool
        self._tables: dict[int, StateTable] = {}
        self._live: StateReservation | None = None

    @property
    def available(self) -> int:
        return self.pool.free_count

    def table(self, request_id: int) -> StateTable | None:
        return self._tables.get(request_id)

    def owners(self) -> dict[int, int]:
        """Requests with the position of their committed state."""
        return {request_id: table.num_computed_tokens for request_id, table in self._tables.items() if table.slot}

    # -- a step -------------------------------------------------------------------------------------------------------

    def reserve(self, demands: Sequence[RowDemand]) -> StateReservation:
        """One slot to write to for each row, or OutOfBlocks and no change. Raises ContractViolation where a row does
        not start where its state is."""
        if self._live is not None:
            raise ContractViolation("a second reservation of states while one is live")
        for demand in demands:
            table = self._tables.get(demand.request_id)
            at = 0 if table is None else table.num_computed_tokens
            if demand.num_computed_tokens != at or demand.new is not (table is None):
                raise ContractViolation(
                    f"request {demand.request_id} starts at {demand.num_computed_tokens}, its state is at {at}"
                )
        slots = self.pool.allocate(len(demands))
        tables = []
        for demand, slot in zip(demands, slots, strict=True):
            table = self._tables.setdefault(demand.request_id, StateTable())
            table.reserved = slot
            tables.append(table)
        self._live = StateReservation(self, demands, tables)
        return self._live

    def end_reservation(self, reservation: StateReservation) -> None:
        assert self._live is reservation
        self._live = None

    def is_live(self, reservation: StateReservation) -> bool:
        return self._live is reservation

    def drop_provisional(self, request_id: int) -> None:
        del self._tables[request_id]

    # -- between steps ------------------------------------------------------------------------------------------------

    def owns(self, request_id: int) -> bool:
        return request_id in self._tables

    def remove(self, request_id: int) -> None:
        """Releases a request's slots; a shared one survives with its other owners (F342)."""
        assert self._live is None
        table = self._tables.pop(request_id)
        self.pool.free([slot for slot in (table.slot, table.reserved) if slot])

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child owns the parent's slot too (F343); its first step reads it and writes elsewhere."""
        assert self._live is None and child_id not in self._tables
        parent, child = self._tables[parent_id], StateTable()
        self.pool.pin(parent.slot)
        child.slot, child.num_computed_tokens = parent.slot, parent.num_computed_tokens
        self._tables[child_id] = child

    def check_integrity(self) -> None:
        """Every slot's owner count is what the tables add up to. Linear."""
        for request_id, table in self._tables.items():
            if self._live is None and (table.reserved or not table.slot):
                raise ContractViolation(f"request {request_id} has slots {table.slot}, {table.reserved} between steps")
        self.pool.check_integrity(self._holders())

    def _holders(self) -> Iterator[tuple[int, int]]:
        for table in self._tables.values():
            for slot in (table.slot, table.reserved):
                if slot:
                    yield slot, 1


class StateReservation:
    """Made by FixedStates.reserve; ends together with the blocks of the same step."""

    def __init__(self, states: FixedStates, demands: Sequence[RowDemand], tables: list[StateTable]) -> None:
        self._states = states
        self._demands = demands
        self._tables = tables
        self._generation = states.pool.generation

    @property
    def slots(self) -> list[tuple[int, int]]:
        """(slot to read, or 0 to start from zeros; slot to write) of each row, in the order of the plan."""
        return [(table.slot, table.reserved) for table in self._tables]

    def validate(self, committed: Sequence[int]) -> None:
        """Proves that `commit(committed)` will succeed: no slot changed hands, and every row ends where its state is
        after the step (F221)."""
        if not self._states.is_live(self) or self._states.pool.generation != self._generation:
            raise ContractViolation("the state pool changed while a step held a reservation")
        for demand, boundary in zip(self._demands, committed, strict=True):
            if boundary != demand.target:
                raise ContractViolation(
                    f"request {demand.request_id}: a state at {demand.target} cannot be committed at {boundary}"
                )

    def commit(self) -> None:
        """After `validate`: the new slots are the states, the old ones go back."""
        for demand, table in zip(self._demands, self._tables, strict=True):
            old, table.slot, table.reserved = table.slot, table.reserved, 0
            table.num_computed_tokens = demand.target
            if old:
                self._states.pool.free([old])
        self._states.end_reservation(self)

    def release(self) -> None:
        """The new slots go back; the states are where they were. Does nothing the second time."""
        if not self._states.is_live(self):
            return
        for demand, table in zip(reversed(self._demands), reversed(self._tables), strict=True):
            slot, table.reserved = table.reserved, 0
            if not table.slot:
                self._states.drop_provisional(demand.request_id)
            self._states.pool.free([slot])
        self._states.end_reservation(self)

    def abandon(self) -> None:
        """Nothing more is undone: removing a request gives back all slots that it holds (F176)."""
        if self._states.is_live(self):
            self._states.end_reservation(self)
