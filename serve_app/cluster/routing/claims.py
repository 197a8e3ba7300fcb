"""One home for a name although processes see different loads: whom a turn of a named session goes to is settled among
the replicas, at the first of them by rank.

A router sends such a turn to the first by rank, or elsewhere if that is overloaded. Another process may see it
otherwise at the same moment, and neither knows yet what the other does. So a replica that is not the first, and knows
nothing of the session, asks the first before it takes the turn; and the first keeps for a few seconds whom it gave a
name to, until the routers have heard of it. Everything at one replica runs on one event loop, so nothing comes between.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.cluster.routing.placement import by_rank

logger = logging.getLogger("moorage.engine")

CLAIM_SECONDS = 10.0
"""Far longer than a report takes to reach all routers."""

Ask = Callable[[str, str, Collection[str]], Awaitable[str | None]]
"""Asks a replica, by id, who has a key, avoiding some: its answer, or None where it is gone."""


class NameClaims:
    """Of one replica. Keys are those of named sessions (`session_key`)."""

    def __init__(
        self,
        replica: str,
        known: KnownReplicas,
        resident: Callable[[], Collection[str]],
        ask: Ask,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resident`: keys of the sessions that are resident here."""
        self._replica = replica
        self._known = known
        self._resident = resident
        self._ask = ask
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._claims: OrderedDict[str, tuple[str, float]] = OrderedDict()  # whose, since when; oldest first

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """For the time that a turn of this session is here."""
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    async def home(self, key: str, avoid: Collection[str]) -> str:
        """The replica that a turn which has come here is to go to. `avoid`: those that have refused or lost it."""
        if key in self._open:
            return self._replica
        first = by_rank(key, self._known.running or {self._replica})[0]
        if first == self._replica:
            return self.claim(key, self._replica, avoid)
        if key in self._resident() or first in avoid:
            return self._replica
        try:
            home = await self._ask(first, key, avoid)
        except Exception as error:  # better two homes than none
            logger.warning("%s: %s has not said who has a session: %s", self._replica, first, type(error).__name__)
            home = None
        return home or self._replica

    def claim(self, key: str, claimant: str, avoid: Collection[str]) -> str:
        """Asked at the first by rank: the replica where turns of this session are, or which claimed it lately; else it
        is the claimant's from now on."""
        now = self._clock()
        while self._claims and next(iter(self._claims.values()))[1] < now - CLAIM_SECONDS:
            self._claims.popitem(last=False)
        if key in self._open and self._replica not in avoid:
            return self._replica
        holder, _ = self._claims.get(key, (None, now))
        if holder is not None and holder not in avoid and holder in self._known.running:
            return holder
        self._claims[key] = claimant, now
        self._claims.move_to_end(key)
        return claimant
