"""Server-sent events: JSON objects, and the one kind that a stream mostly consists of."""

from __future__ import annotations

import json
from collections.abc import Callable

DONE = b"data: [DONE]\n\n"

# One encoder for all events: json.dumps with options would build a new one for each.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(content: dict[str, object]) -> bytes:
    """An object that has a type is an event of that name."""
    name = f"event: {content['type']}\n".encode() if "type" in content else b""
    return name + b"data: " + _ENCODER.encode(content).encode() + b"\n\n"


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
        return frame[0] + _ENCODER.encode(text).encode() + frame[1]
