"""The `EngineClient` in front of many engines: every turn goes through a Serve handle and its sticky router.

A stream from a replica starts with the replica's id, before the turn reaches its engine. So this side knows
that the call has been placed (until then a missing replica is waited for, but not forever) and whom not to
ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from engine_actor.turns import (
    EndReason,
    ForkOutcome,
    RefusalCode,
    SessionInfo,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
)
from serve_app.routing.sticky_router import AVOID

logger = logging.getLogger("moorage")

_ELSEWHERE = frozenset({RefusalCode.QUEUE_FULL, RefusalCode.UNAVAILABLE})
_LOST = (RayActorError, BackPressureError, DeploymentUnavailableError)
_ATTEMPTS = 3
_LOSSES = 2  # a turn that kills its replica must not kill them all
_PAUSE_SECONDS = 0.05  # lets the router learn of a death before the next attempt
_CONTROL_TIMEOUT_SECONDS = 5.0
_READY_TIMEOUT_SECONDS = 2.0
_RETRY_AFTER_SECONDS = 1.0


class _NoReplica(Exception):
    """No replica took the call in time."""


class HandleEngineClient:
    """Implements `serve_app.ingress.engine_client.EngineClient` over the handle of `EngineDeployment`."""

    def __init__(self, handle: DeploymentHandle, *, placement_timeout: float) -> None:
        """`placement_timeout`: seconds that a turn waits for a replica to exist."""
        self._handle = handle
        self._turns = handle.options(stream=True, method_name="stream_turn")
        self._placement_timeout = placement_timeout
        self._context_limit: int | None = None

    async def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncGenerator[TurnDelta, None]:
        """See the protocol. A replica lost after it accepted ends the turn with `EndReason.FAILED`."""
        handle = self._turns.options(session_id=routing_key) if routing_key else self._turns
        asked: list[str] = []
        refusal = TurnRefused(RefusalCode.UNAVAILABLE, "no replica could take the turn")
        losses = 0
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
            progress = _Progress(request.choices)
            try:
                async with aclosing(self._attempt(handle, request, asked)) as deltas:
                    async for delta in deltas:
                        if isinstance(delta, TurnRefused) and delta.code in _ELSEWHERE:
                            refusal = delta
                            break
                        progress.note(delta)
                        yield delta
            except _NoReplica:
                refusal = _unavailable("no replica is running")
                break
            except _LOST as error:
                logger.warning("turn %s lost its replica: %s", request.request_id, type(error).__name__)
                refusal = _unavailable("the replica was lost")
                losses += 1
            if progress.complete:
                return
            if progress.accepted is not None:
                for ended in progress.failed("the replica was lost in the middle of the answer"):
                    yield ended
                return
            if losses == _LOSSES:
                break
        yield refusal

    async def _attempt(
        self, handle: DeploymentHandle, request: TurnRequest, asked: list[str]
    ) -> AsyncGenerator[TurnDelta, None]:
        """One call. Leaving it early, from either side, cancels it wherever it is: unplaced, queued or
        running."""
        response = handle.remote(request, **{AVOID: tuple(asked)})
        done = False
        try:
            try:
                async with asyncio.timeout(self._placement_timeout):
                    replica = await anext(response)
            except TimeoutError:
                raise _NoReplica from None
            asked.append(replica)
            async for delta in response:
                yield delta
            done = True
        finally:
            if not done:
                response.cancel()

    async def sessions(self, owner: str) -> list[SessionInfo]:
        """Of the replicas that answer in time."""
        return [session for answer in await self._broadcast("sessions", owner) for session in answer]

    async def close_session(self, owner: str, session_id: str) -> bool:
        return any(await self._broadcast("close_session", owner, session_id))

    async def fork_session(self, owner: str, session_id: str, new_session_id: str) -> ForkOutcome:
        """A replica sees only the names of its own sessions, so those of all are looked at first."""
        if any(info.session_id == new_session_id for info in await self.sessions(owner)):
            return ForkOutcome.EXISTS
        found = set(await self._broadcast("fork_session", owner, session_id, new_session_id))
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
        try:
            return any(await self._broadcast("accepting", timeout=_READY_TIMEOUT_SECONDS))
        except (TimeoutError, RayActorError):
            return False

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


class _Progress:
    """How far a turn has come, for the message that ends it when its replica is gone."""

    def __init__(self, choices: int) -> None:
        self.accepted: TurnAccepted | None = None
        self.complete = False
        self._generated = dict.fromkeys(range(choices), 0)  # tokens of the choices that run

    def note(self, delta: TurnDelta) -> None:
        if isinstance(delta, TurnAccepted):
            self.accepted = delta
        elif isinstance(delta, TurnTokens):
            self._generated[delta.choice] += len(delta.token_ids)
        elif isinstance(delta, TurnEnded):
            del self._generated[delta.choice]
            self.complete = not self._generated
        else:
            self.complete = True

    def failed(self, message: str) -> list[TurnEnded]:
        """The ends of the choices that were running."""
        assert self.accepted is not None
        prompt, cached = self.accepted.prompt_tokens, self.accepted.cached_tokens
        return [
            TurnEnded(EndReason.FAILED, prompt, cached, generated, message, choice)
            for choice, generated in self._generated.items()
        ]


def _unavailable(message: str) -> TurnRefused:
    return TurnRefused(RefusalCode.UNAVAILABLE, message, retry_after=_RETRY_AFTER_SECONDS)
