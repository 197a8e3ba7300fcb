"""The deltas of a turn become text, and the end of each choice. No HTTP in here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from engine_actor.messages import (
    EndReason,
    Failure,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnTokens,
)
from serve_app.ingress.errors import broken_off, refusal
from serve_app.ingress.settings import IngressSettings
from serve_app.interruption import Cancellation
from serve_app.openai.choices import ChoiceText, Piece
from serve_app.openai.services import Services
from serve_app.openai.turn_request import PreparedTurn


@dataclass(frozen=True, slots=True)
class TokenUsage:
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
class ChoiceEnd:
    """Nothing more comes of a choice; `reason` is OpenAI's finish_reason, or CANCELLED."""

    choice: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer: the reason of each choice, and the usage of all."""

    reasons: tuple[str, ...]
    usage: TokenUsage


AnswerEvent = TurnAccepted | Piece | ChoiceEnd | Finished
CANCELLED = "cancelled"


async def answer_events(
    services: Services, turn: PreparedTurn, cancellation: Cancellation | None = None
) -> AsyncGenerator[AnswerEvent, None]:
    """TurnAccepted, then pieces and ends of choices, then Finished. The turn is closed before the last choice's end and
    Finished, however it ends. With `cancellation` the text so far is its answer.

    Raises ApiError: before TurnAccepted if no replica took the turn, after it if the engine could not go on.
    """
    cancellation = cancellation or Cancellation()
    answer = _Answer(services, turn)
    with services.slots.occupy(turn.tenant):
        # Closing it is part of the contract, though its type says no more than AsyncIterator.
        deltas = cast(
            AsyncGenerator[TurnDelta, None],
            services.client.stream_turn(turn.request, routing_key=turn.routing_key),
        )
        last: list[AnswerEvent] = []
        async with aclosing(deltas):
            accepted = await _accepted(deltas, turn, services.settings)
            yield accepted
            while answer.open and (delta := await cancellation.next(deltas)) is not None:
                events = answer.apply(delta)
                if not answer.open:
                    last = events
                    break
                for event in events:
                    yield event
    if answer.open and cancellation.requested:
        last = answer.cancel()
    if answer.open:
        raise broken_off(Failure.ENGINE, "the engine went away")
    for event in last:
        yield event
    yield answer.finished(accepted)


class _Answer:
    """All choices of one turn, from the engine's deltas to what a client is told."""

    def __init__(self, services: Services, turn: PreparedTurn) -> None:
        request, tokenizer = turn.request, services.tokenizer
        logprobs = request.logprobs is not None
        self._texts = [
            ChoiceText(i, tokenizer, turn.stops, logprobs=logprobs, calls=turn.calls) for i in range(request.choices)
        ]
        self._reasons: dict[int, str] = {}
        self._generated = 0
        self._counts: TurnEnded | None = None

    @property
    def open(self) -> bool:
        return len(self._reasons) < len(self._texts)

    def apply(self, delta: TurnDelta) -> list[AnswerEvent]:
        """Of a choice that has ended, by a stop string or by itself, nothing more is told: the engine can't cancel one
        choice alone."""
        if not isinstance(delta, TurnTokens | TurnEnded):
            raise broken_off(Failure.ENGINE, "the engine broke the order of a turn")
        text = self._texts[delta.choice]
        if isinstance(delta, TurnEnded) and delta.choice == 0 and delta.reason is not EndReason.FAILED:
            self._counts = delta
        if delta.choice in self._reasons:
            return []
        if isinstance(delta, TurnTokens):
            events: list[AnswerEvent] = [piece] if (piece := text.push(delta)) else []
            return [*events, self._end(delta.choice, "stop", text.generated)] if text.stopped else events
        if delta.reason is EndReason.FAILED:
            raise broken_off(delta.failure, delta.message)
        events = [piece] if (piece := text.finish()) else []
        return [*events, self._end(delta.choice, str(delta.reason), delta.generated_tokens)]

    def cancel(self) -> list[AnswerEvent]:
        """Ends what is open; the text so far is then the answer."""
        events: list[AnswerEvent] = []
        for choice, text in enumerate(self._texts):
            if choice not in self._reasons:
                events += [piece] if (piece := text.finish()) else []
                events.append(self._end(choice, CANCELLED, text.generated))
        return events

    def finished(self, accepted: TurnAccepted) -> Finished:
        counts = self._counts or accepted
        usage = TokenUsage(counts.prompt_tokens, counts.cached_tokens, self._generated)
        return Finished(tuple(self._reasons[choice] for choice in range(len(self._texts))), usage)

    def _end(self, choice: int, reason: str, generated: int) -> ChoiceEnd:
        if reason == "stop" and self._texts[choice].has_calls:
            reason = "tool_calls"
        self._reasons[choice] = reason
        self._generated += generated
        return ChoiceEnd(choice, reason)


async def _accepted(
    deltas: AsyncGenerator[TurnDelta, None], turn: PreparedTurn, settings: IngressSettings
) -> TurnAccepted:
    first = await anext(deltas, None)
    if isinstance(first, TurnRefused):
        raise refusal(first, turn.prompt_param, settings.retry_after_seconds)
    if not isinstance(first, TurnAccepted):
        raise broken_off(Failure.ENGINE, "the engine did not accept the turn")
    return first
