"""What tests see and change of an actor behind its public face: its owner thread's loop, and what the sessions are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine_actor.actor.actor import EngineActor
from engine_actor.actor.owner_loop import OwnerLoop
from engine_actor.messages import TurnDelta
from engine_actor.sessions.deletions import RecentDeletions
from engine_actor.sessions.session import Session
from engine_actor.sessions.table import SessionTable
from engine_actor.turns.turn import Choice, Turn


def owner_of(actor: EngineActor) -> OwnerLoop:
    """The loop of a started actor's owner thread."""
    assert actor._owner is not None
    return actor._owner


class LoopView:
    """An owner loop without its thread: a test makes its rounds."""

    def __init__(self, loop: OwnerLoop) -> None:
        self._loop = loop

    @property
    def running(self) -> dict[int, Choice]:
        """By engine request."""
        return self._loop._running

    def round(self) -> None:
        """One transaction, if there is work, and nothing delivered of it yet."""
        self._loop._round()

    def flush(self) -> None:
        self._loop._flush()

    def begin_waiting(self) -> None:
        self._loop._begin_waiting()

    def take(self, turn: Turn) -> Sequence[TurnDelta | None]:
        """What a turn would be told at the next flush, which then tells it nothing."""
        return self._loop._outbox.pop(turn)


def sessions_of(table: SessionTable) -> OrderedDict[str, Session]:
    """By key; those that own no memory included, least recently used first."""
    return table._sessions


def remembered(deletions: RecentDeletions) -> list[str]:
    """A copy of the keys, oldest first."""
    return list(deletions._at)
