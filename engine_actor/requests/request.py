"""The handle of a request that callers hold. Dropping the last one abandons the request: the engine reclaims it at its
next call on the owner thread (F041)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from engine_actor.options import TurnOptions
from engine_actor.requests.record import FinishReason, RequestRecord, RequestStatus, Usage


class RequestCalls(Protocol):
    """What a handle asks of the engine's `Lifecycle`."""

    def begin_turn(self, record: RequestRecord, tokens: Sequence[int], options: TurnOptions) -> int: ...
    def cancel_turn(self, record: RequestRecord, turn_id: int) -> bool: ...
    def set_draft_tokens(self, record: RequestRecord, tokens: Sequence[int]) -> None: ...
    def rewind(self, record: RequestRecord, length: int) -> None: ...
    def fork(self, record: RequestRecord, length: int | None = None) -> Request: ...
    def close(self, record: RequestRecord) -> None: ...
    def note_abandonment(self) -> None: ...


class Request:
    """A caller's handle. Every method must be called on the engine's owner thread, between runs (F047, F048)."""

    def __init__(self, record: RequestRecord, lifecycle: RequestCalls) -> None:
        self._record = record
        self._lifecycle = lifecycle
        # When the last reference goes, on whatever thread, only a flag is set: the owner thread does the work (F041).
        record.handle = weakref.ref(self, lambda _: lifecycle.note_abandonment())

    def begin_turn(self, tokens: Sequence[int], options: TurnOptions | None = None) -> int:
        """Queues input tokens and returns the turn's id (1, 2, ...).

        Raises InvalidOption (no tokens, or one outside the vocabulary), ContextLengthExceeded, or InvalidCall (wrong
        state, or events of this request are not drained yet); nothing is changed then.
        """
        return self._lifecycle.begin_turn(self._record, tokens, options or TurnOptions())

    def cancel_turn(self, turn_id: int) -> bool:
        """Ends the running turn of this id, keeping what was committed; False for an id that is not running (F035)."""
        return self._lifecycle.cancel_turn(self._record, turn_id)

    def set_draft_tokens(self, tokens: Sequence[int]) -> None:
        """Proposes the next tokens of a greedy turn: the next committed step verifies as many of them as fit and keeps
        those that are what it would have generated anyway. Replaces an earlier proposal; none clears it.

        Raises InvalidOption (too many, or one outside the vocabulary) or InvalidCall: the decoder verifies no drafts,
        or the request is not in the middle of a greedy decode without penalties, biases and a minimum length.
        """
        self._lifecycle.set_draft_tokens(self._record, tokens)

    def rewind(self, length: int) -> None:
        """Forgets all tokens from `length` on. Needs a complete turn whose events are drained."""
        self._lifecycle.rewind(self._record, length)

    def fork(self, length: int | None = None) -> Request:
        """A new request with the same tokens, or the first `length` of them, that shares this one's blocks and waits
        for its own first turn. Something of this one must be computed, and a place among the residents be free."""
        return self._lifecycle.fork(self._record, length)

    def close(self) -> None:
        """Releases everything at once, from any state; does nothing the second time (F039)."""
        self._lifecycle.close(self._record)

    @property
    def id(self) -> int:
        return self._record.id

    @property
    def status(self) -> RequestStatus:
        return self._record.status

    @property
    def turn_id(self) -> int:
        return self._record.turn_id

    @property
    def tokens(self) -> list[int]:
        """A copy of the whole sequence."""
        return self._record.history.ids[: self._record.history.length]

    @property
    def current_length(self) -> int:
        return self._record.history.length

    @property
    def num_computed_tokens(self) -> int:
        """Positions in the KV cache."""
        return self._record.num_computed_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._record.finish_reason

    @property
    def usage(self) -> Usage:
        return self._record.usage()
