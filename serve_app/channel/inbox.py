"""The reader's end of channels: one stream from each replica where it has turns, given out to them.

    channel of replica 1 ==> batch --+--> inbox of turn 7
                                     +--> inbox of turn 9
    channel of replica 2 ==> batch -----> inbox of turn 8

A turn's inbox is there before its call is sent, since its first deltas come by a channel that is open already. Where a
channel breaks, all turns of its replica are told: what was in it is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from typing import Protocol

from engine_actor.mailbox import Mailbox
from engine_actor.turns import TurnDelta
from serve_app.channel.outbox import Batch


class Channel(Protocol):
    """A stream of batches that can be cancelled, as Serve gives one."""

    def __aiter__(self) -> AsyncIterator[Batch]: ...

    def cancel(self) -> None: ...


OpenChannel = Callable[[str, str], Channel]
"""Opens the channel at a replica for a reader, both by id."""


class ChannelLost(Exception):
    """The channel of a turn has ended before it."""


class Inbox:
    """The deltas of one turn."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._mailbox = Mailbox()
        self._error: BaseException | None = None

    def put(self, delta: TurnDelta | None) -> None:
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

    def __init__(self, open_channel: OpenChannel) -> None:
        self.reader = uuid.uuid4().hex
        self._open_channel = open_channel
        self._numbers = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._channels: dict[str, asyncio.Task[None]] = {}  # by replica
        self._turns: dict[str, set[int]] = {}
        self._leaving: set[str] = set()  # replicas that take no new turns

    def open(self) -> Inbox:
        """For the time of one call; `close` it."""
        inbox = Inbox(next(self._numbers))
        self._inboxes[inbox.number] = inbox
        return inbox

    def expect_from(self, replica: str, inbox: Inbox) -> None:
        """The turn of this inbox comes by the channel of this replica, which is open there."""
        if replica in self._channels:
            self._turns[replica].add(inbox.number)
        else:  # it broke in this moment
            inbox.fail(ChannelLost(replica))

    def close(self, inbox: Inbox) -> None:
        self._inboxes.pop(inbox.number, None)
        for turns in self._turns.values():
            turns.discard(inbox.number)
        self._close_unused()

    def ensure_channel(self, replica: str) -> None:
        """Opens a channel, which turns that come to this replica later will use."""
        if replica not in self._channels:
            self._turns[replica] = set()
            self._channels[replica] = asyncio.create_task(self._read(replica))

    def set_running(self, replicas: Collection[str]) -> None:
        """The replicas that take turns. One that is stopped waits for its open calls, so a channel to it is closed with
        the last turn in it."""
        self._leaving = self._channels.keys() - replicas
        self._close_unused()

    def close_all(self) -> None:
        """Turns in channels are lost."""
        for channel in self._channels.values():
            channel.cancel()

    def _close_unused(self) -> None:
        for replica in self._leaving:
            if replica in self._channels and not self._turns[replica]:
                self._channels[replica].cancel()

    async def _read(self, replica: str) -> None:
        lost: BaseException = ChannelLost(replica)
        channel = self._open_channel(replica, self.reader)
        try:
            async for batch in channel:
                for number, delta in batch:
                    if number in self._inboxes:  # else its turn was left
                        self._inboxes[number].put(delta)
        except asyncio.CancelledError:
            channel.cancel()
            raise
        except Exception as error:
            lost = error
        finally:
            del self._channels[replica]
            for number in self._turns.pop(replica):
                self._inboxes[number].fail(lost)
