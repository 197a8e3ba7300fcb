from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from serve_app.openai.responses.memory_store import MemoryResponseStore
from serve_app.openai.responses.store import KeptCall, KeptMessage, StoredResponse, StoreLimits
from tests.support.response_store import MOST, ResponseStoreConformance, held, stored


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> MemoryResponseStore:
    return MemoryResponseStore(StoreLimits())


class TestMemoryStore(ResponseStoreConformance):
    pass


async def alive(store: MemoryResponseStore, *responses: StoredResponse) -> list[bool]:
    return [await store.get("o", response.id) is not None for response in responses]


async def test_the_conversation_that_rested_longest_makes_place() -> None:
    store = MemoryResponseStore(StoreLimits(max_responses=4))
    a, b = stored(), stored()
    a2, b2, c = stored(a), stored(b), stored()
    for response in (a, b, a2, b2):
        await store.put(response)
    assert await store.history("o", a2.id, MOST) is not None  # b is now the one that rests
    await store.put(c)
    assert await store.history("o", a2.id, MOST) is not None
    assert await alive(store, a, a2, b, b2, c) == [True, True, False, False, True]


async def test_bytes_are_bounded_and_given_back() -> None:
    sizes = stored(text="x" * 1000).bytes
    store = MemoryResponseStore(StoreLimits(max_bytes=3 * sizes))
    responses = [stored(text="x" * 1000) for _ in range(4)]
    for response in responses:
        await store.put(response)
    assert await alive(store, *responses) == [False, True, True, True]
    assert await store.delete("o", responses[1].id)
    await store.put(stored(text="x" * 1000))
    assert await alive(store, *responses) == [False, False, True, True]


async def test_a_response_larger_than_the_store_is_not_kept() -> None:
    store = MemoryResponseStore(StoreLimits(max_bytes=2000))
    small, large = stored(), stored(text="x" * 5000)
    await store.put(small)
    await store.put(large)
    assert await alive(store, small, large) == [False, False]
    await store.put(small)
    assert await alive(store, small) == [True]


async def test_a_conversation_that_rests_too_long_is_forgotten() -> None:
    clock = Clock()
    store = MemoryResponseStore(StoreLimits(max_idle_seconds=10), clock=clock)
    a, b = stored(), stored()
    await store.put(a)
    await store.put(b)
    clock.now = 9
    await store.history("o", a.id, MOST)
    clock.now = 15
    assert await alive(store, a, b) == [True, False]
    clock.now = 26
    assert await alive(store, a) == [False]


async def test_history_takes_no_more_memory_than_what_was_said() -> None:
    store = MemoryResponseStore(StoreLimits())
    last, used = None, []
    for _ in range(50):
        last = stored(last, text="x" * 100)
        await store.put(last)
        used.append(store.bytes)
    steps = {after - before for before, after in pairwise(used)}
    assert len(steps) == 1


async def test_calls_and_outputs_count_as_what_they_hold() -> None:
    plain = stored()
    for size in (1_000, 100_000):
        text = "x" * size
        for held_in in (KeptCall("c", text, "{}"), KeptCall("c", "f", text), KeptCall(text, "f", "{}")):
            calling = replace(plain, answer=replace(plain.answer, calls=(held_in,)))
            assert size <= calling.bytes - plain.bytes <= size + 400
        output = replace(plain, messages=(*plain.messages, KeptMessage("tool", text, call_id="c")))
        assert size <= output.bytes - plain.bytes <= size + 400
    many = replace(plain, messages=(KeptMessage("user", ""),) * 1000)
    assert many.bytes >= sum(map(sys.getsizeof, (many.messages, *(replace(message) for message in many.messages))))


async def test_what_is_put_again_replaces_itself() -> None:
    store = MemoryResponseStore(StoreLimits())
    first = stored()
    await store.put(first)
    used = store.bytes
    await store.put(first)
    assert store.bytes == used


async def test_a_turn_whose_conversation_has_gone_meanwhile_is_kept_without_history() -> None:
    store = MemoryResponseStore(StoreLimits())
    child = stored(stored())
    await store.put(child)
    assert await alive(store, child) == [True]
    assert await store.history("o", child.id, MOST) is None


@pytest.mark.parametrize("seed", range(10))
async def test_bounds_and_counts_hold_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    limits = StoreLimits(max_responses=12, max_bytes=12_000, max_idle_seconds=20)
    clock = Clock()
    store = MemoryResponseStore(limits, clock=clock)
    known: list[StoredResponse] = []
    for _ in range(300):
        clock.now += rng.random() * 3
        action = rng.randrange(5)
        if action < 3 or not known:
            previous = rng.choice([None, *known[-6:]])
            known.append(stored(previous, text="x" * rng.randrange(1500)))
            await store.put(known[-1])
        elif action == 3:
            await store.delete("o", rng.choice(known).id)
        else:
            await store.history("o", rng.choice(known).id, MOST)
        kept = [response for response in known if await store.get("o", response.id) is not None]
        assert len(kept) <= limits.max_responses
        assert store.bytes == sum(response.bytes for response in kept) <= limits.max_bytes


async def test_closing_the_holder_leaves_nothing() -> None:
    store = MemoryResponseStore(StoreLimits())
    running = stored()
    holding = held(store, running)
    await anext(holding)
    await holding.aclose()
    assert await alive(store, running) == [False]
    assert store.bytes == 0


async def test_a_holder_that_does_not_come_again_is_gone() -> None:
    clock = Clock()
    store = MemoryResponseStore(StoreLimits(), lease_seconds=0.001, clock=clock)
    running = stored()
    assert [told async for told in store.hold(running, "{}")] == [False]  # the lease is over
    assert await alive(store, running) == [True]
    clock.now = 0.0015
    assert [told async for told in store.hold(running, "{}")] == [False]
    clock.now = 0.003
    assert await alive(store, running) == [True]
    clock.now = 0.004
    assert await alive(store, running) == [False]
    assert await store.cancel("o", running.id) is None


async def test_a_cancellation_between_two_holds_is_not_lost() -> None:
    store = MemoryResponseStore(StoreLimits(), lease_seconds=0.001, clock=Clock())
    running = stored()
    assert [told async for told in store.hold(running, "{}")] == [False]
    assert await store.cancel("o", running.id) == "{}"
    assert [told async for told in store.hold(running, "{}")] == [False, True]
    assert await store.get("o", running.id) == "{}"
