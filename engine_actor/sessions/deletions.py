"""Which sessions were deleted here lately, whether they were known here or not."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

KEPT_SECONDS = 600.0
MOST_KEPT = 100_000


class RecentDeletions:
    """Keys of sessions, in order of their last deletion; the oldest are forgotten first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: OrderedDict[str, float] = OrderedDict()

    def note(self, key: str) -> None:
        now = self._at[key] = self._clock()
        self._at.move_to_end(key)
        while len(self._at) > MOST_KEPT or next(iter(self._at.values())) < now - KEPT_SECONDS:
            self._at.popitem(last=False)

    def __contains__(self, key: str) -> bool:
        return self._at.get(key, float("-inf")) >= self._clock() - KEPT_SECONDS

    def within(self, seconds: float) -> list[str]:
        """Those of the last `seconds`, latest first."""
        horizon = self._clock() - min(seconds, KEPT_SECONDS)
        recent = []
        for key in reversed(self._at):
            if self._at[key] < horizon:
                break
            recent.append(key)
        return recent
