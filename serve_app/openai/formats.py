"""How an answer is written: chat.completion or text_completion, whole or in chunks.

A format belongs to one answer and is asked in order: opening, pieces, then closing or failed; or whole alone.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.ingress.errors import ApiError
from serve_app.openai.turns import Finished

DONE = b"data: [DONE]\n\n"


class AnswerFormat(Protocol):
    @property
    def end(self) -> bytes:
        """What follows the last event of a stream that did not fail."""
        ...

    def opening(self) -> list[dict[str, object]]:
        """Chunks that are sent before any text."""
        ...

    def piece(self, text: str) -> dict[str, object]: ...

    def closing(self, finished: Finished) -> list[dict[str, object]]:
        """The chunk with finish_reason, then the one with usage if it was asked for."""
        ...

    def failed(self, error: ApiError) -> list[dict[str, object]]:
        """The last events of a stream that can't go on."""
        ...

    def whole(self, text: str, finished: Finished) -> dict[str, object]: ...


def now() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`include_usage`: a last chunk without choices carries usage, and all others say null for it."""

    model: str
    include_usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=now)
    end: bytes = DONE

    def opening(self) -> list[dict[str, object]]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def piece(self, text: str) -> dict[str, object]:
        return self._chunk({"content": text})

    def closing(self, finished: Finished) -> list[dict[str, object]]:
        last = self._chunk({}, finished.reason)
        if not self.include_usage:
            return [last]
        return [last, self._head("chat.completion.chunk") | {"choices": [], "usage": finished.usage.shown()}]

    def failed(self, error: ApiError) -> list[dict[str, object]]:
        return [error.envelope()]

    def whole(self, text: str, finished: Finished) -> dict[str, object]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finished.reason}
        return self._head("chat.completion") | {"choices": [choice], "usage": finished.usage.shown()}

    def _chunk(self, delta: dict[str, object], reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = self._head("chat.completion.chunk") | {"choices": [choice]}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """The same object name, streamed or not, as the API has it."""

    model: str
    include_usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=now)
    end: bytes = DONE

    def opening(self) -> list[dict[str, object]]:
        return []

    def piece(self, text: str) -> dict[str, object]:
        return self._chunk(text)

    def closing(self, finished: Finished) -> list[dict[str, object]]:
        last = self._chunk("", finished.reason)
        if not self.include_usage:
            return [last]
        return [last, self._head() | {"choices": [], "usage": finished.usage.shown()}]

    def failed(self, error: ApiError) -> list[dict[str, object]]:
        return [error.envelope()]

    def whole(self, text: str, finished: Finished) -> dict[str, object]:
        return self._head() | {
            "choices": [_text_choice(text, finished.reason)],
            "usage": finished.usage.shown(),
        }

    def _chunk(self, text: str, reason: str | None = None) -> dict[str, object]:
        chunk = self._head() | {"choices": [_text_choice(text, reason)]}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _head(self) -> dict[str, object]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


def _text_choice(text: str, reason: str | None) -> dict[str, object]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
