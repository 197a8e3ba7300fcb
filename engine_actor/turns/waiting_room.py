"""Where turns wait until they begin: who is let in, who is next, and what those hear who are sent away."""

from __future__ import annotations

from dataclasses import dataclass

from engine_actor.messages import RefusalCode
from engine_actor.sessions.session import Session
from engine_actor.turns.hold_times import LEAST_WAIT_SECONDS, HoldTimes
from engine_actor.turns.queue import TurnQueue
from engine_actor.turns.turn import Turn


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """See ActorOptions."""

    max_running_sequences: int
    max_queued_turns: int
    max_turns_per_session: int


class WaitingRoom:
    """`running` is always the number of places that running turns have."""

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        self._times = HoldTimes(limits.max_running_sequences)
        self.queue: TurnQueue[Turn] = TurnQueue()

    def refusal(self, turn: Turn, running: int, of_session: int) -> tuple[RefusalCode, str] | None:
        """Why a new turn can't come in, if it can't. `of_session`: turns of its session that run or wait."""
        if turn.resumed:
            return None
        waits = of_session or self.queue.first() is not None or not self._fits(turn, running)
        if of_session >= self._limits.max_turns_per_session:
            return RefusalCode.SESSION_BUSY, f"{of_session} turns of this session run or wait already"
        if waits and len(self.queue) >= self._limits.max_queued_turns:
            full = f"{len(self.queue)} turns are waiting already"
            if of_session:  # no reason to go elsewhere: the session is here
                return RefusalCode.SESSION_BUSY, f"{full}, and {of_session} turns of this session run or wait here"
            return RefusalCode.QUEUE_FULL, full
        return None

    def enter(self, turn: Turn, session: Session | None) -> None:
        self.queue.put(turn)
        self.follow(turn, session)

    def follow(self, turn: Turn, session: Session | None) -> None:
        """It is of this session from now on, and keeps its place."""
        turn.session = session
        if session is not None:
            session.line_up(turn)

    def of_session(self, session: Session) -> list[Turn]:
        """Its turns that wait, in their order."""
        turns = [turn for turn in session.waiting if isinstance(turn, Turn)]
        assert len(turns) == len(session.waiting)
        return turns

    def leave(self, turn: Turn) -> None:
        self.queue.remove(turn)
        if turn.session is not None:
            turn.session.waiting.remove(turn)

    def next(self, running: int) -> Turn | None:
        """The turn that begins now, if one does: it has left."""
        turn = self.queue.first()
        if turn is None or not self._fits(turn, running):
            return None
        self.leave(turn)
        return turn

    def _fits(self, turn: Turn, running: int) -> bool:
        """A turn that is larger than the limit runs alone."""
        return not running or running + turn.request.choices <= self._limits.max_running_sequences

    def note_hold(self, seconds: float) -> None:
        """A place was taken for so long, and is free again."""
        self._times.note(seconds)

    def retry_after(self, code: RefusalCode) -> float:
        """Seconds. Where the queue is full, one should come back when those that wait now have begun."""
        match code:
            case RefusalCode.QUEUE_FULL:
                return self._times.until_free(self.queue.sequences)
            case RefusalCode.SESSION_BUSY:
                return self._times.until_over()
            case RefusalCode.UNAVAILABLE:
                return LEAST_WAIT_SECONDS
            case RefusalCode.CONTEXT_LENGTH | RefusalCode.INVALID | RefusalCode.GRAMMAR:
                return 0.0
