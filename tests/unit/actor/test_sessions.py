"""What a session keeps between turns, and what happens under pressure."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine_actor.messages import HistorySpan, RefusalCode
from engine_actor.sessions.session import common_prefix
from tests.support.doubles import SyntheticDecoder, solo
from tests.unit.actor.helpers import ask, start_actor, turn


def answer_of(prompt: list[int], count: int) -> list[int]:
    return solo(prompt, count, vocab=1000)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 2000])
def test_common_prefix_finds_the_first_difference(length: int) -> None:
    a = [7] * length
    assert common_prefix(a, [*a, 1]) == common_prefix([*a, 2], [*a, 1, 3]) == common_prefix([*a, 2], a) == length


async def test_a_conversation_computes_only_its_new_tokens() -> None:
    decoder = SyntheticDecoder(vocab=1000)
    actor = await start_actor(decoder, blocks=200)
    history = [5, 9, 13]
    for i in range(10):
        answer = await ask(actor, turn(history, 7, "s"))
        assert answer.tokens == answer_of(history, 7)
        assert answer.accepted is not None and answer.ended is not None
        assert answer.ended.prompt_tokens == len(history)
        if i:
            # New: two tokens of input, and the last token of the answer before, which was never fed (F029).
            assert answer.ended.cached_tokens == answer.accepted.cached_tokens == len(history) - 3
        history = [*history, *answer.tokens, 40 + i, 50 + i]
    await actor.check_integrity()
    await actor.stop()


async def test_edited_history_is_right_and_reuses_only_what_is_common() -> None:
    decoder = SyntheticDecoder(vocab=1000)
    actor = await start_actor(decoder, blocks=200)
    first = [5, 9, 13, 20, 21, 22, 23, 24, 25, 26]
    await ask(actor, turn(first, 9, "s"))
    edited = [5, 9, 13, 20, 21, 99, 23, 24, 25, 26, 30]
    answer = await ask(actor, turn(edited, 9, "s"))
    assert answer.tokens == answer_of(edited, 9)
    assert answer.accepted is not None and answer.accepted.cached_tokens in (4, 5)  # 4: its block was shared
    shorter = await ask(actor, turn([5, 9, 13], 9, "s"))
    assert shorter.tokens == answer_of([5, 9, 13], 9)
    unrelated = await ask(actor, turn([8, 8], 9, "s"))
    assert unrelated.tokens == answer_of([8, 8], 9)
    await actor.check_integrity()
    await actor.stop()


async def test_the_same_prompt_again_computes_one_token() -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000), blocks=200)
    prompt = list(range(10, 30))
    await ask(actor, turn(prompt, 1, "s"))
    answer = await ask(actor, turn(prompt, 5, "s"))
    assert answer.tokens == answer_of(prompt, 5)
    assert answer.accepted is not None and answer.accepted.cached_tokens >= len(prompt) - 4
    await actor.stop()


async def test_owners_do_not_share_a_session_of_the_same_name() -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000), blocks=200)
    prompt = list(range(10, 30))
    await ask(actor, turn(prompt, 4, "s", cache_scope="a"))
    other = await ask(actor, turn(prompt, 4, "s", cache_scope="b"))
    assert other.ended is not None and other.ended.cached_tokens == 0
    assert [info.cache_scope for info in await actor.sessions("a")] == ["a"]
    assert await actor.close_session("b", "s") and not await actor.close_session("b", "s")
    assert [info.cache_scope for info in await actor.sessions()] == ["a"]
    await actor.stop()


async def test_history_that_comes_back_as_other_tokens_is_taken_from_what_was_generated() -> None:
    def detokenize(ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)

    actor = await start_actor(SyntheticDecoder(vocab=1000), 200, detokenize)
    answer = await ask(actor, turn([5, 9, 13], 6, "s"))
    digest = hashlib.sha256(detokenize(answer.tokens).encode()).digest()
    retokenized = [900, 901, 902]  # another spelling of the same text
    prompt = [5, 9, 13, *retokenized, 44, 45]
    second = await ask(actor, turn(prompt, 5, "s", spans=(HistorySpan(3, 6, digest),)))
    true_prompt = [5, 9, 13, *answer.tokens, 44, 45]
    assert second.tokens == answer_of(true_prompt, 5)
    assert second.ended is not None
    assert (second.ended.prompt_tokens, second.ended.cached_tokens) == (len(true_prompt), len(true_prompt) - 3)
    changed = hashlib.sha256(b"another text").digest()
    third = await ask(actor, turn(prompt, 5, "s", spans=(HistorySpan(3, 6, changed),)))
    assert third.tokens == answer_of(prompt, 5)
    await actor.stop()


async def test_dormant_sessions_give_way_oldest_first_and_are_recomputed_later() -> None:
    decoder = SyntheticDecoder(vocab=1000)
    actor = await start_actor(decoder, blocks=12, max_model_len=40)
    prompts = {f"s{i}": [5 + i, 9, 13, 17, 21, 25] for i in range(6)}
    answers = {}
    for name, prompt in prompts.items():
        answers[name] = (await ask(actor, turn(prompt, 6, name))).tokens
        assert answers[name] == answer_of(prompt, 6)
    resident = [info.session_id for info in await actor.sessions()]
    assert resident == ["s3", "s4", "s5"] or resident == ["s2", "s3", "s4", "s5"]
    again = [*prompts["s0"], *answers["s0"], 71]
    answer = await ask(actor, turn(again, 6, "s0"))
    assert answer.tokens == answer_of(again, 6)
    await actor.check_integrity()
    await actor.stop()


async def test_everything_finishes_in_a_pool_for_a_few_by_deferral_eviction_and_preemption() -> None:
    decoder = SyntheticDecoder(vocab=1000)
    actor = await start_actor(decoder, blocks=20, max_model_len=60, max_batch_size=8)
    prompts = [[5 + i, 9, *range(20, 20 + i)] for i in range(24)]
    names: list[str | None] = [f"s{i}" if i % 3 else None for i in range(24)]
    answers = await asyncio.gather(
        *[ask(actor, turn(prompt, 30, name)) for prompt, name in zip(prompts, names, strict=True)]
    )
    assert [answer.tokens for answer in answers] == [answer_of(prompt, 30) for prompt in prompts]
    assert (await actor.stats())["preemptions"] > 0
    await actor.check_integrity()
    await actor.stop()


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("prompt", [[5, 9, 13, 77], [6, 9, 13, 77]])
async def test_a_turn_that_the_engine_refuses_takes_nothing_of_its_conversation(
    prompt: list[int], evicted: bool
) -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000), 200, max_model_len=60, max_sessions=1)
    await ask(actor, turn([5, 9, 13], 6, "s"))
    if evicted:
        await ask(actor, turn([1, 2], 1, "t"))
    [before] = [moved.tokens for moved in await actor.dormant_sessions() if moved.session_id == "s"]
    refused = (await ask(actor, replace(turn(prompt, 0, "s"), min_generated_tokens=58))).refused
    assert refused is not None and refused.code is RefusalCode.INVALID
    assert [m.tokens for m in await actor.dormant_sessions() if m.session_id == "s"] == [before]
    await actor.check_integrity()
    following = await ask(actor, turn([*before, 44, 45], 4, "s"))
    assert following.tokens == solo([*before, 44, 45], 4, vocab=1000)
    await actor.stop()


async def test_the_number_of_resident_sessions_is_bounded() -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000), blocks=200, max_sessions=3)
    for i in range(8):
        await ask(actor, turn([5 + i, 6], 3, f"s{i}"))
    assert [info.session_id for info in await actor.sessions()] == ["s5", "s6", "s7"]
    await actor.stop()


async def test_a_running_session_can_be_deleted_and_its_waiting_turns_start_anew() -> None:
    decoder = SyntheticDecoder(vocab=1000, eos=5000)  # never ends by itself
    actor = await start_actor(decoder, blocks=1500, max_model_len=4000)
    running = asyncio.create_task(ask(actor, turn([5, 9, 13], 3900, "s")))
    while len(decoder.steps) < 3:
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(ask(actor, turn([5, 9, 14], 5, "s")))
    await asyncio.sleep(0)
    await actor.stats()  # a later command: the owner has taken the waiting turn
    assert await actor.close_session("public", "s")
    ended = (await running).ended
    assert ended is not None and "deleted" in ended.message
    assert (await waiting).tokens == answer_of([5, 9, 14], 5)
    await actor.check_integrity()
    await actor.stop()


async def test_random_conversations_always_answer_as_if_alone() -> None:
    rng = random.Random(7)
    decoder = SyntheticDecoder(vocab=1000)
    actor = await start_actor(decoder, blocks=30, max_model_len=90, max_sessions=4, chunk_size=5)
    histories: dict[str, list[int]] = {f"s{i}": [2 + i] for i in range(8)}

    async def converse(name: str) -> None:
        for _ in range(6):
            history = histories[name]
            if rng.random() < 0.3:
                history = history[: rng.randrange(1, len(history) + 1)]
            history = [*history, *[rng.randrange(2, 1000) for _ in range(rng.randrange(1, 6))]][-70:]
            answer = await ask(actor, turn(history, 8, name))
            assert answer.tokens == answer_of(history, 8)
            histories[name] = [*history, *answer.tokens]

    await asyncio.gather(*[converse(name) for name in histories])
    await actor.check_integrity()
    await actor.stop()
