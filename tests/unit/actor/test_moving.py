"""Sessions move from one replica to another and go on there, token for token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine_actor.messages import HistorySpan
from tests.support.doubles import SyntheticDecoder, solo
from tests.unit.actor.helpers import ask, start_actor, turn
from tests.unit.actor.stepped import staged


def detokenize(ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids)


async def test_a_conversation_goes_on_elsewhere_with_its_own_tokens() -> None:
    old = await start_actor(SyntheticDecoder(vocab=1000), 200, detokenize)
    new = await start_actor(SyntheticDecoder(vocab=1000), 200, detokenize)
    answer = await ask(old, turn([5, 9, 13], 6, "s"))
    for moved in await old.dormant_sessions():
        assert await new.adopt(moved)
    # The answer comes back as text whose tokens are others than those that were generated.
    digest = hashlib.sha256(detokenize(answer.tokens).encode()).digest()
    prompt = [5, 9, 13, 900, 901, 44, 45]
    second = await ask(new, turn(prompt, 5, "s", spans=(HistorySpan(3, 5, digest),)))
    true_prompt = [5, 9, 13, *answer.tokens, 44, 45]
    assert second.tokens == solo(true_prompt, 5, vocab=1000)
    assert second.ended is not None and second.ended.prompt_tokens == len(true_prompt)
    await new.check_integrity()
    await asyncio.gather(old.stop(), new.stop())


async def test_all_that_is_dormant_moves_the_last_used_first_and_nothing_that_runs() -> None:
    async with staged(blocks=12, max_model_len=40) as stage:
        for name in "abcd":  # the pool holds two of them: the others are remembered
            await stage.during(ask(stage.actor, turn([ord(name), *range(20)], 4, name)))
        assert len(await stage.during(stage.actor.sessions())) < 4
        await stage.ask(turn([7, 8], 30, "busy"))
        dormant = await stage.during(stage.actor.dormant_sessions())
        assert [moved.session_id for moved in dormant] == ["d", "c", "b", "a"]
        assert {len(moved.tokens) for moved in dormant} == {25}


async def test_a_conversation_that_comes_back_takes_the_place_of_what_it_left_behind() -> None:
    home, elsewhere = [await start_actor(SyntheticDecoder(vocab=1000), 200) for _ in range(2)]
    first = await ask(home, turn([5, 9, 13], 6, "s"))
    [moved] = await home.dormant_sessions()
    assert await elsewhere.adopt(moved)
    await ask(elsewhere, turn([5, 9, 13, *first.tokens, 44, 45], 6, "s"))
    [longer] = await elsewhere.dormant_sessions()
    busy = home.stream_turn(turn([5, 9, 13, *first.tokens], 30, "s"))
    await anext(busy)
    assert not await home.adopt(longer), "a turn is using it"
    await busy.aclose()
    other = await start_actor(SyntheticDecoder(vocab=1000), 200)
    await ask(other, turn([5, 9, 14], 1, "s"))
    assert not await other.adopt(longer), "it has been edited here"
    last = await start_actor(SyntheticDecoder(vocab=1000), 200)
    assert await last.adopt(moved)
    assert await last.adopt(longer)
    assert [kept.tokens for kept in await last.dormant_sessions()] == [longer.tokens]
    assert not await last.adopt(longer)
    assert await last.close_session("public", "s")
    assert not await last.adopt(longer), "it was deleted there"
    for actor in (home, elsewhere, other, last):
        await actor.check_integrity()
        await actor.stop()


async def test_what_is_known_is_newer_than_what_is_moved() -> None:
    old = await start_actor(SyntheticDecoder(vocab=1000), 200)
    new = await start_actor(SyntheticDecoder(vocab=1000), 200)
    await ask(old, turn([5, 9, 13], 6, "s"))
    await ask(new, turn([5, 9, 13], 8, "s"))
    [moved] = await old.dormant_sessions()
    assert not await new.adopt(moved)
    [kept] = await new.dormant_sessions()
    assert len(kept.tokens) == 11
    # Another owner's session of the same name is another session.
    other = await start_actor(SyntheticDecoder(vocab=1000), 200)
    await ask(other, turn([1, 2], 2, "s", cache_scope="b"))
    assert await other.adopt(moved)
    assert len(await other.dormant_sessions()) == 2
    await asyncio.gather(old.stop(), new.stop(), other.stop())


async def test_moved_conversations_are_bounded_as_others_are() -> None:
    old = await start_actor(SyntheticDecoder(vocab=1000), 200)
    new = await start_actor(SyntheticDecoder(vocab=1000), 200, max_sessions=2)
    for i in range(20):
        await ask(old, turn([5, 9, i], 2, f"s{i}"))
    for moved in await old.dormant_sessions():
        await new.adopt(moved)
    assert len(await new.dormant_sessions()) == 8  # four times max_sessions
    await asyncio.gather(old.stop(), new.stop())


LARGE = 2**30


async def test_a_conversation_takes_its_cache_along() -> None:
    old = await start_actor(SyntheticDecoder(vocab=1000), 200, detokenize)
    new = await start_actor(SyntheticDecoder(vocab=1000), 200, detokenize)
    answer = await ask(old, turn(list(range(10, 30)), 6, "s"))
    [described] = await old.dormant_sessions()
    assert described.kv is None and described.cached_tokens == 25  # the last token waits for the next turn
    moved = await old.take_along("public", "s", LARGE)
    assert moved is not None and moved.kv is not None and moved.kv.positions == 25
    assert moved.kv.content.nbytes == 7 * 32  # seven blocks of four tokens
    assert await new.adopt(moved)
    [resident] = await new.sessions()
    assert (resident.tokens, resident.cached_tokens, resident.blocks) == (26, 25, 7)
    prompt = [*range(10, 30), *answer.tokens, 44, 45]
    for home in (old, new):
        second = await ask(home, turn(prompt, 5, "s"))
        assert second.tokens == solo(prompt, 5, vocab=1000)
        assert second.accepted is not None and second.accepted.cached_tokens == 25
        assert second.ended is not None and second.ended.cached_tokens == 25
        await home.check_integrity()
    # It may be another prompt: what agrees is kept.
    third = await ask(new, turn([*range(10, 22), 7], 5, "s"))
    assert third.ended is not None and third.ended.cached_tokens == 12
    assert third.tokens == solo([*range(10, 22), 7], 5, vocab=1000)
    await new.check_integrity()
    await asyncio.gather(old.stop(), new.stop())


async def test_where_the_cache_cannot_stay_the_tokens_do() -> None:
    old = await start_actor(SyntheticDecoder(vocab=1000), 200)
    await ask(old, turn(list(range(10, 30)), 6, "s"))
    whole = await old.take_along("public", "s", LARGE)
    assert whole is not None and whole.kv is not None
    small = await old.take_along("public", "s", 7 * 64 - 1)
    assert small is not None and small.kv is None
    strange = replace(whole, kv=replace(whole.kv, fingerprint="another model"))
    for moved, blocks, sessions in ((small, 200, 4), (strange, 200, 4), (whole, 8, 4), (whole, 200, 1)):
        new = await start_actor(SyntheticDecoder(vocab=1000), blocks, max_sessions=sessions, max_model_len=40)
        await ask(new, turn([5, 6, 7, 8], 2, "other"))
        assert await new.adopt(moved)
        assert [info.session_id for info in await new.sessions()] == ["other"], "nobody gives way"
        second = await ask(new, turn([*whole.tokens, 44], 5, "s"))
        assert second.tokens == solo([*whole.tokens, 44], 5, vocab=1000)
        assert second.ended is not None and second.ended.cached_tokens == 0
        await new.check_integrity()
        await new.stop()
    await old.stop()


async def test_only_what_is_dormant_is_taken_along() -> None:
    async with staged() as stage:
        assert await stage.during(stage.actor.take_along("public", "s", LARGE)) is None
        [running] = await stage.ask(turn([7, 8], 30, "s"))
        assert await stage.during(stage.actor.take_along("public", "s", LARGE)) is None
        await stage.end(7)
        assert running.task.done()
        assert await stage.during(stage.actor.take_along("public", "s", LARGE)) is not None


async def test_what_moved_is_as_old_as_it_was() -> None:
    """Memory is made by those that were used least lately, wherever that was."""
    old = await start_actor(SyntheticDecoder(vocab=1000), 200)
    new = await start_actor(SyntheticDecoder(vocab=1000), 200, max_sessions=3)
    await ask(new, turn([5, 6, 7], 2, "here"))
    for name, idle in (("young", 0.0), ("old", 1000.0)):
        await ask(old, turn([1, 2, 3], 2, name))
        moved = await old.take_along("public", name, LARGE)
        assert moved is not None
        await new.adopt(replace(moved, idle_seconds=idle))
    assert [info.session_id for info in await new.sessions()] == ["old", "here", "young"]
    await ask(new, turn([9, 9], 2, "next"))
    assert [info.session_id for info in await new.sessions()] == ["here", "young", "next"]
    await asyncio.gather(old.stop(), new.stop())


async def test_a_cache_that_cannot_be_written_costs_the_conversation_only_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = SyntheticDecoder(vocab=1000)
    old = await start_actor(SyntheticDecoder(vocab=1000), 200)
    new = await start_actor(decoder, 200)
    await ask(old, turn([5, 9, 13], 6, "s"))
    moved = await old.take_along("public", "s", LARGE)
    assert moved is not None

    def fail(*_: object) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(decoder, "write_blocks", fail)
    with pytest.raises(MemoryError):
        await new.adopt(moved)
    assert [session.tokens for session in await new.dormant_sessions()] == [moved.tokens]
    await new.check_integrity()
    await asyncio.gather(old.stop(), new.stop())
