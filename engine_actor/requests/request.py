"""A request: one sequence that lives through many turns.

    UNASSIGNED -- begin_turn --> ASSIGNED -- first step --> ACTIVE -- turn ends --> TURN_COMPLETE
                                    ^                                                    |
                                    +------------------- begin_turn ---------------------+
    every state -- close --> CLOSED

`RequestRecord` is the engine's own state; `Request` is the handle that callers hold. Dropping the last handle abandons
the request: the engine reclaims it at its next call on the owner thread (F041).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from engine_actor.options import RequestOptions, TurnOptions

if TYPE_CHECKING:
    from engine_actor.core.lifecycle import Lifecycle
    from engine_actor.memory.prefix_index import PrefixMatch
    from engine_actor.sampling.guidance_cursor import Cursor


class RequestStatus(StrEnum):
    UNASSIGNED = "unassigned"
    ASSIGNED = "assigned"
    ACTIVE = "active"
    TURN_COMPLETE = "turn_complete"
    CLOSED = "closed"


class FinishReason(StrEnum):
    """Why a turn ended. Where several apply at once: Eos, StopSequence, MaxSessionTokens, MaxGeneratedTokens (C27)."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    MAX_SESSION_TOKENS = "max_session_tokens"
    MAX_GENERATED_TOKENS = "max_generated_tokens"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Usage:
    """Input accepted and output generated in one turn (F031), and input positions that were not recomputed."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int


class TokenHistory:
    """The host's mirror of a sequence: prompt, output and continuation input, in order (F058).

        ids   [0 ........ length)[length ...]
               committed          staged places, while a step is live: one for each token that it may add

    A step stages the places before the model runs, so that publishing a token grows nothing.
    """

    __slots__ = ("ids", "length")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        self.length = len(self.ids)

    def truncate(self, length: int) -> None:
        del self.ids[length:]
        self.length = length

    def stage(self, places: int) -> None:
        self.ids.extend([-1] * places)

    def publish(self, token: int) -> None:
        self.ids[self.length] = token
        self.length += 1

    def unstage(self) -> None:
        del self.ids[self.length :]


class RequestRecord:
    """Counters follow PARITY C: tokens [0, processed) are in the KV cache, [processed, length) wait."""

    __slots__ = (
        "admitted",
        "cached_tokens",
        "drafts",
        "end_length",
        "end_tokens",
        "finish_reason",
        "guide",
        "handle",
        "history",
        "id",
        "match_cache",
        "max_total",
        "options",
        "overtaken",
        "passed_over",
        "pending_events",
        "plain",
        "preemptions",
        "processed",
        "prompt_boundary",
        "served",
        "status",
        "submitted",
        "turn_generated",
        "turn_id",
        "turn_options",
        "turn_prompt_tokens",
    )

    def __init__(self, request_id: int, options: RequestOptions, max_total: int) -> None:
        self.id = request_id
        self.options = options
        self.max_total = max_total
        self.history = TokenHistory()
        self.processed = 0
        self.status = RequestStatus.UNASSIGNED
        self.turn_id = 0
        self.turn_options = TurnOptions()
        self.turn_prompt_tokens = 0
        self.turn_generated = 0
        self.cached_tokens = 0
        self.prompt_boundary = 0
        # Facts of the turn's options, worked out once because every step of every row asks for them.
        self.end_length = max_total  # the sequence's length at which a limit ends the turn
        self.end_tokens: frozenset[int] = frozenset()  # these end it without being part of it
        self.plain = True  # its logits choose the token as they are
        self.guide: Cursor | None = None  # of a turn whose answer follows a grammar
        self.drafts: tuple[int, ...] = ()  # proposed by the caller for the next committed step
        self.finish_reason: FinishReason | None = None
        self.admitted = False  # the current turn has had its first committed step
        self.submitted = 0  # order of begin_turn over the whole engine
        self.passed_over = 0  # steps in a row in which it could run and was left out
        self.served = 0  # grows with every step of any request: lower means served longer ago
        self.overtaken = 0  # requests admitted past it while it waited for memory
        self.preemptions = 0  # of the current turn
        self.pending_events = 0
        self.match_cache: tuple[int, int, PrefixMatch] | None = None  # index generation, length, shared prefix
        self.handle: weakref.ref[Request] | None = None

    @property
    def abandoned(self) -> bool:
        """Nobody outside holds a handle any more."""
        return self.handle is None or self.handle() is None

    @property
    def executable(self) -> bool:
        return self.status is RequestStatus.ACTIVE or self.status is RequestStatus.ASSIGNED

    @property
    def is_prefill(self) -> bool:
        return self.processed < self.prompt_boundary

    @property
    def tokens_left(self) -> int:
        """Tokens that this turn may still generate."""
        return self.end_length - self.history.length

    def usage(self) -> Usage:
        return Usage(self.turn_prompt_tokens, self.turn_generated, self.cached_tokens)


class Request:
    """A caller's handle. Every method must be called on the engine's owner thread, between runs (F047, F048)."""

    def __init__(self, record: RequestRecord, lifecycle: Lifecycle) -> None:
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
    def processed_length(self) -> int:
        """Positions in the KV cache."""
        return self._record.processed

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._record.finish_reason

    @property
    def usage(self) -> Usage:
        return self._record.usage()
