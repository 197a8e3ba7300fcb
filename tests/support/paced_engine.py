"""An engine that makes a step every few milliseconds, whoever waits: what it costs to bring its tokens to a client is
then all that is measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ray import serve

from engine_actor.actor.mailbox import Mailbox
from engine_actor.actor_options import ActorOptions
from engine_actor.messages import (
    DeleteOutcome,
    EndReason,
    ForkOutcome,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRequest,
    TurnTokens,
)
from serve_app.cluster.channel.leases import Leases
from serve_app.cluster.channel.outbox import Outboxes
from serve_app.cluster.deployments import EngineDeployment
from serve_app.cluster.routing.claims import NameClaims
from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.ingress.engine_client import ResidentSessions

STEP_SECONDS = 0.005
TOKEN = 80  # the id of one character in any byte-level vocabulary


class PacedActor:
    """In the place of an EngineActor: one token a step for every turn, and no memory of any."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._turns: dict[Mailbox, int] = {}  # tokens to come
        self._stepping: asyncio.Task[None] | None = None
        self.context_length = 4096

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._turns:
            due = max(due + STEP_SECONDS, loop.time())
            await asyncio.sleep(due - loop.time())
            for mailbox, left in list(self._turns.items()):
                mailbox.put([TurnTokens((TOKEN,))] if left > 1 else [TurnTokens((TOKEN,)), None])
                self._turns[mailbox] = left - 1
                if left == 1:
                    del self._turns[mailbox]
        self._stepping = None

    async def stream_turn(self, request: TurnRequest) -> AsyncGenerator[TurnDelta, None]:
        mailbox = Mailbox()
        self._turns[mailbox] = request.max_generated_tokens
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step())
        try:
            yield TurnAccepted(self._replica, request.prompt_tokens, 0)
            while (delta := await mailbox.get()) is not None:
                yield delta
            yield TurnEnded(EndReason.LENGTH, request.prompt_tokens, 0, request.max_generated_tokens)
        finally:
            self._turns.pop(mailbox, None)

    def routing_stats(self) -> dict[str, object]:
        return {"sessions": {}, "load": len(self._turns), "free_blocks": 1, "accepting": True}

    def check_health(self) -> None:
        return None

    async def stop(self) -> None:
        return None


class PacedEngine(EngineDeployment):
    """The deployment around it; its turns are not counted by metrics."""

    async def __init__(self, options: ActorOptions, model_name: str) -> None:  # type: ignore[misc]
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._outboxes = Outboxes()
        self._leases = Leases()
        self._claims = NameClaims(self._replica, KnownReplicas(), list, self._ask_who_has)
        self._paced = PacedActor(self._replica)
        self._actor = self._paced  # type: ignore[assignment]

    def _measured_turn(self, request: TurnRequest) -> AsyncGenerator[TurnDelta, None]:
        return self._paced.stream_turn(request)


class PacedClient:
    """Implements `serve_app.ingress.engine_client.EngineClient` with an engine in the same process."""

    def __init__(self) -> None:
        self.actor = PacedActor("here")

    def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncGenerator[TurnDelta, None]:
        return self.actor.stream_turn(request)

    async def sessions(self, owner: str) -> ResidentSessions:
        return ResidentSessions(())

    async def delete_session(self, owner: str, session_id: str) -> DeleteOutcome:
        return DeleteOutcome.UNKNOWN

    async def fork_session(self, owner: str, session_id: str, new_session_id: str) -> ForkOutcome:
        return ForkOutcome.UNKNOWN

    async def ready(self) -> bool:
        return True

    async def context_limit(self) -> int | None:
        return self.actor.context_length
