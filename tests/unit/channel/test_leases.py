"""A reader that says that it is there keeps its calls; one that has gone does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from serve_app.cluster.channel import leases as leases_module
from serve_app.cluster.channel.leases import LEASE_SECONDS, RENEWAL_SECONDS, Leases, Renewals
from serve_app.cluster.failover.watch import ANSWER_SECONDS, SILENCE_SECONDS

TICK = 0.01  # in the place of a second


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEASE_SECONDS", "RENEWAL_SECONDS", "_TICK_SECONDS"):
        monkeypatch.setattr(leases_module, name, getattr(leases_module, name) * TICK)


async def endless() -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()


async def call(leases: Leases, reader: str) -> list[int]:
    """What a call hears until its lease ends."""
    with leases.hold(reader) as lease:
        async with aclosing(lease.items(endless())) as items:
            return [item async for item in items]


async def test_the_calls_of_a_reader_that_has_gone_end_and_those_of_another_do_not() -> None:
    leases = Leases()
    renewals = Renewals(lambda replica: _renew(leases, "there"))
    renewals.begin("r")
    there = asyncio.create_task(call(leases, "there"))
    for heard in await asyncio.gather(call(leases, "gone"), call(leases, "gone")):
        assert heard == [1]
    assert await call(leases, "gone too") == [1]
    assert not there.done()
    renewals.end("r")
    assert await there == [1]


async def _renew(leases: Leases, reader: str) -> None:
    leases.renew(reader)


async def test_a_reader_that_calls_again_is_there() -> None:
    leases = Leases()
    first = asyncio.create_task(call(leases, "a"))
    for _ in range(20):
        await asyncio.sleep(TICK)
        with leases.hold("a"):
            assert not first.done()
    assert await first == [1]


async def test_a_call_that_is_not_waited_for_when_its_reader_goes_ends_when_it_is() -> None:
    leases = Leases()
    with leases.hold("a") as lease:
        async with aclosing(lease.items(endless())) as items:
            assert await anext(items) == 1
            while not lease.ended:
                await asyncio.sleep(TICK)
            assert [item async for item in items] == []


async def test_a_replica_that_no_reader_can_reach_ends_no_calls() -> None:
    out = True
    leases = Leases(lambda: out)
    waiting = asyncio.create_task(call(leases, "a"))
    await asyncio.sleep(3 * LEASE_SECONDS * TICK)
    assert not waiting.done()
    out = False
    assert await waiting == [1]


async def test_replicas_are_told_while_calls_are_open_there_and_one_that_does_not_answer_is_not_told_twice() -> None:
    told: list[str] = []

    async def renew(replica: str) -> None:
        told.append(replica)
        if replica == "deaf":
            await asyncio.Event().wait()
        if replica == "dead":
            raise ConnectionError

    renewals = Renewals(renew)
    for replica in ("well", "deaf", "dead", "well"):
        renewals.begin(replica)
    while told.count("well") < 3:
        await asyncio.sleep(TICK)
    assert told.count("deaf") == 1
    assert told.count("dead") > 1
    renewals.end("well")
    before = told.count("well")
    while told.count("well") == before:  # one call is left
        await asyncio.sleep(TICK)
    for replica in ("well", "deaf", "dead"):
        renewals.end(replica)
    await asyncio.sleep(2 * RENEWAL_SECONDS * TICK)
    before = len(told)
    await asyncio.sleep(2 * RENEWAL_SECONDS * TICK)
    assert len(told) == before


def test_a_reader_has_several_tries_and_longer_than_a_replica_has_to_answer() -> None:
    """A reader is asked nothing, so it must not be judged sooner than those who are."""
    assert LEASE_SECONDS >= 4 * RENEWAL_SECONDS
    assert LEASE_SECONDS > SILENCE_SECONDS + ANSWER_SECONDS
