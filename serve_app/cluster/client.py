"""The `EngineClient` in front of many engines: every turn goes through a Serve handle and its sticky router.

A stream from a replica starts with the replica's id, before the turn reaches its engine. So this side knows
that the call has been placed (until then a missing replica is waited for, but not forever) and whom not to
ask again. What happens when a replica is lost is in `failover`, how deltas travel is in `channel`, how replicas are
asked for all else in `control_calls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ray.serve.handle import DeploymentHandle

from engine_actor.messages import (
    DeleteOutcome,
    ForkOutcome,
    SessionHolding,
    TurnDelta,
    TurnRequest,
    session_key,
)
from serve_app.cluster.channel.call import ChannelCaller
from serve_app.cluster.control_calls import ControlCalls, ReplicaUnanswered
from serve_app.cluster.failover.counters import FailoverCounters
from serve_app.cluster.failover.turn import FailoverTurn, Patience
from serve_app.cluster.failover.watch import ReplicaWatch
from serve_app.cluster.port_watch import PortWatch
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.cluster.routing.placement import by_rank
from serve_app.cluster.routing.sticky_router import ONLY
from serve_app.ingress.engine_client import ResidentSessions

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
        self._control = ControlCalls(handle, self._known)
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

    async def sessions(self, cache_scope: str) -> ResidentSessions:
        """One that has moved may have left a copy where it was: the one that counts is where a turn runs, else where
        the routers send its turns to, among those the one with most of it."""
        answers = await self._control.ask_each("sessions", cache_scope)
        leaving = self._known.leaving
        copies = [info for infos in answers.by_replica.values() for info in infos]
        copies.sort(key=lambda info: (info.running, info.replica not in leaving, info.tokens, -info.idle_seconds))
        return ResidentSessions(tuple({info.session_id: info for info in copies}.values()), len(answers.unanswered))

    async def delete_session(self, cache_scope: str, session_id: str) -> DeleteOutcome:
        answers = await self._control.ask_each("close_session", cache_scope, session_id)
        if any(answers.by_replica.values()):
            return DeleteOutcome.DELETED
        return DeleteOutcome.UNANSWERED if answers.unanswered else DeleteOutcome.UNKNOWN

    async def fork_session(self, cache_scope: str, session_id: str, new_session_id: str) -> ForkOutcome:
        """Where copies of the session are, one replica makes the fork: the same one whoever asks for it, so that a name
        that is asked for twice is made once."""
        answers = await self._control.ask_each("session_holdings", cache_scope, (session_id, new_session_id))
        if answers.unanswered:
            return ForkOutcome.UNANSWERED
        holdings: dict[str, tuple[SessionHolding | None, SessionHolding | None]] = answers.by_replica
        if any(new is not None for _, new in holdings.values()):
            return ForkOutcome.EXISTS
        sources = {replica: source for replica, (source, _) in holdings.items() if source is not None}
        if any(source.open for source in sources.values()):
            return ForkOutcome.RUNNING
        if not sources:
            return ForkOutcome.UNKNOWN
        ranked = by_rank(session_key(cache_scope, session_id), sources)
        home = max(ranked, key=lambda replica: (replica not in self._known.leaving, sources[replica].tokens))
        try:
            outcome = await self._control.ask(home, "fork_session", cache_scope, session_id, new_session_id)
        except ReplicaUnanswered:
            return ForkOutcome.UNANSWERED
        if outcome is ForkOutcome.FORKED:
            self._known.homes.note(session_key(cache_scope, new_session_id), home)
        return ForkOutcome.UNKNOWN if outcome is None else ForkOutcome(outcome)

    async def context_limit(self) -> int | None:
        """Asked until all replicas answer: it does not change. Of different ones the largest counts, since the router
        may choose it; a smaller one refuses what is too long for it alone."""
        if self._context_limit is None:
            answers = await self._control.ask_each("context_limit", seconds=_READY_TIMEOUT_SECONDS)
            limit = max(answers.by_replica.values(), default=None)
            if answers.unanswered:
                return limit
            self._context_limit = limit
        return self._context_limit

    async def ready(self) -> bool:
        """As soon as one says so: the others need not answer."""
        if self._head is not None and await self._head.lost():
            return False
        running = await self._control.running()
        questions = [asyncio.create_task(self._accepts(replica)) for replica in running]
        try:
            for answer in asyncio.as_completed(questions):
                if await answer:
                    return True
        finally:
            for question in questions:
                question.cancel()
        return not running and self._starts_on_demand

    async def _accepts(self, replica: str) -> bool:
        try:
            answer = await self._control.ask(replica, "sign_of_life", seconds=_READY_TIMEOUT_SECONDS)
        except ReplicaUnanswered:
            return False
        return answer is not None and bool(answer[1])
