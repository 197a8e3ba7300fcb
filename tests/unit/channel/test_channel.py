"""Both ends of a channel, joined without Ray: what turns say arrives, in order, whatever happens to other turns."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.messages import EndReason, TurnAccepted, TurnDelta, TurnEnded, TurnTokens
from engine_actor.sampling.logprobs import TokenLogprob
from serve_app.cluster.channel import outbox as outbox_module
from serve_app.cluster.channel.inbox import ChannelLost, Inbox, Inboxes
from serve_app.cluster.channel.leases import Renewals
from serve_app.cluster.channel.outbox import Batch, Outboxes, pack, unpack


class Channel:
    """Serve closes the generator of a call that is cancelled."""

    def __init__(self, batches: AsyncGenerator[Batch, None]) -> None:
        self._batches = batches

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self._batches

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._batches.aclose())


class ReaderAndReplicas:
    """One reader, and replicas with their outboxes."""

    def __init__(self, replicas: int = 1) -> None:
        self.replicas = {f"r{i}": Outboxes() for i in range(replicas)}
        self.items = 0
        self.opened = 0
        self.broken: set[str] = set()
        self.reader = Inboxes(
            lambda replica, reader, channel: Channel(self.batches(replica, reader, channel)), Renewals(self.renew)
        )

    async def renew(self, replica: str) -> None:
        """There are no leases here."""

    async def batches(self, replica: str, reader: str, channel: int) -> AsyncGenerator[Batch, None]:
        self.opened += 1
        async for batch in self.replicas[replica].read(reader, channel):
            self.items += 1
            if replica in self.broken:
                raise ConnectionError(replica)
            yield batch

    async def turn(
        self,
        deltas: AsyncIterator[TurnDelta],
        replica: str = "r0",
        read: Callable[[Inbox], Awaitable[list[int]]] | None = None,
    ) -> list[int]:
        """The tokens of a turn, as they arrive at the reader."""
        await self.open_channel(replica)
        inbox = self.reader.open()
        placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        carrying = asyncio.create_task(self.carry(replica, inbox.number, deltas, placed))
        try:
            self.reader.expect_from(replica, await placed, inbox)
            return await (read or everything)(inbox)
        finally:
            self.reader.close(inbox)
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)

    async def open_channel(self, replica: str) -> None:
        self.reader.ensure_channel(replica)
        while not len(self.replicas[replica]):
            await asyncio.sleep(0)

    async def carry(
        self, replica: str, number: int, deltas: AsyncIterator[TurnDelta], placed: asyncio.Future[int]
    ) -> None:
        with self.replicas[replica].turn(self.reader.reader, number) as outbox:
            assert outbox is not None
            placed.set_result(outbox.channel)
            await outbox.carry(deltas)


async def everything(inbox: Inbox) -> list[int]:
    tokens: list[int] = []
    while (delta := await inbox.get()) is not None:
        if isinstance(delta, TurnTokens):
            tokens += delta.token_ids
    return tokens


async def saying(tokens: range | list[int], pauses: list[int] | None = None) -> AsyncIterator[TurnDelta]:
    yield TurnAccepted("r", 1, 0)
    for i, token in enumerate(tokens):
        for _ in range(pauses[i % len(pauses)] if pauses else 1):
            await asyncio.sleep(0)
        yield TurnTokens((token,))
    yield TurnEnded(EndReason.STOP, 1, 0, len(tokens))


@pytest.fixture(autouse=True)
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "IDLE_SECONDS", 0.01)


async def settled(room: ReaderAndReplicas) -> None:
    """The idle time of all channels is over: nothing is left anywhere."""
    for _ in range(200):
        if not room.reader._channels and not any(map(len, room.replicas.values())):
            break
        await asyncio.sleep(0.01)
    assert not room.reader._channels
    assert not room.reader._inboxes
    assert [len(outboxes) for outboxes in room.replicas.values()] == [0] * len(room.replicas)


@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 4), min_size=1, max_size=5)), max_size=12))
def test_all_that_turns_say_arrives_in_order(turns: list[tuple[int, list[int]]]) -> None:
    async def run() -> None:
        room = ReaderAndReplicas(2)
        said = [list(range(1000 * i, 1000 * i + length)) for i, (length, _) in enumerate(turns)]
        heard = await asyncio.gather(
            *[room.turn(saying(said[i], pauses), f"r{i % 2}") for i, (_, pauses) in enumerate(turns)]
        )
        assert heard == said
        await settled(room)

    asyncio.run(run())


async def test_a_step_of_many_turns_is_one_item() -> None:
    room = ReaderAndReplicas()
    step = asyncio.Event()

    async def stepping() -> AsyncIterator[TurnDelta]:
        for token in range(20):
            await step.wait()
            yield TurnTokens((token,))

    turns = [asyncio.create_task(room.turn(stepping())) for _ in range(32)]
    for _ in range(20):
        await asyncio.sleep(0.002)
        step.set()
        await asyncio.sleep(0)
        step.clear()
    for turn in turns:
        assert len(await turn) <= 20
    assert room.items <= 45, "32 turns of 20 tokens"


async def test_a_turn_that_is_left_takes_nothing_of_the_others_along() -> None:
    room = ReaderAndReplicas()

    async def leaving(inbox: Inbox) -> list[int]:
        await inbox.get()
        return []

    heard = await asyncio.gather(
        *[room.turn(saying(range(50)), read=leaving if i % 2 else None) for i in range(8)]
    )  # fmt: skip
    assert heard == [[] if i % 2 else list(range(50)) for i in range(8)]
    await settled(room)


async def test_a_turn_without_a_channel_is_told_so_and_leaves_nothing_behind() -> None:
    outboxes = Outboxes()
    with outboxes.turn("nobody", 1) as outbox:
        assert outbox is None
    assert len(outboxes) == 0


async def test_a_turn_that_has_ended_waits_until_its_channel_has_taken_all() -> None:
    outboxes = Outboxes()
    channel = outboxes.read("a", 5)
    reading = asyncio.create_task(anext(channel))
    await asyncio.sleep(0)

    async def carry(number: int, tokens: range) -> None:
        with outboxes.turn("a", number) as outbox:
            assert outbox is not None
            await outbox.carry(saying(tokens))

    first = asyncio.create_task(carry(1, range(1)))
    await reading  # and nobody takes the next batch
    second = asyncio.create_task(carry(2, range(3)))
    await asyncio.sleep(0.02)
    assert not first.done()
    assert not second.done()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert {number for number, _ in await anext(channel)} == {1}, "a turn that was cancelled has left"
    await first
    await channel.aclose()
    assert len(outboxes) == 0


@pytest.mark.parametrize("first_ends_last", [False, True])
async def test_two_channels_of_one_reader_take_nothing_from_each_other(first_ends_last: bool) -> None:
    outboxes = Outboxes()
    go_on = asyncio.Event()

    async def carry(number: int) -> None:
        with outboxes.turn("a", number) as outbox:
            assert outbox is not None and outbox.channel == 10 + number
            await go_on.wait()
            await outbox.carry(saying([number]))

    channels, readings, turns = [], [], []
    for number in (1, 2):
        channels.append(outboxes.read("a", 10 + number))
        readings.append(asyncio.create_task(anext(channels[-1])))
        await asyncio.sleep(0)
        turns.append(asyncio.create_task(carry(number)))
        await asyncio.sleep(0)
    go_on.set()
    for number, channel, reading in zip((1, 2), channels, readings, strict=True):
        heard = await reading
        while heard[-1][1] is not None:
            heard += await anext(channel)
        assert {turn for turn, _ in heard} == {number}
    await asyncio.gather(*turns)
    for channel in channels[::-1] if first_ends_last else channels:
        await channel.aclose()
    assert len(outboxes) == 0


@pytest.mark.parametrize("said", [0, 1, 3])
async def test_a_turn_ends_with_its_channel(said: int) -> None:
    """Its reader has gone, and may not be able to cancel it."""
    outboxes = Outboxes()
    channel = outboxes.read("a", 5)
    reading = asyncio.create_task(anext(channel))
    await asyncio.sleep(0)
    closed = asyncio.Event()

    async def deltas() -> AsyncIterator[TurnDelta]:
        for token in range(said):
            yield TurnTokens((token,))
        if said < 3:
            await closed.wait()
            yield TurnTokens((9,))
            raise AssertionError("nobody hears this")

    async def carry() -> None:
        with outboxes.turn("a", 1) as outbox:
            assert outbox is not None
            await outbox.carry(deltas())

    turn = asyncio.create_task(carry())
    await asyncio.sleep(0.02)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await channel.aclose()
    closed.set()
    await asyncio.wait_for(turn, 5)
    assert len(outboxes) == 0


async def test_where_a_channel_breaks_its_turns_are_told_and_those_elsewhere_go_on() -> None:
    room = ReaderAndReplicas(2)
    room.broken.add("r0")

    async def failing(inbox: Inbox) -> list[int]:
        with pytest.raises(ChannelLost):
            await everything(inbox)
        return [-1]

    heard = await asyncio.gather(
        *[room.turn(saying(range(20)), f"r{i % 2}", None if i % 2 else failing) for i in range(6)]
    )
    assert heard == [list(range(20)) if i % 2 else [-1] for i in range(6)]
    room.broken.clear()
    assert await room.turn(saying(range(5))) == list(range(5)), "the next turn opens another"
    await settled(room)


async def test_an_idle_channel_ends_and_the_next_turn_opens_another() -> None:
    room = ReaderAndReplicas()
    assert await room.turn(saying(range(5))) == list(range(5))
    await settled(room)
    assert await room.turn(saying(range(5))) == list(range(5))
    assert room.opened == 2
    await settled(room)


async def test_a_turn_that_says_nothing_for_long_keeps_its_channel() -> None:
    room = ReaderAndReplicas()

    async def slow() -> AsyncIterator[TurnDelta]:
        yield TurnAccepted("r", 1, 0)
        await asyncio.sleep(0.1)
        yield TurnTokens((7,))

    assert await room.turn(slow()) == [7]
    assert room.opened == 1


@pytest.mark.parametrize(
    "delta",
    [
        None,
        TurnTokens((1, 2)),
        TurnTokens((1,), choice=2),
        TurnTokens((1,), 0, (TokenLogprob(1, -0.5, ((1, -0.5),)),)),
        TurnAccepted("r", 3, 1),
        TurnEnded(EndReason.LENGTH, 3, 1, 2),
    ],
)
def test_what_is_packed_for_a_channel_is_the_same_at_its_other_end(delta: TurnDelta | None) -> None:
    assert unpack(pickle.loads(pickle.dumps(pack(delta)))) == delta
