"""A checked request becomes one turn of an engine, and the turn's deltas become text. No HTTP in here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from engine_actor.options import SamplingParams
from engine_actor.turns import (
    EndReason,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
)
from serve_app.ingress.errors import SERVER_ERROR, ApiError, bad_value, context_length_exceeded, refusal
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.identity import TurnIdentity, engine_owner
from serve_app.openai.protocol import GenerationRequest
from serve_app.openai.services import Services
from serve_app.text.prompts import Prompt
from serve_app.text.stream import AnswerText

# Below this a temperature only overflows; the most likely token is what it means.
_COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn to run, of one key. `prompt_param` is the field to blame when the prompt is too long."""

    request: TurnRequest
    tenant: str
    routing_key: str
    stops: tuple[str, ...]
    prompt_param: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def shown(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer; `reason` is OpenAI's finish_reason, or CANCELLED."""

    reason: str
    usage: Usage


AnswerEvent = TurnAccepted | str | Finished
CANCELLED = "cancelled"


class Cancellation:
    """Ends a turn from elsewhere than its client's connection. The text so far is then its answer."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting: asyncio.Timeout | None = None

    def request(self) -> None:
        self.requested = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def next(self, deltas: AsyncGenerator[TurnDelta, None]) -> TurnDelta | None:
        """The next delta; None at the end, or as soon as the turn is to end."""
        if self.requested:
            return None
        try:
            # A timeout without a time: it costs nothing until it is given one.
            async with asyncio.timeout(None) as self._waiting:
                return await anext(deltas, None)
        except TimeoutError:
            if not self.requested:
                raise
            return None
        finally:
            self._waiting = None


def make_turn(
    body: GenerationRequest,
    prompt: Prompt,
    identity: TurnIdentity,
    sampling: SamplingParams,
    *,
    request_id: str,
    tenant: str,
    prompt_param: str,
    settings: IngressSettings,
    limit: int | None,
) -> Turn:
    """`limit`: the longest sequence, where it is known. Raises ApiError where the prompt can't be served: nothing in
    it, or no room for an answer."""
    length = len(prompt.ids)
    if length == 0:
        raise bad_value(prompt_param, "must not be empty")
    if limit is not None and length >= limit:
        raise context_length_exceeded(length, limit, prompt_param)
    wanted = body.token_limit or settings.default_max_tokens or 0
    if limit is not None:
        room = limit - length
        wanted = min(wanted, room) if wanted else room
    request = TurnRequest(
        request_id=request_id,
        owner=engine_owner(tenant, body.cache_salt),
        session_id=identity.session_id,
        prompt_ids=prompt.ids,
        sampling=sampling,
        max_generated_tokens=wanted,
        ignore_eos=bool(body.ignore_eos),
        spans=prompt.spans,
    )
    return Turn(request, tenant, identity.routing_key, body.stop, prompt_param)


def sampling_of(body: GenerationRequest, settings: IngressSettings) -> SamplingParams:
    """The request's own values, else the defaults; a seed is drawn where it names none."""
    defaults = settings.sampling
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return SamplingParams(
        temperature=0.0 if temperature < _COLDEST else temperature,
        top_k=max(top_k, 0),  # -1 is another word for no limit
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        seed=seed % 2**64,
    )


async def answer_events(
    services: Services, turn: Turn, cancellation: Cancellation | None = None
) -> AsyncGenerator[AnswerEvent, None]:
    """TurnAccepted, then pieces of text, then Finished. The turn is closed before Finished, however it ends.

    Raises ApiError: before TurnAccepted if no replica took the turn, after it if the engine could not go on.
    """
    cancellation = cancellation or Cancellation()
    text = AnswerText(services.prompts.tokenizer, turn.stops)
    with services.slots.take(turn.tenant):
        # Closing it is part of the contract, though its type says no more than AsyncIterator.
        deltas = cast(
            AsyncGenerator[TurnDelta, None],
            services.client.stream_turn(turn.request, routing_key=turn.routing_key),
        )
        finished: Finished | None = None
        async with aclosing(deltas):
            accepted = await _accepted(deltas, turn, services.settings)
            yield accepted
            while finished is None and (delta := await cancellation.next(deltas)) is not None:
                if isinstance(delta, TurnTokens):
                    if piece := text.push(delta.token_ids):
                        yield piece
                    if text.stopped:
                        finished = Finished("stop", _usage(accepted, text.tokens))
                elif isinstance(delta, TurnEnded):
                    if delta.reason is EndReason.FAILED:
                        raise _failed(delta.message)
                    if piece := text.finish():
                        yield piece
                    finished = Finished(str(delta.reason), _usage(delta, delta.generated_tokens))
                else:
                    raise _failed("the engine broke the order of a turn")
    if finished is None and cancellation.requested:
        if piece := text.finish():
            yield piece
        finished = Finished(CANCELLED, _usage(accepted, text.tokens))
    if finished is None:
        raise _failed("the engine went away")
    yield finished


async def _accepted(deltas: AsyncGenerator[TurnDelta, None], turn: Turn, settings: IngressSettings) -> TurnAccepted:
    first = await anext(deltas, None)
    if isinstance(first, TurnRefused):
        raise refusal(first, turn.prompt_param, settings.retry_after_seconds)
    if not isinstance(first, TurnAccepted):
        raise _failed("the engine did not accept the turn")
    return first


def _usage(counts: TurnAccepted | TurnEnded, completion_tokens: int) -> Usage:
    return Usage(counts.prompt_tokens, counts.cached_tokens, completion_tokens)


def _failed(message: str) -> ApiError:
    return ApiError(500, f"The answer could not be completed: {message}", type=SERVER_ERROR, code="engine_failed")
