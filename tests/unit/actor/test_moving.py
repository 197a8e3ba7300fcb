"""Conversations move from one replica to another and go on there, token for token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from engine_actor.turns import HistorySpan
from tests.support.doubles import SyntheticDecoder, solo
from tests.unit.actor.helpers import ask, start_actor, turn


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
    actor = await start_actor(SyntheticDecoder(vocab=1000), blocks=12, max_model_len=40)
    for name in "abcd":  # the pool holds two of them: the others are remembered
        await ask(actor, turn([ord(name), *range(20)], 4, name))
    assert len(await actor.sessions()) < 4
    running = actor.stream_turn(turn([7, 8], 30, "busy"))
    await anext(running)
    assert [moved.session_id for moved in await actor.dormant_sessions()] == ["d", "c", "b", "a"]
    assert {len(moved.tokens) for moved in await actor.dormant_sessions()} == {25}
    await running.aclose()
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
    await ask(other, turn([1, 2], 2, "s", owner="b"))
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
