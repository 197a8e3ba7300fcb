"""One call of `stream_turn`, as if its deltas came in its own stream.

They do for the first turns that reach a replica from here; then a channel is open there, and the stream of a turn only
says where it is, and breaks with its replica. Cancelling the call cancels the turn, either way.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from serve_app.cluster.channel.inbox import Inboxes
from serve_app.cluster.channel.leases import Renewals
from serve_app.cluster.channel.outbox import Batch
from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.cluster.routing.sticky_router import ONLY


@dataclass(frozen=True, slots=True)
class TurnPlaced:
    """The first item of the stream of a turn. `channel`: the one of its reader by which its deltas come, or None where
    they follow in this stream."""

    replica: str
    channel: int | None


@dataclass(frozen=True, slots=True)
class TurnElsewhere:
    """Alone in the stream of a turn: `here` has not taken it, since its session is at another replica."""

    here: str
    replica: str


class TurnSentOn(Exception):
    """The call is over; the turn is to be sent to the replica that `elsewhere` says."""

    def __init__(self, elsewhere: TurnElsewhere) -> None:
        self.elsewhere = elsewhere


class ChannelCaller:
    """Sends turns to the replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle, known: KnownReplicas) -> None:
        self._channels = handle.options(stream=True, method_name="channel")
        self._renewed = handle.options(method_name="renew")
        self._renewals = Renewals(self._renew)
        self.inboxes = Inboxes(self._open, self._renewals)
        self._known = known
        self._listening = False

    def _open(self, replica: str, reader: str, channel: int) -> DeploymentResponseGenerator[Batch]:
        if not self._listening:
            self._known.listen(self.inboxes.set_running)
            self._listening = True
        return self._channels.remote(reader, channel, **{ONLY: replica})

    async def _renew(self, replica: str) -> None:
        await self._renewed.remote(self.inboxes.reader, **{ONLY: replica})

    def call(self, turns: DeploymentHandle, *args: Any, **kwargs: Any) -> ChannelCall:
        """`turns`: the handle of `stream_turn`."""
        return ChannelCall(self.inboxes, self._renewals, turns, args, kwargs)


class ChannelCall:
    """An async iterator: the id of the replica, then the deltas of the turn; or TurnSentOn. `close` it, wherever it
    ends."""

    def __init__(self, inboxes: Inboxes, renewals: Renewals, turns: DeploymentHandle, args: Any, kwargs: Any) -> None:
        self._inboxes = inboxes
        self._renewals = renewals
        self._inbox = inboxes.open()
        self._stream = turns.remote(*args, **kwargs, reader=inboxes.reader, number=self._inbox.number)
        self._placed: TurnPlaced | None = None
        self._break: asyncio.Task[None] | None = None
        self._ended = False

    def __aiter__(self) -> ChannelCall:
        return self

    async def __anext__(self) -> Any:
        if self._placed is None:
            placed: TurnPlaced | TurnElsewhere | None = await anext(self._stream, None)
            if placed is None or isinstance(placed, TurnElsewhere):
                self._ended = True
                raise StopAsyncIteration if placed is None else TurnSentOn(placed)
            self._placed = placed
            self._renewals.begin(placed.replica)
            if placed.channel is not None:
                self._inboxes.expect_from(placed.replica, placed.channel, self._inbox)
                self._break = asyncio.create_task(self._pass_on_break())
            else:
                self._inboxes.ensure_channel(placed.replica)
            return placed.replica
        if self._placed.channel is not None:
            delta = await self._inbox.get()
        else:
            delta = await anext(self._stream, None)
        if delta is None:
            self._ended = True
            raise StopAsyncIteration
        return delta

    async def _pass_on_break(self) -> None:
        """The stream of a turn in a channel has no more items. It ends when the channel has taken all deltas, or breaks
        with its replica."""
        try:
            await anext(self._stream, None)
        except Exception as error:
            self._inbox.fail(error)

    def close(self) -> None:
        """The deltas are of no more interest; a turn that has not ended is cancelled."""
        self._inboxes.close(self._inbox)
        if self._placed is not None:
            self._renewals.end(self._placed.replica)
        ended = self._ended or self._inbox.complete
        if self._break is not None and ended:
            # Held until then, since the event loop forgets tasks that nobody holds.
            _ending.add(self._break)
            self._break.add_done_callback(_ending.discard)
        elif not ended:
            if self._break is not None:
                self._break.cancel()
            with contextlib.suppress(Exception):  # of a call that no replica could take, it raises why once more
                self._stream.cancel()


_ending: set[asyncio.Task[None]] = set()
