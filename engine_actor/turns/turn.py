"""A turn that is open on a replica, from the owner thread's side: it waits, or its choices run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_actor.messages import TurnDelta, TurnRequest
from engine_actor.sessions.session import Session
from engine_actor.sessions.table import BegunTurn


@dataclass(eq=False, slots=True)
class Turn:
    """One call of `stream_turn`. `receive` takes its deltas on the event loop. `choices` are those that run; before the
    turn begins, and after it is over, there are none."""

    request: TurnRequest
    receive: Callable[[list[TurnDelta | None]], None]
    session: Session | None = None
    choices: list[Choice] = field(default_factory=list)
    begun_at: float = 0.0
    over: bool = False

    @property
    def resumed(self) -> bool:
        """Another replica had accepted it, so no limit of a queue may end it."""
        return self.request.resumed_tokens is not None

    @property
    def may_begin(self) -> bool:
        """No earlier turn of its session runs or waits. Asked of turns that wait."""
        session = self.session
        return session is None or (not session.running and session.waiting[0] is self)

    @property
    def tokens_due(self) -> int:
        """To be computed before its answer, about: what its session has cached is taken off; what the prefix index has
        is not known before it begins."""
        resident = None if self.session is None else self.session.request
        return max(1, len(self.request.prompt_ids) - (0 if resident is None else resident.num_computed_tokens))


@dataclass(eq=False, slots=True)
class Choice:
    """One answer of a turn. The first one computes the prompt; the others branch off when it is done."""

    turn: Turn
    index: int
    begun: BegunTurn
    branched: bool

    @property
    def stays(self) -> bool:
        """Its request stays resident for the next turn of a session."""
        return self.index == 0 and self.turn.session is not None

    @property
    def sequences(self) -> int:
        """Of `max_running_sequences`: its own, and those of the choices that will branch off it."""
        return 1 if self.branched else self.turn.request.choices


Delivery = list[tuple[Turn, list[TurnDelta | None]]]
"""Deltas by turn; None is what follows the last one."""
