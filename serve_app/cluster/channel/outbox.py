"""The replica's end of a channel: the deltas of all turns that one reader has here, in one stream.

An item of a Ray stream costs most of a millisecond, so a stream for each turn costs that for each token of each turn.
Here all that a step has for one reader, a process with a front door, is one item.

    turn 1 -- delta --\
    turn 2 -- delta ---+-> outbox of reader A ==> one batch ==> reader A
    turn 3 -- delta --/
    turn 4 -- delta -----> outbox of reader B ==> one batch ==> reader B
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

from engine_actor.messages import TurnDelta, TurnTokens

Packed = TurnDelta | tuple[int, ...] | None
"""A delta on its way; None ends a turn. Most are the tokens of an only choice: as bare ids they cost a tenth of what an
object takes to be pickled and made anew."""

Batch = list[tuple[int, Packed]]
"""Deltas in the order in which they came, each with the number of its turn."""

# A channel without turns ends by itself: an open call would keep the replica from stopping.
IDLE_SECONDS = 60.0


def pack(delta: TurnDelta | None) -> Packed:
    if isinstance(delta, TurnTokens) and delta.choice == 0 and not delta.logprobs:
        return delta.token_ids
    return delta


def unpack(packed: Packed) -> TurnDelta | None:
    return TurnTokens(packed) if isinstance(packed, tuple) else packed


class Outboxes:
    """Of one replica. Everything runs on one event loop."""

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}

    @contextmanager
    def turn(self, reader: str, number: int) -> Iterator[_TurnOutbox | None]:
        """For the time of one turn: where its deltas go, or None where the reader has no channel here. A turn that is
        cancelled leaves nothing behind."""
        outbox = self._outboxes.get(reader)
        if outbox is None:
            yield None
            return
        outbox.turns.add(number)
        try:
            yield _TurnOutbox(outbox, number)
        finally:
            outbox.turns.discard(number)
            outbox.drop(number)

    async def read(self, reader: str, channel: int) -> AsyncGenerator[Batch, None]:
        """A channel of a reader, by its number. It ends when it has had no turn for a while. One that its reader has
        opened anew has lost the earlier one, which gets no more turns."""
        outbox = self._outboxes[reader] = _Outbox(channel)
        try:
            while True:
                if batch := outbox.drain():
                    yield batch
                elif not await outbox.arrived(IDLE_SECONDS) and not outbox.turns:
                    return
        finally:
            outbox.close()
            if self._outboxes.get(reader) is outbox:
                del self._outboxes[reader]

    def __len__(self) -> int:
        """Readers with a channel here."""
        return len(self._outboxes)


class _TurnOutbox:
    """The place of one turn in an outbox."""

    def __init__(self, outbox: _Outbox, number: int) -> None:
        self._outbox = outbox
        self._number = number

    @property
    def channel(self) -> int:
        return self._outbox.channel

    async def carry(self, deltas: AsyncIterator[TurnDelta]) -> None:
        """Puts all deltas into the channel, and returns when it has taken them, or has ended: nobody hears the rest."""
        async for delta in deltas:
            if self._outbox.closed:
                return
            self._outbox.put(self._number, delta)
        self._outbox.put(self._number, None)
        await self._outbox.taken(self._number)


class _Outbox:
    """Deltas on their way through one channel."""

    def __init__(self, channel: int) -> None:
        self.channel = channel
        self.turns: set[int] = set()
        self.closed = False
        self._batch: Batch = []
        self._arrival = asyncio.Event()
        self._taking = asyncio.Event()

    def put(self, number: int, delta: TurnDelta | None) -> None:
        self._batch.append((number, pack(delta)))
        self._arrival.set()

    def drain(self) -> Batch:
        batch, self._batch = self._batch, []
        self._arrival.clear()
        if batch:
            self._taking.set()
            self._taking = asyncio.Event()
        return batch

    def close(self) -> None:
        """The channel has ended."""
        self.closed = True
        self._taking.set()

    def drop(self, number: int) -> None:
        self._batch = [item for item in self._batch if item[0] != number]

    async def taken(self, number: int) -> None:
        """Returns when nothing of a turn waits here any more."""
        while not self.closed and any(waiting == number for waiting, _ in self._batch):
            await self._taking.wait()

    async def arrived(self, seconds: float) -> bool:
        """False if nothing has come in this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._arrival.wait()
        except TimeoutError:
            return False
        return True
