"""A session as a replica remembers it, and what of it a turn's prompt can use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine_actor.messages import TurnRequest
from engine_actor.options import TurnOptions
from engine_actor.requests.request import Request

SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that the choices of one turn have different seeds, however many they are


@dataclass(slots=True)
class AnswerSpan:
    """Tokens [start, end) of a session are an answer: the client said so, and what its text's digest is, or they
    were generated here, and the digest is computed when it is needed."""

    start: int
    end: int
    digest: bytes | None = None


class WaitingTurn(Protocol):
    """What a session knows of a turn of its own that has not begun."""

    @property
    def resumed(self) -> bool:
        """Another replica had accepted it."""
        ...


@dataclass(slots=True)
class Session:
    """`request` is None once its memory was evicted; `tokens` then keeps the sequence. `waiting` holds its turns that
    have not begun, in order; they are in the owner loop's queue. `moved`: it came from another replica, and no turn has
    used it here."""

    key: str
    cache_scope: str
    session_id: str
    last_used: float
    request: Request | None = None
    tokens: list[int] = field(default_factory=list)
    answers: list[AnswerSpan] = field(default_factory=list)
    running: bool = False
    moved: bool = False
    waiting: deque[WaitingTurn] = field(default_factory=deque)

    @property
    def open_turns(self) -> int:
        return self.running + len(self.waiting)

    @property
    def dormant(self) -> bool:
        """Something of it is known, and no turn is using it or about to."""
        length = len(self.tokens) if self.request is None else self.request.current_length
        return length > 0 and not self.open_turns

    def line_up(self, turn: WaitingTurn) -> None:
        """Behind its other turns, but for one that another replica had begun: that was before them."""
        ahead = sum(other.resumed for other in self.waiting) if turn.resumed else len(self.waiting)
        self.waiting.insert(ahead, turn)

    def sequence(self) -> list[int]:
        return self.request.tokens if self.request is not None else self.tokens


def options_of(turn: TurnRequest, choice: int = 0) -> TurnOptions:
    """What the engine is told for one choice of a turn. Choices differ in their random streams alone."""
    sampling = turn.sampling
    if choice:
        sampling = replace(sampling, seed=(sampling.seed + choice * SEED_STEP) % 2**64)
    return TurnOptions(
        max_generated_tokens=turn.max_generated_tokens,
        sampling=sampling,
        stop_token_ids=turn.stop_token_ids,
        ignore_eos=turn.ignore_eos,
        priority=turn.priority,
        min_generated_tokens=turn.min_generated_tokens,
        logprobs=turn.logprobs,
        resumed_tokens=turn.resumed_tokens or 0,
        grammar=turn.grammar,
    )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, compared in slices, since both are long and mostly equal."""
    limit, step, at = min(len(a), len(b)), 512, 0
    while at < limit and a[at : at + step] == b[at : at + step]:
        at += step
    at = min(at, limit)
    while at < limit and a[at] == b[at]:
        at += 1
    return at
