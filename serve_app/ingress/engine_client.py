"""The seam between HTTP and engines: the same ASGI app runs beside an engine or in front of many.

`stream_turn` has a local and a handle form; everything else reaches all replicas.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from engine_actor.messages import DeleteOutcome, ForkOutcome, SessionInfo, TurnDelta, TurnRequest


@dataclass(frozen=True, slots=True)
class ResidentSessions:
    """Each session once, wherever copies of it are. `unanswered`: replicas that may hold more, and have not answered
    in time."""

    sessions: tuple[SessionInfo, ...]
    unanswered: int = 0


class EngineClient(Protocol):
    def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncIterator[TurnDelta]:
        """The deltas of one turn. `routing_key` finds the home of a conversation (session, or a hint for an
        anonymous one); closing the iterator (aclose) is the only way to cancel. A replica that refuses with
        QUEUE_FULL or UNAVAILABLE, or that is lost, is replaced by another one, a bounded number of times; after
        acceptance the deltas go on where they broke off. Where that cannot be, the turn ends with FAILED."""
        ...

    async def sessions(self, cache_scope: str) -> ResidentSessions:
        """Resident sessions of this cache_scope on all replicas, also on those that are being stopped."""
        ...

    async def delete_session(self, cache_scope: str, session_id: str) -> DeleteOutcome:
        """Drops a session wherever it is; a turn of it that runs ends as failed."""
        ...

    async def fork_session(self, cache_scope: str, session_id: str, new_session_id: str) -> ForkOutcome:
        """A new session that begins with all the tokens of a dormant one, on the replica that holds most of that."""
        ...

    async def ready(self) -> bool:
        """At least one replica can take a turn."""
        ...

    async def context_limit(self) -> int | None:
        """The longest sequence that a replica can hold, prompt and answer together; None while none has said it."""
        ...
