"""The memory of one step over all kinds: blocks and, where the model has them, state slots and rings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from engine_actor.memory.fixed_state import StateReservation
from engine_actor.memory.reservation import Reservation, RowReservation
from engine_actor.memory.window_ring import WindowReservation


class StepReservation:
    """Made by CacheManager.reserve. Rows are in the order of the plan."""

    def __init__(self, paged: Reservation, states: StateReservation | None, windows: WindowReservation | None) -> None:
        self._paged = paged
        self._states = states
        self._others = [part for part in (states, windows) if part is not None]

    @property
    def rows(self) -> list[RowReservation]:
        return self._paged.rows

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) blocks to copy before the forward pass."""
        return self._paged.copies

    @property
    def state_slots(self) -> list[tuple[int, int]] | None:
        """(slot to read, slot to write) of each row; None where the model has no state."""
        return None if self._states is None else self._states.slots

    def validate(self, committed: Sequence[int]) -> None:
        """Proves that `commit(committed)` will succeed in every kind of memory; changes nothing."""
        self._paged.validate(committed)
        for part in self._others:
            part.validate(committed)

    def commit(self, committed: Sequence[int]) -> None:
        """Publishes every kind at the same boundary (F221), after one last proof of all of them: the blocks' own is
        part of their commit, which comes first."""
        for part in self._others:
            part.validate(committed)
        self._paged.commit(committed)
        for part in self._others:
            part.commit()

    def release(self) -> None:
        """Gives everything back; every kind is tried even if another fails."""
        with ExitStack() as stack:
            for part in (self._paged, *self._others):
                stack.callback(part.release)

    def abandon(self) -> None:
        """As Reservation.abandon, for every kind."""
        self._paged.abandon()
        for part in self._others:
            part.abandon()
