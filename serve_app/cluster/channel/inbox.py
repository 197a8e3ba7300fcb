"""The reader's end of channels: one stream from each replica where it has turns, given out to them.

    channel of replica 1 ==> batch --+--> inbox of turn 7
                                     +--> inbox of turn 9
    channel of replica 2 ==> batch -----> inbox of turn 8

A turn's inbox is there before its call is sent, since its first deltas come by a channel that is open already. Where a
channel breaks, all turns in it are told: what was in it is lost. A replica may learn of that later than we do, so each
channel has a number, and a turn that comes by one that is not open any more is lost too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine_actor.actor.mailbox import Mailbox
from engine_actor.messages import TurnDelta
from serve_app.cluster.channel.leases import Renewals
from serve_app.cluster.channel.outbox import Batch, unpack

logger = logging.getLogger("moorage")


class Channel(Protocol):
    """A stream of batches that can be cancelled, as Serve gives one."""

    def __aiter__(self) -> AsyncIterator[Batch]: ...

    def cancel(self) -> None: ...


OpenChannel = Callable[[str, str, int], Channel]
"""Opens a channel: the ids of replica and reader, and the number of the channel."""


class ChannelLost(Exception):
    """The channel of a turn has ended before it."""


@dataclass(eq=False, slots=True)
class _Reading:
    """An open channel, and the turns in it."""

    channel: int
    task: asyncio.Task[None]
    turns: set[int] = field(default_factory=set)


class Inbox:
    """The deltas of one turn. `complete`: the last one has come, and may not be read yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.complete = False
        self._mailbox = Mailbox()
        self._error: BaseException | None = None

    def put(self, delta: TurnDelta | None) -> None:
        self.complete = delta is None
        self._mailbox.put([delta])

    def fail(self, error: BaseException) -> None:
        """What has come before is read first."""
        self._error = self._error or error
        self._mailbox.put([None])

    async def get(self) -> TurnDelta | None:
        """None at the end. Raises what broke the channel."""
        delta = await self._mailbox.get()
        if delta is None and self._error is not None:
            raise self._error
        return delta


class Inboxes:
    """Of one process and deployment. Everything runs on one event loop."""

    def __init__(self, open_channel: OpenChannel, renewals: Renewals) -> None:
        self.reader = uuid.uuid4().hex
        self._open_channel = open_channel
        self._renewals = renewals
        self._numbers = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._channels: dict[str, _Reading] = {}  # by replica
        self._leaving: set[str] = set()  # replicas that take no new turns

    def open(self) -> Inbox:
        """For the time of one call; `close` it."""
        inbox = Inbox(next(self._numbers))
        self._inboxes[inbox.number] = inbox
        return inbox

    def expect_from(self, replica: str, channel: int, inbox: Inbox) -> None:
        """The turn of this inbox comes by a channel that was open when the replica took it."""
        self.ensure_channel(replica)  # so that the next turn is not lost too
        reading = self._channels[replica]
        if reading.channel == channel:
            reading.turns.add(inbox.number)
        else:
            inbox.fail(ChannelLost(replica))

    def close(self, inbox: Inbox) -> None:
        self._inboxes.pop(inbox.number, None)
        for reading in self._channels.values():
            reading.turns.discard(inbox.number)
        self._close_unused()

    def ensure_channel(self, replica: str) -> None:
        """Opens a channel, which turns that come to this replica later will use."""
        if replica in self._channels:
            return
        channel = next(self._numbers)
        # It outlives the request whose turn needs it first, so it takes nothing of that one's context along: Serve
        # cancels calls with the request in which they were made.
        task = asyncio.get_running_loop().create_task(self._read(replica, channel), context=Context())
        self._channels[replica] = _Reading(channel, task)
        task.add_done_callback(partial(self._ended, replica))

    def set_running(self, replicas: Collection[str]) -> None:
        """The replicas that take turns. One that is stopped waits for its open calls, so a channel to it is closed with
        the last turn in it."""
        self._leaving = self._channels.keys() - replicas
        self._close_unused()

    def close_all(self) -> None:
        """Turns in channels are lost."""
        for reading in self._channels.values():
            reading.task.cancel()

    def _close_unused(self) -> None:
        for replica in self._leaving:
            if (reading := self._channels.get(replica)) is not None and not reading.turns:
                reading.task.cancel()

    async def _read(self, replica: str, channel: int) -> None:
        batches = self._open_channel(replica, self.reader, channel)
        self._renewals.begin(replica)
        try:
            async for batch in batches:
                for number, packed in batch:
                    if number in self._inboxes:  # else its turn was left
                        self._inboxes[number].put(unpack(packed))
        except BaseException:
            batches.cancel()  # the replica may be there still, and fill it
            raise
        finally:
            self._renewals.end(replica)

    def _ended(self, replica: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("the channel to replica %s broke: %s", replica, error)
        for number in self._channels.pop(replica).turns:
            self._inboxes[number].fail(ChannelLost(replica))
