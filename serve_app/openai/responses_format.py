"""How a response of the Responses API is written: the object, and the events of its stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.ingress.errors import ApiError
from serve_app.openai.choices import Piece
from serve_app.openai.formats import now
from serve_app.openai.responses_protocol import ResponsesRequest
from serve_app.openai.sse import event, events
from serve_app.openai.structured import WantedText
from serve_app.openai.turns import CANCELLED, ChoiceEnd, Finished, Usage

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
_STATUS = {"stop": COMPLETED, "length": INCOMPLETE, CANCELLED: CANCELLED}


@dataclass(slots=True)
class ResponseFormat:
    """One response, from creation to its end. Its output is one message with one text.

    temperature, top_p   as used: the request's, else the defaults
    """

    body: ResponsesRequest
    model: str
    temperature: float
    top_p: float
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=now)
    _message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _pieces: list[str] = field(default_factory=list)
    _sent: int = 0

    def opening(self) -> bytes:
        begun = self.unfinished(IN_PROGRESS)
        return events(
            [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=self._message(IN_PROGRESS, [])),
                self._part_event("response.content_part.added", part=_text_part("")),
            ]
        )

    def piece(self, piece: Piece) -> bytes:
        self._pieces.append(piece.text)
        return event(self._part_event("response.output_text.delta", delta=piece.text, logprobs=[]))

    def ended(self, end: ChoiceEnd) -> bytes:
        """A response has one answer: its end is told in `closing`."""
        return b""

    def closing(self, finished: Finished) -> bytes:
        text = "".join(self._pieces)
        whole = self.whole([Piece(0, text)], finished)
        (reason,) = finished.reasons
        item = self._message(_item_status(_STATUS[reason]), [_text_part(text)])
        # The API has no event of its own for a response that was cancelled.
        last = "response.completed" if whole["status"] == COMPLETED else "response.incomplete"
        return events(
            [
                self._part_event("response.output_text.done", text=text, logprobs=[]),
                self._part_event("response.content_part.done", part=_text_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(last, response=whole),
            ]
        )

    def failed(self, error: ApiError) -> bytes:
        said: dict[str, object] = {"code": "server_error", "message": error.message}
        output = [self._message(INCOMPLETE, [_text_part("".join(self._pieces))])]
        return event(self._event("response.failed", response=self._response(FAILED, output=output, error=said)))

    def whole(self, answers: Sequence[Piece], finished: Finished) -> dict[str, object]:
        (answer,), (reason,) = answers, finished.reasons
        status = _STATUS[reason]
        return self._response(
            status,
            output=[self._message(_item_status(status), [_text_part(answer.text)])],
            usage=_usage(finished.usage),
            incomplete_details={"reason": "max_output_tokens"} if status == INCOMPLETE else None,
        )

    def unfinished(self, status: str) -> dict[str, object]:
        """The response before anything of its output is known."""
        return self._response(status, output=[])

    def _response(
        self,
        status: str,
        *,
        output: list[dict[str, object]],
        usage: dict[str, object] | None = None,
        incomplete_details: dict[str, object] | None = None,
        error: dict[str, object] | None = None,
    ) -> dict[str, object]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete_details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.stored,
            "temperature": self.temperature,
            "text": (self.body.text or WantedText()).shown(),
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
        }

    def _message(self, status: str, content: list[dict[str, object]]) -> dict[str, object]:
        return {"id": self._message_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part_event(self, kind: str, **fields: object) -> dict[str, object]:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> dict[str, object]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}


def as_json(shown: dict[str, object]) -> str:
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def _item_status(status: str) -> str:
    """A message knows no cancellation."""
    return COMPLETED if status == COMPLETED else INCOMPLETE


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
