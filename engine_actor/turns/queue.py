"""The turns that wait on a replica, in the order in which they begin.

    1. those that another replica had accepted
    2. those of lower priority numbers
    3. those that arrived earlier

A turn that must wait for an earlier one of its session keeps its place meanwhile: it is passed over, and when that one
is over it comes before all that arrived after it. So no turn waits twice, once for its session and once for the queue.
Nothing else overtakes: while the first one does not fit, none behind it begins, or a turn with many choices could wait
for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine_actor.messages import TurnRequest


class Waits(Protocol):
    @property
    def request(self) -> TurnRequest: ...

    @property
    def may_begin(self) -> bool:
        """No earlier turn of its session runs or waits."""
        ...


T = TypeVar("T", bound=Waits)
Rank = tuple[bool, int, int]


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    rank: Rank
    turn: T


def _rank(entry: _Entry[T]) -> Rank:
    return entry.rank


class TurnQueue(Generic[T]):
    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []
        self._ranks: dict[T, Rank] = {}
        self._arrivals = 0

    def put(self, turn: T) -> None:
        assert turn not in self._ranks
        request = turn.request
        self._arrivals += 1
        rank = self._ranks[turn] = (request.resumed_tokens is None, request.priority, self._arrivals)
        insort(self._entries, _Entry(rank, turn), key=_rank)

    def remove(self, turn: T) -> None:
        del self._entries[bisect_left(self._entries, self._ranks.pop(turn), key=_rank)]

    def first(self) -> T | None:
        """The one that begins next, as soon as it fits."""
        return next((turn for turn in self if turn.may_begin), None)

    def __iter__(self) -> Iterator[T]:
        return (entry.turn for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def sequences(self) -> int:
        """Sequences that all of them will run."""
        return sum(turn.request.choices for turn in self)
