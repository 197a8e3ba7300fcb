"""The engine's own state of one sequence that lives through many turns.

NEW -- begin_turn --> WAITING -- first step --> RUNNING -- turn ends --> IDLE
                         ^                                                |
                         +------------------ begin_turn ------------------+
every state -- close --> CLOSED
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from engine_actor.options import RequestOptions, TurnOptions

if TYPE_CHECKING:
    from engine_actor.memory.prefix_index import PrefixMatch
    from engine_actor.sampling.grammar_cursor import Cursor


class RequestStatus(StrEnum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    IDLE = "idle"
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
    """Tokens [0, num_computed_tokens) are in the KV cache, [num_computed_tokens, length) wait."""

    __slots__ = (
        "admitted",
        "cached_tokens",
        "drafts",
        "end_length",
        "end_tokens",
        "finish_reason",
        "grammar_cursor",
        "handle",
        "history",
        "id",
        "match_cache",
        "max_total",
        "num_computed_tokens",
        "options",
        "overtaken",
        "passed_over",
        "pending_events",
        "plain",
        "preemptions",
        "prompt_boundary",
        "residency",
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
        self.num_computed_tokens = 0
        self.residency = 0  # order in which requests came to own memory
        self.status = RequestStatus.NEW
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
        self.grammar_cursor: Cursor | None = None  # of a turn whose answer follows a grammar
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
        self.handle: weakref.ref[object] | None = None  # the caller's, see `Request`

    @property
    def abandoned(self) -> bool:
        """Nobody outside holds a handle any more."""
        return self.handle is None or self.handle() is None

    @property
    def has_turn(self) -> bool:
        return self.status is RequestStatus.RUNNING or self.status is RequestStatus.WAITING

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.prompt_boundary

    @property
    def tokens_left(self) -> int:
        """Tokens that this turn may still generate."""
        return self.end_length - self.history.length

    def usage(self) -> Usage:
        return Usage(self.turn_prompt_tokens, self.turn_generated, self.cached_tokens)
