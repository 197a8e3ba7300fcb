"""An `EngineClient` over one EngineActor of this process: the front door and a real engine, without Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine_actor.actor.actor import EngineActor
from engine_actor.messages import DeleteOutcome, ForkOutcome, TurnDelta, TurnRequest
from serve_app.ingress.engine_client import ResidentSessions


class LocalEngine:
    """`says_limit`: whether the front door is told how long a sequence may be, or leaves that to the engine."""

    def __init__(self, actor: EngineActor) -> None:
        self.actor = actor
        self.says_limit = True

    def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncIterator[TurnDelta]:
        return self.actor.stream_turn(request)

    async def sessions(self, owner: str) -> ResidentSessions:
        return ResidentSessions(tuple(await self.actor.sessions(owner)))

    async def delete_session(self, owner: str, session_id: str) -> DeleteOutcome:
        deleted = await self.actor.close_session(owner, session_id)
        return DeleteOutcome.DELETED if deleted else DeleteOutcome.UNKNOWN

    async def fork_session(self, owner: str, session_id: str, new_session_id: str) -> ForkOutcome:
        return await self.actor.fork_session(owner, session_id, new_session_id)

    async def ready(self) -> bool:
        return True

    async def context_limit(self) -> int | None:
        return self.actor.context_length if self.says_limit else None
