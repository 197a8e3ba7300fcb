"""An engine that does as it is told, in the place of EngineActor: for what a real one does too fast or too
seldom.

The request id of a turn is its script: "slow" sends a token every 20 ms for ever, "silent" accepts and sends
nothing, "queued" never gets as far as being accepted, "poison" kills the process, "steady" is as "slow" and
ends; any other gets what it asks for at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from engine_actor.actor_options import ActorOptions
from engine_actor.messages import (
    EndReason,
    ForkOutcome,
    RefusalCode,
    SessionHolding,
    SessionInfo,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
    session_key,
)
from serve_app.cluster.channel.leases import Leases
from serve_app.cluster.channel.outbox import Outboxes
from serve_app.cluster.deployments import EngineDeployment
from serve_app.cluster.routing.claims import NameClaims
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.jobs.pool import BatchEngine
from serve_app.telemetry.metrics import EngineMetrics, open_in_ray
from tests.support.actor_view import owner_of

Deploy = Callable[..., DeploymentHandle]
"""The `deploy` fixture: an engine class and fields of AppArgs to the handle of the engines."""

LETTERS = (80, 81, 82, 83)  # ids of single characters in any byte-level vocabulary


class ScriptedActor:
    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.context_length = 4096
        self.refusal: RefusalCode | None = None
        self.seen: list[str] = []
        self.open: list[str] = []
        self.resident: dict[str, SessionInfo] = {}

    async def stream_turn(self, request: TurnRequest) -> AsyncGenerator[TurnDelta, None]:
        script = request.request_id
        self.seen.append(script)
        if self.refusal is not None:
            yield TurnRefused(self.refusal, "as scripted", retry_after=1.0)
            return
        if "poison" in script:
            os._exit(1)
        self.open.append(script)
        try:
            if "queued" in script:
                await asyncio.Event().wait()
            yield TurnAccepted(self.replica, request.prompt_tokens, 0)
            if "silent" in script:
                await asyncio.Event().wait()
            sent = request.resumed_tokens or 0
            while "slow" in script or sent < (request.max_generated_tokens or 4):
                if "slow" in script or "steady" in script:
                    await asyncio.sleep(0.02)
                yield TurnTokens((LETTERS[sent % 4],))
                sent += 1
            if request.session_id is not None:
                self.resident[session_key(request.cache_scope, request.session_id)] = SessionInfo(
                    request.session_id, request.cache_scope, self.replica, sent, sent, 1, False, 0.0
                )
            yield TurnEnded(EndReason.LENGTH, request.prompt_tokens, 0, sent)
        finally:
            self.open.remove(script)

    async def sessions(self, owner: str | None = None) -> list[SessionInfo]:
        return [info for info in self.resident.values() if owner in (None, info.cache_scope)]

    async def close_session(self, owner: str, session_id: str) -> bool:
        return self.resident.pop(session_key(owner, session_id), None) is not None

    async def session_holdings(self, owner: str, session_ids: Sequence[str]) -> list[SessionHolding | None]:
        found = (self.resident.get(session_key(owner, session_id)) for session_id in session_ids)
        return [None if info is None else SessionHolding(info.tokens, False) for info in found]

    async def fork_session(self, owner: str, session_id: str, new_session_id: str) -> ForkOutcome:
        key = session_key(owner, new_session_id)
        if key in self.resident:
            return ForkOutcome.EXISTS
        self.resident[key] = replace(self.resident[session_key(owner, session_id)], session_id=new_session_id)
        return ForkOutcome.FORKED

    def routing_stats(self) -> dict[str, object]:
        sessions = {key: info.tokens for key, info in self.resident.items()}
        return {"sessions": sessions, "load": len(self.open), "free_blocks": 1, "accepting": True}

    def check_health(self) -> None:
        return None

    async def stop(self) -> None:
        return None


class ScriptedEngine(EngineDeployment):
    async def __init__(self, options: ActorOptions, model_name: str) -> None:  # type: ignore[misc]
        self._metrics = EngineMetrics(partial(open_in_ray, model_name=model_name))
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._outboxes = Outboxes()
        self._leases = Leases()
        context = serve.get_replica_context()
        known = known_replicas(context.app_name, context.deployment)
        self._claims = NameClaims(self._replica, known, list, self._ask_who_has)
        self._scripted = ScriptedActor(self._replica)
        self._actor = self._scripted  # type: ignore[assignment]

    async def script(self, replica: str, refusal: str | None) -> None:
        """From now on `replica` ("*": every one) refuses with this code, or takes turns again (None)."""
        if replica in ("*", self._replica):
            self._scripted.refusal = None if refusal is None else RefusalCode(refusal)

    async def die(self, replica: str) -> None:
        if replica == self._replica:
            os._exit(1)

    async def state(self) -> dict[str, Any]:
        sessions = [info.session_id for info in self._scripted.resident.values()]
        played = {"seen": self._scripted.seen, "open": self._scripted.open, "sessions": sessions}
        return {"replica": self._replica, "pid": os.getpid(), **played}


class MortalEngine(EngineDeployment):
    """The real one, which can be killed from outside, or from inside its owner thread."""

    async def process(self) -> tuple[str, int]:
        return self._replica, os.getpid()

    async def break_engine(self, replica: str) -> None:
        if replica == self._replica:
            owner_of(self._actor).post(_break)


def _break() -> None:
    raise RuntimeError("broken by a test")


def _hang() -> None:
    time.sleep(600)


class MortalBatchEngine(BatchEngine):
    """That of a batch job, which can be killed, or broken or hung up in its owner thread."""

    async def process(self) -> int:
        return os.getpid()

    async def harm(self, how: str) -> None:
        owner_of(self._actor).post({"break": _break, "hang": _hang}[how])


class MeasuredEngine(EngineDeployment):
    """The real one, with a look inside."""

    async def resident_bytes(self) -> int:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def check_integrity(self) -> None:
        await self._actor.check_integrity()

    async def remembered(self) -> tuple[str, set[str]]:
        """This replica, and the names of the conversations that it knows and no turn is using."""
        return self._replica, {str(moved.session_id) for moved in await self._actor.dormant_sessions()}
