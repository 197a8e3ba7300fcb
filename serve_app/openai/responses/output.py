"""What a response gives: a message if there is text, then the calls of functions, and the events that tell of them.

An answer with neither is a message with an empty text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.openai.choices import Piece
from serve_app.openai.tools import parsed_arguments
from serve_app.text.calls import CallDelta

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"

Event = dict[str, object]


@dataclass(slots=True)
class _Call:
    begun: CallDelta
    parts: list[str] = field(default_factory=list)

    @property
    def item_id(self) -> str:
        """From the call's own id, so that the item has the same wherever it is shown."""
        return self.begun.id.replace("call_", "fc_", 1)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)

    def item(self, *, begins: bool = False) -> dict[str, object]:
        arguments = "" if begins else self.arguments
        # No beginning of a JSON object is one itself, so these say whether a limit has cut them.
        status = IN_PROGRESS if begins else INCOMPLETE if parsed_arguments(arguments) is None else COMPLETED
        call = {"call_id": self.begun.id, "name": self.begun.name, "arguments": arguments}
        return {"id": self.item_id, "type": "function_call", "status": status, **call}


class Output:
    """Pieces of the one answer in, events and items out. Events have no numbers yet."""

    def __init__(self, message_id: str) -> None:
        self._message_id = message_id
        self._text: list[str] | None = None
        self._calls: list[_Call] = []

    def push(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.text:
            if self._text is None:
                events += self._begin_message()
            assert self._text is not None and not self._calls, "text comes before all calls"
            self._text.append(piece.text)
            events.append(self._text_event("delta", delta=piece.text))
        for delta in piece.calls:
            if delta.name:
                events += [*self._end_last(COMPLETED), self._begin_call(delta)]
            if delta.arguments:
                self._calls[-1].parts.append(delta.arguments)
                events.append(self._arguments_event("delta", delta=delta.arguments))
        return events

    def finish(self, status: str) -> list[Event]:
        """No more comes. `status`: of a message, if that is the last item."""
        begun = [] if self._text is not None or self._calls else self._begin_message()
        return [*begun, *self._end_last(status)]

    def items(self, status: str) -> list[dict[str, object]]:
        message = [] if self._text is None else [self._message(COMPLETED if self._calls else status)]
        return [*message, *(call.item() for call in self._calls)]

    def _begin_message(self) -> list[Event]:
        self._text = []
        item = self._message(IN_PROGRESS) | {"content": []}
        return [
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **self._part, "part": _text_part("")},
        ]

    def _begin_call(self, begun: CallDelta) -> Event:
        self._calls.append(_Call(begun))
        item = self._calls[-1].item(begins=True)
        return {"type": "response.output_item.added", "output_index": self._last_index, "item": item}

    def _end_last(self, status: str) -> list[Event]:
        """`status`: of a message; a call has its own."""
        if self._calls:
            call = self._calls[-1]
            event = self._arguments_event("done", name=call.begun.name, arguments=call.arguments)
            item = call.item()
            return [event, {"type": "response.output_item.done", "output_index": self._last_index, "item": item}]
        if self._text is None:
            return []
        text, item = "".join(self._text), self._message(status)
        return [
            self._text_event("done", text=text),
            {"type": "response.content_part.done", **self._part, "part": _text_part(text)},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
        ]

    @property
    def _last_index(self) -> int:
        return (self._text is not None) + len(self._calls) - 1

    @property
    def _part(self) -> Event:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _text_event(self, kind: str, **fields: object) -> Event:
        return {"type": f"response.output_text.{kind}", **self._part, **fields, "logprobs": []}

    def _arguments_event(self, kind: str, **fields: object) -> Event:
        of = {"item_id": self._calls[-1].item_id, "output_index": self._last_index}
        return {"type": f"response.function_call_arguments.{kind}", **of, **fields}

    def _message(self, status: str) -> dict[str, object]:
        content = [_text_part("".join(self._text or ()))]
        return {"id": self._message_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
