"""Several answers to one prompt, and what is told of their tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine_actor.actor.actor import EngineActor
from engine_actor.messages import EndReason, TurnAccepted, TurnEnded, TurnRequest, TurnTokens
from engine_actor.sampling.logprobs import TokenLogprob
from tests.support.doubles import SyntheticDecoder, solo
from tests.unit.actor.helpers import ask, start_actor, turn

HOT: dict[str, Any] = {"temperature": 100.0}


async def choices_of(actor: EngineActor, request: TurnRequest) -> tuple[list[list[int]], list[TurnEnded], int]:
    tokens: list[list[int]] = [[] for _ in range(request.choices)]
    ended, cached = [], 0
    async for delta in actor.stream_turn(request):
        match delta:
            case TurnTokens():
                tokens[delta.choice] += delta.token_ids
            case TurnEnded():
                ended.append(delta)
            case TurnAccepted():
                cached = delta.cached_tokens
    return tokens, ended, cached


@pytest.mark.parametrize("session", [None, "s"])
async def test_choices_differ_are_reproducible_and_the_prompt_is_computed_once(session: str | None) -> None:
    decoder = SyntheticDecoder(vocab=1000, eos=5000)
    actor = await start_actor(decoder, 200)
    prompt = list(range(10, 40))
    request = replace(turn(prompt, 9, session, seed=7, **HOT), choices=3)
    tokens, ended, _ = await choices_of(actor, request)
    assert [len(t) for t in tokens] == [9, 9, 9] and len({tuple(t) for t in tokens}) == 3
    assert sorted(e.choice for e in ended) == [0, 1, 2]
    assert all(e.prompt_tokens == 30 and e.generated_tokens == 9 for e in ended)
    # Each of the others computes the last one or two tokens of the prompt again, for logits of its own.
    assert (await actor.stats())["prefill_tokens"] <= 30 + 2 * 2
    again, _, _ = await choices_of(actor, replace(request, session_id=None))
    assert again == tokens
    alone, _, _ = await choices_of(actor, replace(request, session_id=None, choices=1))
    assert alone == tokens[:1]
    await actor.check_integrity()
    assert (await actor.stats())["requests"] == (session is not None)
    await actor.stop()


async def test_a_session_goes_on_from_its_first_choice() -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000, eos=5000), 200)
    prompt = list(range(10, 40))
    tokens, _, _ = await choices_of(actor, replace(turn(prompt, 8, "s", seed=7, **HOT), choices=2))
    answer = await ask(actor, turn([*prompt, *tokens[0], 77], 4, "s"))
    assert answer.accepted is not None and answer.accepted.cached_tokens == 30 + 8 - 1
    assert answer.tokens == solo([*prompt, *tokens[0], 77], 4, vocab=1000, eos=5000)
    await actor.stop()


async def test_choices_that_end_at_once_all_end() -> None:
    decoder = SyntheticDecoder(vocab=64)
    decoder.choose = lambda sequence: 1  # EOS
    actor = await start_actor(decoder, 50)
    tokens, ended, _ = await choices_of(actor, replace(turn([5, 6, 7], 9), choices=4))
    assert tokens == [[], [], [], []]
    assert [e.reason for e in ended] == [EndReason.STOP] * 4
    assert (await actor.stats())["requests"] == 0
    await actor.stop()


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9]])
async def test_short_prompts_branch_too(prompt: list[int]) -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000, eos=5000), 50)
    tokens, _, _ = await choices_of(actor, replace(turn(prompt, 6), choices=3))
    assert tokens == [solo(prompt, 6, vocab=1000, eos=5000)] * 3  # greedy: all the same
    await actor.stop()


async def test_more_choices_than_places_wait_and_finish() -> None:
    actor = await start_actor(
        SyntheticDecoder(vocab=1000, eos=5000), 20, max_sessions=1, max_batch_size=2, max_model_len=60
    )
    prompt = list(range(10, 22))
    tokens, ended, _ = await choices_of(actor, replace(turn(prompt, 20), choices=9))
    assert tokens == [solo(prompt, 20, vocab=1000, eos=5000)] * 9
    assert len(ended) == 9
    await actor.check_integrity()
    await actor.stop()


async def test_a_caller_that_leaves_ends_all_choices() -> None:
    decoder = SyntheticDecoder(vocab=1000, eos=5000)
    actor = await start_actor(decoder, 800, max_model_len=900)
    stream = actor.stream_turn(replace(turn([5, 6, 7, 8, 9], 800, "s"), choices=3))
    seen: set[int] = set()
    async for delta in stream:
        if isinstance(delta, TurnTokens):
            seen.add(delta.choice)
        if len(seen) == 3:
            break
    await stream.aclose()
    await actor.drain()
    stats = await actor.stats()
    assert (stats["running"], stats["requests"]) == (0, 1)  # the session's own
    await actor.stop()


async def test_deleting_the_session_ends_all_choices() -> None:
    decoder = SyntheticDecoder(vocab=1000, eos=5000)
    actor = await start_actor(decoder, 3000, max_model_len=2900)
    task = asyncio.create_task(choices_of(actor, replace(turn([5, 6, 7], 2800, "s"), choices=2)))
    while len(decoder.steps) < 4:
        await asyncio.sleep(0.001)
    assert await actor.close_session("public", "s")
    _, ended, _ = await task
    assert [e.reason for e in ended] == [EndReason.FAILED] * 2
    assert (await actor.stats())["requests"] == 0
    await actor.stop()


async def test_logprobs_come_with_their_tokens() -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000, eos=5000), 50)
    found: list[TokenLogprob] = []
    async for delta in actor.stream_turn(replace(turn([5, 6, 7], 5), logprobs=2)):
        if isinstance(delta, TurnTokens):
            assert [entry.token for entry in delta.logprobs] == list(delta.token_ids)
            found += delta.logprobs
    assert len(found) == 5
    for entry in found:
        assert entry.logprob == pytest.approx(0.0, abs=1e-6)  # the double gives one token all the weight
        assert entry.top[0] == (entry.token, entry.logprob) and len(entry.top) == 2
    await actor.stop()


async def test_a_turn_does_not_end_before_its_minimum() -> None:
    decoder = SyntheticDecoder(vocab=64)
    actor = await start_actor(decoder, 50)
    usual = (await ask(actor, turn([3, 8, 2, 15], 40))).tokens
    ended_early = len(usual) < 40
    request = replace(turn([3, 8, 2, 15], 40), min_generated_tokens=40)
    longer = (await ask(actor, request)).tokens
    assert ended_early and len(longer) == 40 and longer[: len(usual)] == usual
    assert 1 not in longer
    await actor.stop()
