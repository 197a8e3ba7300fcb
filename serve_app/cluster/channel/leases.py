"""Whether those who read from a replica are there still.

Ray ends a call when its caller cancels it, and tells nobody when the caller's process dies: its turns would run on,
unheard, and hold their places and their sessions. So a reader, a process with a front door, says every other second
that it is there (`Renewals`), to each replica where it has calls. A replica that has not heard from a reader for
LEASE_SECONDS ends all of its calls (`Leases`).

A reader that lives but was too busy to say so finds its turns lost, as if the replica had died, and they go on where
they broke off. So the time need only be so long that this is rare: an event loop under load stands still for a second
or two, seldom for five; ten cost a dead reader's places little.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import TypeVar

from serve_app.interruption import Cancellation

logger = logging.getLogger("moorage.engine")
reader_logger = logging.getLogger("moorage")

LEASE_SECONDS = 10.0
RENEWAL_SECONDS = 2.0
_TICK_SECONDS = 1.0

Renew = Callable[[str], Awaitable[object]]
"""Tells a replica, by id, that this reader is there."""

T = TypeVar("T")


class Lease:
    """Of one call of a reader."""

    def __init__(self) -> None:
        self._cancellation = Cancellation()

    async def items(self, stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """What the stream gives, until its end or that of the lease. `stream` is not closed."""
        while (item := await self._cancellation.next(stream)) is not None:
            yield item

    @property
    def ended(self) -> bool:
        return self._cancellation.requested

    def end(self) -> None:
        self._cancellation.request()


@dataclass(slots=True)
class _Reader:
    ticks: int = 0  # since it was last heard
    calls: set[Lease] = field(default_factory=set)


class Leases:
    """Of one replica. Everything runs on one event loop.

    Time is counted in ticks of that event loop: while it stands still, or the process is stopped, nobody could have
    been heard.
    """

    def __init__(self, taken_out: Callable[[], bool] = lambda: False) -> None:
        """`taken_out`: whether this replica has left the routers' sets, since it is stopped. Leases last
        then; what bounds its calls is the time that it has to stop."""
        self._taken_out = taken_out
        self._readers: dict[str, _Reader] = {}
        self._counting: asyncio.Task[None] | None = None

    @contextmanager
    def hold(self, reader: str) -> Iterator[Lease]:
        """For the time of one call of this reader. That it calls is a sign of life, too."""
        held, lease = self._readers.setdefault(reader, _Reader()), Lease()
        held.ticks = 0
        held.calls.add(lease)
        if self._counting is None:
            self._counting = asyncio.get_running_loop().create_task(self._count(), context=Context())
        try:
            yield lease
        finally:
            held.calls.discard(lease)
            if not held.calls:
                del self._readers[reader]

    def renew(self, reader: str) -> None:
        """Does nothing for one that has no call here."""
        if (held := self._readers.get(reader)) is not None:
            held.ticks = 0

    async def _count(self) -> None:
        while self._readers:
            await asyncio.sleep(_TICK_SECONDS)
            if self._taken_out():
                continue
            for reader, held in self._readers.items():
                held.ticks += 1
                if held.ticks * _TICK_SECONDS > LEASE_SECONDS:
                    logger.warning("reader %s has gone: its %d calls are ended", reader, len(held.calls))
                    for lease in held.calls:
                        lease.end()
        self._counting = None


class Renewals:
    """Of one reader: says that it is there, to the replicas where it has calls, while it has any."""

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._calls: Counter[str] = Counter()  # by replica
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._renewing: asyncio.Task[None] | None = None

    def begin(self, replica: str) -> None:
        """A call is open there; `end` it."""
        self._calls[replica] += 1
        if self._renewing is None:
            # For all calls, so without the context of this one: Serve cancels calls with the request that made them.
            self._renewing = asyncio.get_running_loop().create_task(self._run(), context=Context())

    def end(self, replica: str) -> None:
        self._calls[replica] -= 1
        if not self._calls[replica]:
            del self._calls[replica]

    async def _run(self) -> None:
        while self._calls:
            await asyncio.sleep(RENEWAL_SECONDS)
            for replica in self._calls:
                if replica not in self._pending:  # else it has not answered yet
                    self._pending[replica] = asyncio.create_task(self._tell(replica))
        self._renewing = None

    async def _tell(self, replica: str) -> None:
        try:
            await self._renew(replica)
        except Exception as error:  # its calls break if it is dead, and are looked after if it is silent
            reader_logger.debug("replica %s was not told that its reader is there: %s", replica, type(error).__name__)
        finally:
            del self._pending[replica]
