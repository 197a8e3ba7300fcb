"""Storage that a caller lends to `Engine.run`, and the events that it lends back (F061, F062)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from engine_actor.errors import InvalidCall, StaleView
from engine_actor.requests.events import EngineEvent


class EventView:
    """A borrowed event of an EventBuffer: readable until the buffer is used again (F062)."""

    __slots__ = ("_buffer", "_event", "_generation")

    def __init__(self, buffer: EventBuffer, event: EngineEvent) -> None:
        self._buffer = buffer
        self._event = event
        self._generation = buffer.generation

    def __getattr__(self, name: str) -> Any:
        if self._generation != self._buffer.generation:
            raise StaleView(f"event.{name} was read after a later run reused its buffer")
        return getattr(self._event, name)


class EventBuffer:
    """Storage for at most `capacity` events of one engine, refilled by each `engine.run(buffer)` (F061)."""

    def __init__(self, engine: object, capacity: int) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0:
            raise InvalidCall(f"an event buffer's capacity must be an integer >= 0, not {capacity!r}")
        self._engine = weakref.ref(engine)
        self._capacity = capacity
        self.generation = 0
        self._events: list[EngineEvent] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[EventView]:
        return (EventView(self, event) for event in self._events)

    def __getitem__(self, index: int) -> EventView:
        return EventView(self, self._events[index])

    def check_bound_to(self, engine: object) -> None:
        if self._engine() is not engine:
            raise InvalidCall("this event buffer belongs to another engine, or to one that is gone")

    def refill(self, events: Sequence[EngineEvent]) -> None:
        self._events = list(events)

    def invalidate(self) -> None:
        """Every view borrowed so far becomes unreadable."""
        self.generation += 1
        self._events = []
