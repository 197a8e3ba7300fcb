"""Server-sent events: JSON objects, and the one kind that a stream mostly consists of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

DONE = b"data: [DONE]\n\n"

# One encoder for all events: json.dumps with options would build a new one for each.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# Ends of lines for Unicode, and for clients that cut a stream where it says so; JSON leaves these three as they are.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def on_one_line(text: str) -> str:
    """The same JSON without an end of a line in it, whoever reads it."""
    return text if text.isascii() else _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _encoded(content: object) -> bytes:
    return on_one_line(_ENCODER.encode(content)).encode()


def event(content: dict[str, object]) -> bytes:
    """An object that has a type is an event of that name."""
    name = f"event: {content['type']}\n".encode() if "type" in content else b""
    return name + b"data: " + _encoded(content) + b"\n\n"


def events(contents: list[dict[str, object]]) -> bytes:
    return b"".join(map(event, contents))


class TextEvents:
    """Events of which only one text changes: of each choice one is written as a whole, the others put their text into
    it. The bytes are those that `event` writes."""

    def __init__(self, empty: Callable[[int], dict[str, object]]) -> None:
        """`empty`: the object of a choice with an empty text, which is the last empty string in it."""
        self._empty = empty
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def event(self, choice: int, text: str) -> bytes:
        frame = self._frames.get(choice)
        if frame is None:
            before, _, after = event(self._empty(choice)).rpartition(b'""')
            frame = self._frames[choice] = before, after
        return frame[0] + _encoded(text) + frame[1]
