"""The `EngineClient` in front of many engines: every turn goes through a Serve handle and its sticky router.

A stream from a replica starts with the replica's id, before the turn reaches its engine. So this side knows
that the call has been placed (until then a missing replica is waited for, but not forever) and whom not to
ask again. What happens when a replica is lost is in `failover`, how deltas travel is in `channel`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from engine_actor.messages import ForkOutcome, SessionInfo, TurnDelta, TurnRequest
from serve_app.cluster.channel.call import ChannelCaller
from serve_app.cluster.failover.counters import FailoverCounters
from serve_app.cluster.failover.turn import FailoverTurn, Patience
from serve_app.cluster.failover.watch import ReplicaWatch
from serve_app.cluster.port_watch import PortWatch
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.cluster.routing.sticky_router import ONLY

logger = logging.getLogger("moorage")

_CONTROL_TIMEOUT_SECONDS = 5.0
_READY_TIMEOUT_SECONDS = 2.0


class HandleEngineClient:
    """Implements `serve_app.ingress.engine_client.EngineClient` over the handle of `EngineDeployment`."""

    def __init__(
        self,
        handle: DeploymentHandle,
        *,
        placement_timeout: float,
        replacement_timeout: float | None = None,
        starts_on_demand: bool = False,
        head: PortWatch | None = None,
    ) -> None:
        """`placement_timeout`: seconds that a turn waits for a replica to exist. `replacement_timeout`: that one waits
        whose replica is lost, if that is longer. `starts_on_demand`: where there is none, a turn starts one. `head`:
        that of the cluster, without which nothing is ready."""
        self._handle = handle
        self._turns = handle.options(stream=True, method_name="stream_turn")
        self._signs = handle.options(method_name="sign_of_life")
        self._known = known_replicas(handle.app_name, handle.deployment_name)
        self._caller = ChannelCaller(handle, self._known)
        self._watch = ReplicaWatch(self._sign_of_life, self._known)
        self._counters = FailoverCounters()
        self._patience = Patience(placement_timeout, max(placement_timeout, replacement_timeout or 0.0))
        self._starts_on_demand = starts_on_demand
        self._head = head
        self._context_limit: int | None = None

    def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncGenerator[TurnDelta, None]:
        """See the protocol, and `failover.turn` for what happens when a replica is lost."""
        handle = self._turns.options(session_id=routing_key) if routing_key else self._turns
        turn = FailoverTurn(self._caller, handle, request, self._watch, self._counters, self._patience)
        return turn.deltas()

    def close(self) -> None:
        """To be called when no turn is open: replicas wait for the channels of those that read from them."""
        self._caller.inboxes.close_all()

    async def _sign_of_life(self, replica: str) -> tuple[str, bool]:
        """Of the replica of this id; of another one, if the router does not have it any more."""
        response = self._signs.remote(**{ONLY: replica})
        try:
            answer: tuple[str, bool] = await response
        except BaseException:
            response.cancel()
            raise
        return answer

    async def sessions(self, cache_scope: str) -> list[SessionInfo]:
        """Of the replicas that answer in time."""
        return [session for answer in await self._broadcast("sessions", cache_scope) for session in answer]

    async def close_session(self, cache_scope: str, session_id: str) -> bool:
        return any(await self._broadcast("close_session", cache_scope, session_id))

    async def fork_session(self, cache_scope: str, session_id: str, new_session_id: str) -> ForkOutcome:
        """A replica sees only the names of its own sessions, so those of all are looked at first."""
        if any(info.session_id == new_session_id for info in await self.sessions(cache_scope)):
            return ForkOutcome.EXISTS
        found = set(await self._broadcast("fork_session", cache_scope, session_id, new_session_id))
        # What was left behind where the session has been may say otherwise than its home.
        order = (ForkOutcome.FORKED, ForkOutcome.RUNNING, ForkOutcome.EXISTS)
        return next((outcome for outcome in order if outcome in found), ForkOutcome.UNKNOWN)

    async def context_limit(self) -> int | None:
        """Asked until a replica answers: it does not change. Of different ones the largest counts, since the router
        may choose it; a smaller one refuses what is too long for it alone."""
        if self._context_limit is None:
            try:
                limits = await self._broadcast("context_limit", timeout=_READY_TIMEOUT_SECONDS)
            except (TimeoutError, RayActorError):
                return None
            self._context_limit = max(limits, default=None)
        return self._context_limit

    async def ready(self) -> bool:
        """Once a replica does not answer, each is asked by itself, so that it does not speak for all."""
        if self._head is not None and await self._head.lost():
            return False
        if not self._known.silent:
            try:
                answers = await self._broadcast("accepting", timeout=_READY_TIMEOUT_SECONDS)
                return any(answers) or (not answers and self._starts_on_demand)
            except RayActorError:
                return False
            except TimeoutError:
                logger.info("not all replicas said in time whether they are ready")
        questions = (asyncio.wait_for(self._sign_of_life(r), _READY_TIMEOUT_SECONDS) for r in self._known.running)
        answers = await asyncio.gather(*questions, return_exceptions=True)
        return any(not isinstance(answer, BaseException) and answer[1] for answer in answers)

    async def _broadcast(self, method: str, *args: Any, timeout: float = _CONTROL_TIMEOUT_SECONDS) -> list[Any]:
        """The answers of all replicas; those that failed are left out, unless all did: then the first error
        is raised."""
        response = self._handle.broadcast(method, *args)
        try:
            answers = await response.results_async(timeout_s=timeout, return_exceptions=True)
        except DeploymentUnavailableError:  # no replica is running
            return []
        good = [answer for answer in answers if not isinstance(answer, BaseException)]
        if answers and not good:
            raise answers[0]
        return good
