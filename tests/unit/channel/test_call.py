"""A call whose deltas come by a channel: to its caller it looks like a stream of its own."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from engine_actor.messages import EndReason, TurnAccepted, TurnDelta, TurnEnded, TurnTokens
from serve_app.cluster.channel.call import ChannelCall, ChannelCaller, TurnPlaced
from serve_app.cluster.channel.inbox import ChannelLost, Inboxes
from serve_app.cluster.channel.leases import Renewals
from serve_app.cluster.routing.known_replicas import KnownReplicas

SAID: list[TurnDelta] = [TurnAccepted("r", 3, 0), TurnTokens((1, 2)), TurnEnded(EndReason.STOP, 3, 0, 2)]


class Stream:
    """What Serve gives for a call: items come when the test puts them; an error is raised; None is the end."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def put(self, *items: Any) -> None:
        for item in items:
            self.items.put_nowait(item)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        item = await self.items.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Of one deployment: its calls in order, those that opened channels, and those that renewed leases."""

    def __init__(self) -> None:
        self.renewals: list[Stream] = []
        self.turns: list[Stream] = []
        self.channels: list[Stream] = []
        self._method = "stream_turn"

    def options(self, *, method_name: str, stream: bool = False) -> Handle:
        other = object.__new__(Handle)
        other.__dict__ = {**self.__dict__, "_method": method_name}
        return other

    def remote(self, *args: Any, **kwargs: Any) -> Stream:
        stream = Stream()
        stream.args, stream.kwargs = args, kwargs
        {"channel": self.channels, "renew": self.renewals}.get(self._method, self.turns).append(stream)
        return stream


class CallerWithChannel:
    """A caller, the handle that it calls through, and on request an open channel to replica r."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.known = KnownReplicas()
        self.caller = ChannelCaller(self.handle, self.known)

    async def open_channel(self) -> None:
        call = self.call()
        self.handle.turns[-1].put(TurnPlaced("r", None), *SAID, None)
        assert [item async for item in call] == ["r", *SAID]
        call.close()
        await asyncio.sleep(0.01)  # the channel's task begins

    def call(self) -> ChannelCall:
        return self.caller.call(self.handle, "request", avoid=())

    def placed(self) -> TurnPlaced:
        """By the channel that was opened last."""
        return TurnPlaced("r", self.handle.channels[-1].args[1])

    def send(self, call: ChannelCall, *deltas: TurnDelta | None) -> None:
        number = call._inbox.number
        self.handle.channels[-1].put([(number, delta) for delta in deltas])


@pytest.fixture
async def room() -> CallerWithChannel:
    room = CallerWithChannel()
    await room.open_channel()
    return room


async def test_the_first_turn_has_its_own_stream_and_opens_the_channel(room: CallerWithChannel) -> None:
    [channel] = room.handle.channels
    assert channel.kwargs == {"only": "r"}
    assert channel.args[0] == room.caller.inboxes.reader
    [turn] = room.handle.turns
    assert not turn.cancelled
    assert turn.kwargs == {"avoid": (), "reader": room.caller.inboxes.reader, "number": 0}


async def test_the_next_turn_comes_by_the_channel(room: CallerWithChannel) -> None:
    call = room.call()
    room.handle.turns[-1].put(room.placed())
    room.send(call, *SAID[:2])
    room.send(call, *SAID[2:], None)
    assert [item async for item in call] == ["r", *SAID]
    call.close()
    assert not room.handle.turns[-1].cancelled
    assert len(room.handle.channels) == 1


async def test_deltas_may_come_before_the_place_is_known(room: CallerWithChannel) -> None:
    call = room.call()
    room.send(call, *SAID, None)
    await asyncio.sleep(0.01)
    room.handle.turns[-1].put(room.placed(), None)
    assert [item async for item in call] == ["r", *SAID]
    call.close()


async def test_a_replica_that_dies_is_heard_of_after_what_it_said(room: CallerWithChannel) -> None:
    call = room.call()
    room.handle.turns[-1].put(room.placed())
    assert await anext(call) == "r"
    room.send(call, *SAID[:2])
    await asyncio.sleep(0.01)
    room.handle.turns[-1].put(ConnectionError("died"))
    assert [await anext(call), await anext(call)] == SAID[:2]
    with pytest.raises(ConnectionError):
        await anext(call)
    call.close()


@pytest.mark.parametrize("end", [None, ConnectionError("broke")])
async def test_a_channel_that_ends_is_a_loss_to_the_turns_in_it(room: CallerWithChannel, end: Exception | None) -> None:
    call = room.call()
    room.handle.turns[-1].put(room.placed())
    assert await anext(call) == "r"
    [channel] = room.handle.channels
    channel.put(end)
    with pytest.raises(ChannelLost):
        await anext(call)
    call.close()
    assert room.handle.turns[-1].cancelled
    assert channel.cancelled is (end is not None), "the replica may be there still"
    await room.open_channel()
    assert len(room.handle.channels) == 2, "the next turn opens another"


@pytest.mark.parametrize("opened_anew", [True, False])
async def test_a_channel_that_broke_unseen_by_its_replica_is_a_loss_to_one_turn(
    room: CallerWithChannel, opened_anew: bool
) -> None:
    before = room.placed()
    room.handle.channels[-1].put(ConnectionError("broke"))
    await asyncio.sleep(0.01)
    if opened_anew:
        await room.open_channel()
    call = room.call()
    room.handle.turns[-1].put(before)
    assert await anext(call) == "r"
    with pytest.raises(ChannelLost):
        await asyncio.wait_for(anext(call), 5)
    call.close()
    await asyncio.sleep(0.01)
    assert len(room.handle.channels) == 2
    call = room.call()
    room.handle.turns[-1].put(room.placed())
    room.send(call, *SAID, None)
    assert [item async for item in call] == ["r", *SAID]
    call.close()


async def test_a_channel_outlives_the_request_that_opened_it() -> None:
    """Serve cancels calls with the request in whose context they were made."""
    seen: list[str] = []
    request = ContextVar("request", default="none")
    request.set("the first")

    def opened(*_: object) -> Stream:
        seen.append(request.get())
        return Stream()

    async def renew(replica: str) -> None:
        """There are no leases here."""

    inboxes = Inboxes(opened, Renewals(renew))
    inboxes.ensure_channel("r")
    await asyncio.sleep(0.01)
    assert seen == ["none"]
    inboxes.close_all()


async def test_a_channel_that_is_given_up_before_it_was_opened_can_be_opened_again() -> None:
    room = CallerWithChannel()
    room.caller.inboxes.ensure_channel("r")
    room.caller.inboxes.close_all()
    await asyncio.sleep(0.01)
    assert not room.handle.channels
    await room.open_channel()
    assert len(room.handle.channels) == 1


@pytest.mark.parametrize("channelled", [True, False])
@pytest.mark.parametrize("heard", [0, 1, 2])
async def test_closing_early_cancels_the_turn(room: CallerWithChannel, channelled: bool, heard: int) -> None:
    call = room.call()
    stream = room.handle.turns[-1]
    stream.put(room.placed() if channelled else TurnPlaced("r", None))
    if channelled:
        room.send(call, *SAID)
    else:
        stream.put(*SAID)
    for _ in range(heard):
        await anext(call)
    call.close()
    assert stream.cancelled
    assert not room.caller.inboxes._inboxes
    if channelled:
        room.send(call, TurnTokens((9,)))  # on its way when the turn was left
        other = room.call()
        room.handle.turns[-1].put(room.placed())
        room.send(other, *SAID, None)
        assert [item async for item in other] == ["r", *SAID]
        other.close()


async def test_a_turn_of_which_all_has_come_is_not_cancelled_though_its_end_was_not_read(
    room: CallerWithChannel,
) -> None:
    """Who hears of its last choice's end reads no further."""
    call = room.call()
    room.handle.turns[-1].put(room.placed())
    room.send(call, *SAID, None)
    assert [await anext(call) for _ in range(1 + len(SAID))] == ["r", *SAID]
    call.close()
    assert not room.handle.turns[-1].cancelled


@pytest.mark.parametrize("ticks", range(12))
async def test_what_was_read_before_waiting_was_cancelled_has_no_gap(room: CallerWithChannel, ticks: int) -> None:
    call = room.call()
    room.handle.turns[-1].put(room.placed())
    heard: list[Any] = []

    async def read() -> None:
        async for item in call:
            heard.append(item)

    async def send() -> None:
        for token in range(4):
            room.send(call, TurnTokens((token,)))
            await asyncio.sleep(0)

    reading, sending = asyncio.create_task(read()), asyncio.create_task(send())
    for _ in range(ticks):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, sending, return_exceptions=True)
    call.close()
    tokens = [token for item in heard[1:] for token in item.token_ids]
    assert tokens == list(range(len(tokens)))
    assert room.handle.turns[-1].cancelled
    assert not room.caller.inboxes._inboxes


async def test_the_channel_to_a_replica_that_is_stopped_is_closed_with_its_last_turn(room: CallerWithChannel) -> None:
    [channel] = room.handle.channels
    call = room.call()
    room.handle.turns[-1].put(room.placed())
    assert await anext(call) == "r"
    room.known.set_running(["r", "s"])
    await asyncio.sleep(0.01)
    room.known.set_running(["s"])
    await asyncio.sleep(0.01)
    assert not channel.cancelled
    room.send(call, *SAID, None)
    assert [item async for item in call] == SAID
    call.close()
    await asyncio.sleep(0.01)
    assert channel.cancelled


async def test_an_unused_channel_to_a_replica_that_is_stopped_is_closed_at_once(room: CallerWithChannel) -> None:
    [channel] = room.handle.channels
    room.known.set_running(["r"])
    await asyncio.sleep(0.01)
    assert not channel.cancelled
    room.known.set_running([])
    await asyncio.sleep(0.01)
    assert channel.cancelled


async def test_a_reader_that_stops_closes_its_channels(room: CallerWithChannel) -> None:
    [channel] = room.handle.channels
    room.caller.inboxes.close_all()
    await asyncio.sleep(0.01)
    assert channel.cancelled
