"""How an answer is written: chat.completion or text_completion, whole or in chunks.

A format belongs to one answer and is asked in order: opening, pieces and ends of choices, then closing or failed; or
whole alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.ingress.errors import ApiError
from serve_app.openai.choices import Piece
from serve_app.openai.logprobs import chat_logprobs, completion_logprobs
from serve_app.openai.sse import DONE, TextEvents, event, events
from serve_app.openai.turns import ChoiceEnd, Finished
from serve_app.text.calls import CallDelta
from serve_app.text.token_bytes import TokenBytes


class AnswerFormat(Protocol):
    """All but `whole` are server-sent events, of which there may be none."""

    def opening(self) -> bytes:
        """What is sent before any text."""
        ...

    def piece(self, piece: Piece) -> bytes: ...

    def ended(self, end: ChoiceEnd) -> bytes:
        """The chunk with finish_reason of one choice."""
        ...

    def closing(self, finished: Finished) -> bytes:
        """What follows when all choices have ended, such as the chunk with usage if it was asked for."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that can't go on."""
        ...

    def whole(self, answers: Sequence[Piece], finished: Finished) -> dict[str, object]:
        """`answers`: all of each choice, in order."""
        ...


def now() -> int:
    return int(time.time())


@dataclass(slots=True)
class ChatFormat:
    """include_usage   a last chunk without choices carries usage, and all others say null for it
    spelling           of tokens, where logprobs were asked for
    """

    model: str
    choices: int
    include_usage: bool
    spelling: TokenBytes | None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=now)
    _texts: TextEvents = field(init=False)

    def __post_init__(self) -> None:
        self._texts = TextEvents(lambda choice: self._chunk(choice, {"content": ""}))

    def opening(self) -> bytes:
        return events([self._chunk(choice, {"role": "assistant", "content": ""}) for choice in range(self.choices)])

    def piece(self, piece: Piece) -> bytes:
        if not piece.tokens and not piece.calls:
            return self._texts.event(piece.choice, piece.text)
        delta: dict[str, object] = {"content": piece.text} if piece.text or not piece.calls else {}
        if piece.calls:
            delta["tool_calls"] = [_call_chunk(call) for call in piece.calls]
        return event(self._chunk(piece.choice, delta, self._logprobs(piece) if piece.tokens else None))

    def ended(self, end: ChoiceEnd) -> bytes:
        return event(self._chunk(end.choice, {}, reason=end.reason))

    def closing(self, finished: Finished) -> bytes:
        if not self.include_usage:
            return DONE
        return event(self._head("chat.completion.chunk") | {"choices": [], "usage": finished.usage.shown()}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.envelope())

    def whole(self, answers: Sequence[Piece], finished: Finished) -> dict[str, object]:
        choices = [
            {
                "index": answer.choice,
                "message": _message(answer),
                "logprobs": self._logprobs(answer),
                "finish_reason": reason,
            }
            for answer, reason in zip(answers, finished.reasons, strict=True)
        ]
        return self._head("chat.completion") | {"choices": choices, "usage": finished.usage.shown()}

    def _logprobs(self, piece: Piece) -> dict[str, object] | None:
        return None if self.spelling is None else chat_logprobs(piece.tokens, self.spelling)

    def _chunk(
        self, index: int, delta: dict[str, object], logprobs: dict[str, object] | None = None, reason: str | None = None
    ) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._head("chat.completion.chunk") | {"choices": [choice]}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _message(answer: Piece) -> dict[str, object]:
    if not answer.calls:
        return {"role": "assistant", "content": answer.text, "refusal": None}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    return {"role": "assistant", "content": answer.text or None, "refusal": None, "tool_calls": calls}


def _call_chunk(call: CallDelta) -> dict[str, object]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    begun = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": begun}


@dataclass(slots=True)
class CompletionFormat:
    """The same object name, streamed or not, as the API has it.

    echoes   what stands before the text of each choice
    """

    model: str
    include_usage: bool
    spelling: TokenBytes | None
    echoes: Sequence[str]
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=now)
    _texts: TextEvents = field(init=False)

    def __post_init__(self) -> None:
        self._texts = TextEvents(lambda choice: self._chunk(choice, ""))

    def opening(self) -> bytes:
        return events([self._chunk(choice, echo) for choice, echo in enumerate(self.echoes) if echo])

    def piece(self, piece: Piece) -> bytes:
        if not piece.tokens:
            return self._texts.event(piece.choice, piece.text)
        return event(self._chunk(piece.choice, piece.text, self._logprobs(piece)))

    def ended(self, end: ChoiceEnd) -> bytes:
        return event(self._chunk(end.choice, "", reason=end.reason))

    def closing(self, finished: Finished) -> bytes:
        if not self.include_usage:
            return DONE
        return event(self._head() | {"choices": [], "usage": finished.usage.shown()}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.envelope())

    def whole(self, answers: Sequence[Piece], finished: Finished) -> dict[str, object]:
        choices = [
            _text_choice(answer.choice, self.echoes[answer.choice] + answer.text, self._logprobs(answer), reason)
            for answer, reason in zip(answers, finished.reasons, strict=True)
        ]
        return self._head() | {"choices": choices, "usage": finished.usage.shown()}

    def _logprobs(self, piece: Piece) -> dict[str, object] | None:
        return None if self.spelling is None else completion_logprobs(piece.tokens, self.spelling)

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, object] | None = None, reason: str | None = None
    ) -> dict[str, object]:
        chunk = self._head() | {"choices": [_text_choice(index, text, logprobs, reason)]}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _head(self) -> dict[str, object]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


def _text_choice(index: int, text: str, logprobs: dict[str, object] | None, reason: str | None) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
