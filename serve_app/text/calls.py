"""Calls of tools in an answer: how they are written, and how they are told from text as it arrives.

An answer is text, then calls; or, where its text has a form of its own such as JSON, one of the two. A call is written

    <tool_call>
    {"name": "look_up", "arguments": {"word": "moor"}}
    </tool_call>

A grammar keeps the model to this form (`openai/tools.py`), so a call is found by its fixed parts alone: its closing
begins with `}` and a line break, and no line break stands in JSON that is written in one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from serve_app.dated_ids import new_id
from serve_app.text.stream import overlap

OPENING, CLOSING = "<tool_call>", "}\n</tool_call>"
_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The next part of an answer's call number `index`: with a name it begins, and `id` is then its own."""

    index: int
    arguments: str = ""
    name: str = ""
    id: str = ""


class Calls(Enum):
    """Where calls may be in an answer."""

    NOWHERE = auto()
    AFTER_TEXT = auto()
    OR_TEXT = auto()  # it begins with them, or has none: in a text in JSON what looks like a call is a part of a string


class _State(Enum):
    START = auto()  # a call or a text that has none
    PLAIN = auto()
    TEXT = auto()
    HEAD = auto()  # after an opening
    ARGUMENTS = auto()
    AFTER = auto()  # after a closing


class CallSplitter:
    """Text of one answer in; out comes what is text, and what belongs to calls."""

    def __init__(self, calls: Calls = Calls.AFTER_TEXT) -> None:
        self._state = _State.TEXT if calls is Calls.AFTER_TEXT else _State.START
        self._held = ""
        self._space = ""  # before the first opening
        self._arguments: list[str] = []  # of the last call
        self.calls = 0  # begun so far
        self.cut = False  # the answer has ended within a call's arguments

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._held += text
        shown: list[str] = []
        deltas: list[CallDelta] = []
        while self._step(shown, deltas):
            pass
        return "".join(shown), joined_calls(deltas)

    def finish(self) -> tuple[str, list[CallDelta]]:
        """No more comes. An answer that a limit or a stop string has cut keeps what there is of it: of a call its
        arguments so far, as text what did not become one. A call that lacks no more than its closing is whole."""
        held, self._held = self._held, ""
        if self._state is _State.ARGUMENTS:
            arguments = "".join(self._arguments)
            if _is_json(arguments):
                return "", []
            self.cut = not _is_json(arguments + held)
            return "", [CallDelta(self.calls - 1, held)] if held else []
        if self._state is _State.HEAD:
            held = self._space + OPENING + held
        return ("" if self.calls else held), []

    def _step(self, shown: list[str], deltas: list[CallDelta]) -> bool:
        """Takes from what is held as much as is certain; whether there may be more."""
        held = self._held
        match self._state:
            case _State.START:
                if held.startswith(OPENING):
                    self._state = _State.TEXT
                elif not OPENING.startswith(held):
                    self._state = _State.PLAIN
                else:
                    return False
                return True
            case _State.PLAIN:
                shown.append(held)
                self._held = ""
                return False
            case _State.TEXT:
                at = held.find(OPENING)
                if at >= 0:
                    shown.append(held[:at].rstrip())
                    self._space = held[len(shown[-1]) : at]
                    self._held, self._state = held[at + len(OPENING) :], _State.HEAD
                    return True
                # White space before a call is no text, so it waits for what follows it.
                sure = len(held[: len(held) - overlap(held, OPENING)].rstrip())
                shown.append(held[:sure])
                self._held = held[sure:]
                return False
            case _State.HEAD:
                head = _HEAD.match(held)
                if head is None:
                    return False
                deltas.append(CallDelta(self.calls, "", json.loads(head[1]), new_id("call", 24)))
                self.calls += 1
                self._arguments.clear()
                self._held, self._state = held[head.end() :], _State.ARGUMENTS
                return True
            case _State.ARGUMENTS:
                at = held.find(CLOSING)
                end = at if at >= 0 else len(held) - overlap(held, CLOSING)
                if end:
                    deltas.append(CallDelta(self.calls - 1, held[:end]))
                    self._arguments.append(held[:end])
                self._held = held[end:] if at < 0 else held[at + len(CLOSING) :]
                if at >= 0:
                    self._state = _State.AFTER
                return at >= 0
            case _State.AFTER:
                at = held.find(OPENING)
                if at < 0:
                    return False
                self._held, self._state = held[at + len(OPENING) :], _State.HEAD
                return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def written_call(name: str, arguments: Mapping[str, object] | str) -> str:
    """A call as a model writes it. Arguments that are a text stand as they are."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{OPENING}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}\n</tool_call>'


def joined_calls(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """One delta for each call: all that these say of it. Deltas come in order of their calls."""
    joined: list[CallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined
