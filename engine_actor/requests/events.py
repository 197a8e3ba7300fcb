"""What the engine tells its caller: one event a request and step, flags saying what it carries.

A step prepares its events before it publishes anything, so that publishing them is one assignment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

from engine_actor.requests.outcomes import StepOutcome
from engine_actor.requests.record import FinishReason, RequestRecord, Usage
from engine_actor.requests.request import Request
from engine_actor.sampling.logprobs import TokenLogprob


class EventFlags(IntFlag):
    TOKEN = 1
    TURN_FINISHED = 2
    RETRYABLE = 4
    CAPACITY_BLOCKED = 8
    FAILED = 16


class ErrorCode:
    """`EngineEvent.error_code`: 0 where nothing is wrong."""

    NONE = 0
    DEFERRED = 1  # all work waits for memory that others hold (C08)
    EXECUTION_MEMORY = 2  # the step ran out of memory and was rolled back
    RETRYABLE = 3
    UNSERVICEABLE = 4  # this request can never fit
    FATAL = 5
    NOT_FINITE = 6  # the model gave no usable number for this row
    GRAMMAR = 7  # the grammar of this row failed, or allows nothing that the model can say


@dataclass(slots=True)
class EngineEvent:
    """token, and logprob if the turn wants it, with TOKEN; finish_reason and usage with TURN_FINISHED; error_code and
    message where something is wrong. Events about the engine itself have no record, and neither TOKEN nor TURN_FINISHED
    (F083)."""

    flags: EventFlags
    record: RequestRecord | None = None
    turn_id: int = 0
    token: int | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error_code: int = ErrorCode.NONE
    message: str = ""
    outcome: StepOutcome | None = None
    logprob: TokenLogprob | None = None

    @property
    def request_id(self) -> int | None:
        return None if self.record is None else self.record.id

    @property
    def request(self) -> Request | None:
        """The caller's own handle, if he still holds one (F071)."""
        handle = self.record.handle if self.record is not None else None
        request = handle() if handle is not None else None
        assert request is None or isinstance(request, Request)
        return request


class EventQueue:
    """Committed events that wait to be drained, oldest first. `record.pending_events` counts a request's own."""

    def __init__(self) -> None:
        self._events: deque[EngineEvent] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def stage(self, events: Sequence[EngineEvent]) -> deque[EngineEvent]:
        """The queue as it will be after `events`, so that publishing them is one assignment."""
        return deque([*self._events, *events])

    def publish(self, staged: deque[EngineEvent], events: Sequence[EngineEvent]) -> None:
        self._events = staged
        for event in events:
            if event.record is not None:
                event.record.pending_events += 1

    def append(self, event: EngineEvent) -> None:
        self._events.append(event)
        if event.record is not None:
            event.record.pending_events += 1

    def drain(self, capacity: int) -> list[EngineEvent]:
        drained = [self._events.popleft() for _ in range(min(capacity, len(self._events)))]
        for event in drained:
            if event.record is not None:
                event.record.pending_events -= 1
        return drained

    def purge(self, record: RequestRecord) -> None:
        """Forgets the events of a closed request (F074)."""
        if record.pending_events:
            self._events = deque(event for event in self._events if event.record is not record)
            record.pending_events = 0
