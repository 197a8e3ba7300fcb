"""What names a conversation in a request that is only looked at: its header, or the beginning of its body.

The picker sees the session header and the first bytes of a body, nothing else. A body that was cut off is read as far
as it goes. What can't be read names nothing: the replica will refuse it in better words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

# Fields that name the conversation by themselves, the better one first, and what begins it otherwise.
_NAMES = ("session_id", "previous_response_id", "user")
_BEGINNINGS = ("messages", "input", "prompt")
# Characters or items: enough to tell conversations apart, and no more than what a turn adds.
_LONGEST = 256

_decoder = json.JSONDecoder()


def conversation_name(session_header: str | None, body: bytes) -> str | None:
    """A hash that is the same for all turns of a conversation, as far as this much of a request can tell; None where it
    can't. `body` may have been cut off anywhere."""
    if session_header:
        return _hash("session_id", session_header)
    text = body.decode("utf-8", "replace")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = dict(_fields(text))
    if not isinstance(fields, dict):
        return None
    for name in _NAMES:
        if isinstance(fields.get(name), str) and fields[name]:
            return _hash(name, fields[name])
    for name in _BEGINNINGS:
        if isinstance(fields.get(name), str | list) and fields[name]:
            return _hash(name, [fields.get("model"), _opening(fields[name])])
    return None


def _hash(kind: str, value: object) -> str:
    return hashlib.sha256(json.dumps([kind, value]).encode("utf-8", "surrogatepass")).hexdigest()


def _opening(said: str | list[Any]) -> str | list[Any]:
    """Messages up to the user's first one; of anything else the first characters or items."""
    is_user = (isinstance(item, dict) and item.get("role") == "user" for item in said)
    return said[: next((i + 1 for i, yes in enumerate(is_user) if yes), _LONGEST)]


def _fields(text: str) -> Iterator[tuple[str, Any]]:
    """The fields of a JSON object as they come, until the text ends; of messages those that are whole."""
    at = _past(text, 0, "{")
    try:
        while at is not None:
            name, at = _value(text, at)
            at = _past(text, at, ":")
            if at is None or not isinstance(name, str):
                return
            if name in _BEGINNINGS and (first := _past(text, at, "[")) is not None:
                items, at = _items(text, first)
                yield name, items
            else:
                value, at = _value(text, at)
                yield name, value
            at = None if at is None else _past(text, at, ",")
    except (ValueError, RecursionError):
        return


def _items(text: str, first: int) -> tuple[list[Any], int | None]:
    """The items of an array, and where it ends; None if the text ends before. `first`: the place after its bracket."""
    items: list[Any] = []
    at: int | None = first
    while at is not None:
        if (end := _past(text, at, "]")) is not None:
            return items, end
        try:
            item, after = _value(text, at)
        except (ValueError, RecursionError):
            break
        items.append(item)
        at = _past(text, after, ",") or after
    return items, None


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at this place or after white space, and the place after it. Raises ValueError."""
    start = _past(text, at, "")
    if start is None:
        raise ValueError("the text ends")
    return _decoder.raw_decode(text, start)


def _past(text: str, at: int, wanted: str) -> int | None:
    """The place after white space and `wanted`; None where the text ends or something else stands there."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at + len(wanted) if at < len(text) and text.startswith(wanted, at) else None
