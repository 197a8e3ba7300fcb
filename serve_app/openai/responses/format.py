"""How a response of the Responses API is written: the object, and the events of its stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.dated_ids import new_id
from serve_app.ingress.errors import SERVER_ERROR, ApiError
from serve_app.openai.choices import Piece
from serve_app.openai.formats import now
from serve_app.openai.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Event, Output
from serve_app.openai.responses.protocol import ResponsesRequest, WantedReasoning
from serve_app.openai.responses.store import KeptItem
from serve_app.openai.sse import event
from serve_app.openai.structured import WantedText
from serve_app.openai.tools import shown_choice
from serve_app.openai.turns import CANCELLED, ChoiceEnd, Finished, TokenUsage

FAILED = "failed"
_STATUS = {"stop": COMPLETED, "tool_calls": COMPLETED, "length": INCOMPLETE, CANCELLED: CANCELLED}


@dataclass(slots=True)
class ResponseFormat:
    """One response, from creation to its end.

    temperature, top_p   as used: the request's, else the defaults
    """

    body: ResponsesRequest
    model: str
    temperature: float
    top_p: float
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=now)
    _message_id: str = field(default_factory=lambda: new_id("msg"))
    _output: Output = field(init=False)
    _events_sent: int = 0

    def __post_init__(self) -> None:
        self._output = Output(self._message_id)

    def opening(self) -> bytes:
        begun = self.unfinished(IN_PROGRESS)
        return self._events(
            {"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}
        )

    def piece(self, piece: Piece) -> bytes:
        return self._events(*self._output.push(piece))

    def ended(self, end: ChoiceEnd) -> bytes:
        """A response has one answer: its end is told in `closing`."""
        return b""

    def closing(self, finished: Finished) -> bytes:
        (reason,) = finished.reasons
        ends = self._output.finish(_item_status(_STATUS[reason]))
        whole = self._finished(self._output, finished)
        # The API has no event of its own for a response that was cancelled.
        last = "response.completed" if whole["status"] == COMPLETED else "response.incomplete"
        return self._events(*ends, {"type": last, "response": whole})

    def failed(self, error: ApiError) -> bytes:
        # The API has one code for all that is the server's to mend.
        code = "server_error" if error.type == SERVER_ERROR else error.code
        content: dict[str, object] = {"code": code, "message": error.message}
        whole = self._response(FAILED, output=self._output.items(INCOMPLETE), error=content)
        return self._events({"type": "response.failed", "response": whole})

    def whole(self, answers: Sequence[Piece], finished: Finished) -> dict[str, object]:
        (answer,) = answers
        output = Output(self._message_id)
        output.push(answer)
        output.finish(COMPLETED)
        return self._finished(output, finished)

    def _finished(self, output: Output, finished: Finished) -> dict[str, object]:
        (reason,) = finished.reasons
        status = _STATUS[reason]
        return self._response(
            status,
            output=output.items(_item_status(status)),
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
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": (body.reasoning or WantedReasoning()).shown(),
            "store": body.stored,
            "temperature": self.temperature,
            "text": (body.text or WantedText()).shown(),
            "tool_choice": shown_choice(body.tool_choice),
            "tools": [tool.shown() for tool in body.tools or ()],
            "top_logprobs": 0,
            "top_p": self.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }

    def _events(self, *events: Event) -> bytes:
        first, self._events_sent = self._events_sent, self._events_sent + len(events)
        return b"".join(event({**one, "sequence_number": number}) for number, one in enumerate(events, first))


def as_json(shown: dict[str, object]) -> str:
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def kept_items(shown: str, response: Mapping[str, Any]) -> tuple[KeptItem, ...]:
    """Where in `shown`, which is this response as JSON, the items of its output stand."""
    items: list[KeptItem] = []
    at = 0
    for item in response["output"]:
        text = as_json(item)
        begin = shown.index(text, at)  # no text of a client can be it: inside of a string quotes are escaped
        at = begin + len(text)
        items.append(KeptItem(item["id"], begin, at))
    return tuple(items)


def _item_status(status: str) -> str:
    """An item knows no cancellation."""
    return COMPLETED if status == COMPLETED else INCOMPLETE


def _usage(usage: TokenUsage) -> dict[str, object]:
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
