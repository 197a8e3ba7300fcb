"""Finds replicas that are there and do nothing: a process that was stopped, an owner thread that hangs.

The death of a process breaks its streams at once; one that hangs sends nothing, as does one that is busy with
something else or lets a turn wait in its queue. So a replica that has told none of its turns anything for a while is
asked for a sign of life, one question for all of them. It has failed if it does not answer in time, or answers that its
engine has failed: its turns are then told, and new ones avoid it until it answers well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.interruption import Interrupted, Interruption

logger = logging.getLogger("moorage")

SILENCE_SECONDS = 2.0
ANSWER_SECONDS = 3.0
_LOOK_SECONDS = 0.5

Ask = Callable[[str], Awaitable[tuple[str, bool]]]
"""Asks a replica, by id: the id of the one that answers, which is another one if this is not in the router's set any
more, and whether its engine works."""


class ReplicaSilent(Exception):
    """The replica of a turn gives no sign of life."""


class Attempt:
    """Where a turn is: at a replica, or on its way to one that nobody knows yet."""

    def __init__(self, watch: ReplicaWatch) -> None:
        self._watch = watch
        self._wait = Interruption()
        self._given_up = False
        self.replica: str | None = None
        self.since = asyncio.get_running_loop().time()

    async def next(self, stream: AsyncIterator[Any], deadline: float | None = None) -> Any:
        """The next item of a replica's stream. Raises StopAsyncIteration at its end, ReplicaSilent, or TimeoutError at
        `deadline` (of the event loop's clock); the stream is of no use after these two."""
        if self._given_up:
            raise ReplicaSilent
        try:
            with self._wait:
                item = await (anext(stream) if deadline is None else _next_until(stream, deadline))
        except Interrupted:
            raise ReplicaSilent from None
        if self.replica is not None:
            self._watch.heard(self.replica)
        return item

    def reached(self, replica: str) -> None:
        self.replica = replica
        self._watch.heard(replica)

    def give_up(self) -> None:
        self._given_up = True
        self._wait.interrupt()


async def _next_until(stream: AsyncIterator[Any], deadline: float) -> Any:
    async with asyncio.timeout_at(deadline):
        return await anext(stream)


class ReplicaWatch:
    """Runs on the event loop of its turns, while there are any, or a replica that failed may be well again."""

    def __init__(self, ask: Ask, known: KnownReplicas) -> None:
        self._ask = ask
        self._known = known
        self._places: set[Attempt] = set()
        self._last_signs: dict[str, float] = {}
        self._last_questions: dict[str, float] = {}
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def running(self) -> frozenset[str]:
        """The replicas that the routers know."""
        return self._known.running

    @property
    def silent(self) -> frozenset[str]:
        """Those of them that give no sign of life."""
        return self._known.silent

    @contextmanager
    def place(self) -> Iterator[Attempt]:
        """For the time of one call."""
        place = Attempt(self)
        self._places.add(place)
        if self._looking is None:
            # For all turns, so without the context of this one: Serve cancels calls with the request that made them.
            self._looking = asyncio.get_running_loop().create_task(self._look_around(), context=Context())
        try:
            yield place
        finally:
            self._places.discard(place)

    def heard(self, replica: str) -> None:
        self._last_signs[replica] = asyncio.get_running_loop().time()

    async def _look_around(self) -> None:
        while self._places or self._known.silent:
            await asyncio.sleep(_LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            for replica in self._to_be_asked(now):
                if replica not in self._questions and now - self._last_questions.get(replica, 0.0) >= SILENCE_SECONDS:
                    self._last_questions[replica] = now
                    self._questions[replica] = asyncio.create_task(self._question(replica))
            if self._known.silent:
                self._call_back(now)
        self._looking = None
        self._last_signs.clear()
        self._last_questions.clear()

    def _to_be_asked(self, now: float) -> set[str]:
        """Silent replicas with turns; those that failed, in case they are well again; and all, if a turn is on its way
        for too long, since the one that does not take it may be any of them. One that is being stopped is not asked: it
        has until the end of its time to stop, and then its streams break."""
        horizon = now - SILENCE_SECONDS
        if any(place.replica is None and place.since < horizon for place in self._places):
            return set(self._known.running)
        return {
            r for r in self._with_turns() & self._known.running if self._last_signs[r] < horizon
        } | self._known.silent

    def _with_turns(self) -> set[str]:
        return {place.replica for place in self._places if place.replica is not None}

    async def _question(self, replica: str) -> None:
        begun = asyncio.get_running_loop().time()
        try:
            works = await self._works(replica)
            if works is None or (not works and self._deaf_or_heard(replica, begun)):
                return
            news = self._known.set_silent(replica, not works)
            if works:
                self.heard(replica)
            else:
                self._give_up(replica, news)
        finally:
            del self._questions[replica]

    async def _works(self, replica: str) -> bool | None:
        """None: nobody knows."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answers, works = await self._ask(replica)
        except TimeoutError:
            return False if replica in self._known.running else None
        except Exception as error:  # a replica that is dead says so to its own streams
            logger.info("replica %s cannot be asked: %s", replica, type(error).__name__)
            return None
        return works if answers == replica else None

    def _deaf_or_heard(self, replica: str, begun: float) -> bool:
        """This process could hear no answer since its own event loop stood still, or it heard the replica meanwhile."""
        late = asyncio.get_running_loop().time() - begun > ANSWER_SECONDS + 1.0
        return late or self._last_signs.get(replica, 0.0) > begun

    def _give_up(self, replica: str, news: bool) -> None:
        places = [place for place in self._places if place.replica == replica]
        if news or places:
            logger.warning("replica %s gives no sign of life: %d turns leave it", replica, len(places))
        for place in places:
            place.give_up()

    def _call_back(self, now: float) -> None:
        """Turns that are on their way for too long may be on it to a replica that failed."""
        for place in self._places:
            if place.replica is None and place.since < now - SILENCE_SECONDS:
                place.give_up()
