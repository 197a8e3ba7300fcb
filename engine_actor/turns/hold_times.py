"""How long turns kept their places lately, and so how long the next ones wait for one.

With every place taken, `places / mean time` of them fall free in a second. The times are known from the ends of any
turns, so the first one that finds a full queue is told the truth as well as the hundredth.
"""

from __future__ import annotations

from collections import deque

LEAST_WAIT_SECONDS, MOST_WAIT_SECONDS = 1.0, 60.0
_REMEMBERED = 64  # times; older ones say little about what is asked now


class HoldTimes:
    def __init__(self, places: int) -> None:
        self._places = places
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, seconds: float) -> None:
        """A place is free again after this time, however its turn ended."""
        self._seconds.append(seconds)

    def until_free(self, places: int) -> float:
        """Seconds until so many have fallen free, from LEAST_WAIT_SECONDS, also where nothing is known yet, to
        MOST_WAIT_SECONDS."""
        return self._bounded(places / self._places)

    def until_over(self) -> float:
        """Seconds that one turn takes, in the same bounds."""
        return self._bounded(1.0)

    def _bounded(self, rounds: float) -> float:
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        return min(max(rounds * mean, LEAST_WAIT_SECONDS), MOST_WAIT_SECONDS)
