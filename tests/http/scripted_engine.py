"""An EngineClient for tests of the HTTP layer: it says what a test tells it to say, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from itertools import zip_longest

from engine_actor.messages import (
    DeleteOutcome,
    EndReason,
    Failure,
    ForkOutcome,
    SessionInfo,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
)
from engine_actor.sampling.logprobs import TokenLogprob
from serve_app.ingress.engine_client import ResidentSessions

REPLICA = "replica-1"
CACHED = 3


def logprob_of(token: int, count: int) -> TokenLogprob:
    """The token itself is the likeliest, those of the next ids follow."""
    logprob = -0.5 - token % 8 / 8
    return TokenLogprob(token, logprob, tuple((token + i, logprob - i) for i in range(count)))


class _Turn:
    """A turn that counts how often it is closed: a bare generator is also closed when it is forgotten."""

    def __init__(self, engine: ScriptedEngine, deltas: AsyncGenerator[TurnDelta, None]) -> None:
        self._engine = engine
        self._deltas = deltas

    def __aiter__(self) -> AsyncIterator[TurnDelta]:
        return self

    async def __anext__(self) -> TurnDelta:
        return await anext(self._deltas)

    async def aclose(self) -> None:
        await self._deltas.aclose()
        self._engine.closed += 1


class ScriptedEngine:
    """Lives in the server's thread; tests set its fields before a request and read its records after it.

    reply        token ids of the answer; a turn's limit cuts them
    reply_to     gives them for the ids of a prompt, where prompts differ
    replies      those of the choices, where they differ
    chunks       how many tokens each delta holds, over and over
    refusal      refuse every turn with this
    refusal_of   gives it for the ids of a prompt, or None
    fail_at      raise `error` before this delta (0: before TurnAccepted)
    failed       end with EndReason.FAILED and this message
    failure      and this failure
    hold_at      before this delta wait for `release` (0: before TurnAccepted)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.reply: list[int] = []
        self.reply_to: Callable[[tuple[int, ...]], list[int]] | None = None
        self.replies: list[list[int]] | None = None
        self.chunks = [1]
        self.refusal: TurnRefused | None = None
        self.refusal_of: Callable[[tuple[int, ...]], TurnRefused | None] | None = None
        self.fail_at: int | None = None
        self.error: BaseException = RuntimeError("scripted failure")
        self.failed: str | None = None
        self.failure = Failure.ENGINE
        self.hold_at: int | None = None
        self.release = threading.Event()
        self.vanish = False
        self.is_ready = True
        self.longest: int | None = None
        self.requests: list[TurnRequest] = []
        self.routing_keys: list[str | None] = []
        self.running = 0
        self.closed = 0
        self.tokens_sent = 0
        self.known_sessions: list[SessionInfo] = []
        self.unanswered = 0
        self.session_calls: list[tuple[str, str]] = []
        self.fork_calls: list[tuple[str, str, str]] = []
        self.fork_outcome = ForkOutcome.FORKED

    def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncIterator[TurnDelta]:
        return _Turn(self, self._turn(request, routing_key))

    async def _turn(self, request: TurnRequest, routing_key: str | None) -> AsyncGenerator[TurnDelta, None]:
        self.requests.append(request)
        self.routing_keys.append(routing_key)
        self.running += 1
        try:
            for i, delta in enumerate(self._deltas(request)):
                if self.fail_at == i:
                    raise self.error
                while self.hold_at == i and not self.release.is_set():
                    await asyncio.sleep(0.002)
                if isinstance(delta, TurnTokens):
                    self.tokens_sent += len(delta.token_ids)
                yield delta
                await asyncio.sleep(0)
        finally:
            self.running -= 1

    def _deltas(self, request: TurnRequest) -> list[TurnDelta]:
        refusal = self.refusal_of(request.prompt_ids) if self.refusal_of is not None else self.refusal
        if refusal is not None:
            return [refusal]
        choices = [self._choice(request, choice) for choice in range(request.choices)]
        # One delta of each choice in turn, as steps of an engine bring them.
        mixed = [delta for step in zip_longest(*choices) for delta in step if delta is not None]
        return [TurnAccepted(REPLICA, len(request.prompt_ids), CACHED), *mixed]

    def _choice(self, request: TurnRequest, choice: int) -> list[TurnDelta]:
        prompt, reply = len(request.prompt_ids), self.reply if self.replies is None else self.replies[choice]
        cached = prompt - 1 if choice else CACHED  # the others share the prompt that the first has computed
        if self.reply_to is not None:
            reply = self.reply_to(request.prompt_ids)
        limit = request.max_generated_tokens or len(reply)
        ids, reason = reply[:limit], EndReason.LENGTH if len(reply) > limit else EndReason.STOP
        deltas: list[TurnDelta] = []
        at = turn = 0
        while at < len(ids):
            size = self.chunks[turn % len(self.chunks)]
            some = tuple(ids[at : at + size])
            logprobs = () if request.logprobs is None else tuple(logprob_of(i, request.logprobs) for i in some)
            deltas.append(TurnTokens(some, choice, logprobs))
            at, turn = at + size, turn + 1
        if self.vanish:
            return deltas
        if self.failed is not None:
            failed = TurnEnded(EndReason.FAILED, prompt, cached, len(ids), self.failed, choice, self.failure)
            return [*deltas, failed]
        return [*deltas, TurnEnded(reason, prompt, cached, len(ids), choice=choice)]

    async def sessions(self, owner: str) -> ResidentSessions:
        found = tuple(info for info in self.known_sessions if info.cache_scope == owner)
        return ResidentSessions(found, self.unanswered)

    async def delete_session(self, owner: str, session_id: str) -> DeleteOutcome:
        self.session_calls.append((owner, session_id))
        if any((info.cache_scope, info.session_id) == (owner, session_id) for info in self.known_sessions):
            return DeleteOutcome.DELETED
        return DeleteOutcome.UNANSWERED if self.unanswered else DeleteOutcome.UNKNOWN

    async def fork_session(self, owner: str, session_id: str, new_session_id: str) -> ForkOutcome:
        self.fork_calls.append((owner, session_id, new_session_id))
        return self.fork_outcome

    async def ready(self) -> bool:
        return self.is_ready

    async def context_limit(self) -> int | None:
        return self.longest
