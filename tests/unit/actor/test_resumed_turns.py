"""A turn that goes on in another engine, from its prompt and what was generated: as if nothing had happened."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine_actor.actor.actor import EngineActor
from engine_actor.messages import EndReason, Failure, HistorySpan, TurnEnded, TurnRequest, TurnTokens
from engine_actor.options import SamplingParams
from engine_actor.sampling.logprobs import TokenLogprob
from tests.support.actor_view import owner_of
from tests.support.doubles import MixingDecoder, SyntheticDecoder
from tests.unit.actor.helpers import Answer, ask, start_actor, turn

PROMPT = [5, 9, 13, 20, 21]
PENALTIES: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "greedy-penalties": SamplingParams(**PENALTIES),
    "seeded": SamplingParams(temperature=0.9, seed=77),
    "seeded-penalties": SamplingParams(temperature=1.3, top_p=0.95, min_p=0.001, seed=78, **PENALTIES),
}


def text_of(ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids)


def digest_of(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(text_of(ids).encode()).digest()


async def pair(**options: Any) -> tuple[EngineActor, EngineActor]:
    first, second = [
        await start_actor(MixingDecoder(vocab=24), blocks=200, detokenize=text_of, **options) for _ in range(2)
    ]
    return first, second


async def stop(*actors: EngineActor) -> None:
    for actor in actors:
        await actor.check_integrity()
        await actor.stop()


async def logprobs_of(actor: EngineActor, request: TurnRequest) -> list[TokenLogprob]:
    deltas = [delta async for delta in actor.stream_turn(request)]
    return [entry for delta in deltas if isinstance(delta, TurnTokens) for entry in delta.logprobs]


def limits(request: TurnRequest, limit: int, least: int) -> TurnRequest:
    return replace(request, max_generated_tokens=limit, min_generated_tokens=least)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    ("limit", "least", "stop_token"), [(30, 0, None), (12, 0, None), (40, 25, None), (40, 0, 7)],
    ids=["eos-or-limit", "limit", "minimum", "stop-token"],
)  # fmt: skip
async def test_after_every_cut_the_rest_is_what_it_would_have_been(
    sampling: SamplingParams, limit: int, least: int, stop_token: int | None
) -> None:
    whole, other = await pair()
    stops = frozenset() if stop_token is None else frozenset({stop_token})
    request = replace(turn(PROMPT, limit), sampling=sampling, min_generated_tokens=least, stop_token_ids=stops)
    undisturbed = await ask(whole, request)
    assert undisturbed.ended is not None and undisturbed.tokens
    assert len(undisturbed.tokens) >= least
    for cut in range(len(undisturbed.tokens) + 1):
        if cut == limit:
            continue  # complete: whoever asks knows the limit
        rest = await ask(other, request.resumed(undisturbed.tokens[:cut]))
        assert rest.tokens == undisturbed.tokens[cut:], f"cut after {cut}"
        assert rest.accepted is not None and rest.accepted.prompt_tokens == len(PROMPT)
        assert rest.ended is not None
        assert replace(rest.ended, cached_tokens=0) == replace(undisturbed.ended, cached_tokens=0)
    await stop(whole, other)


async def test_logprobs_go_on() -> None:
    whole, other = await pair()
    request = replace(turn(PROMPT, 9, seed=3, temperature=1.0), logprobs=2, ignore_eos=True)
    undisturbed = await logprobs_of(whole, request)
    assert len(undisturbed) == 9
    tokens = [entry.token for entry in undisturbed]
    assert await logprobs_of(other, request.resumed(tokens[:4])) == undisturbed[4:]
    await stop(whole, other)


async def test_a_turn_that_the_context_ends_is_cut_at_the_same_place() -> None:
    whole, other = await pair(max_model_len=20)
    request = replace(turn(PROMPT, 0), ignore_eos=True)
    undisturbed = await ask(whole, request)
    assert undisturbed.ended is not None and undisturbed.ended.reason is EndReason.LENGTH
    rest = await ask(other, request.resumed(undisturbed.tokens[:-1]))
    assert rest.tokens == undisturbed.tokens[-1:]
    assert rest.ended is not None and rest.ended.reason is EndReason.LENGTH
    full = await ask(other, request.resumed(undisturbed.tokens))
    assert full.refused is not None and full.refused.prompt_tokens == full.refused.limit == 20
    await stop(whole, other)


async def converse(actor: EngineActor, session: str, foreign: list[int]) -> tuple[TurnRequest, list[int], list[int]]:
    """Two turns, the second with the first one's answer in other tokens: the second as it was asked, and both
    answers."""
    first = await ask(actor, turn(PROMPT, 6, session))
    prompt = [*PROMPT, *foreign, 15]
    span = HistorySpan(len(PROMPT), len(PROMPT) + len(foreign), digest_of(first.tokens))
    second = replace(turn(prompt, 8, session, spans=(span,)), ignore_eos=True)
    return second, first.tokens, (await ask(actor, second)).tokens


async def test_a_session_goes_on_elsewhere_with_its_own_tokens_and_its_next_turn_finds_its_history() -> None:
    whole, other = await pair()
    foreign = [22, 23]
    second, first_answer, second_answer = await converse(whole, "undisturbed", foreign)

    accepted = (await ask(whole, replace(second, session_id="undisturbed"))).accepted
    assert accepted is not None and accepted.own_tokens == ((0, tuple(first_answer)),)
    effective = second.with_own_tokens(accepted.own_tokens)
    history = [*PROMPT, *first_answer, 15]
    assert list(effective.prompt_ids) == history
    assert effective.spans == (HistorySpan(5, 5 + len(first_answer), digest_of(first_answer)),)

    rest = await ask(other, replace(effective.resumed(second_answer[:3]), session_id="moved"))
    assert rest.tokens == second_answer[3:]
    assert rest.accepted is not None and rest.accepted.own_tokens == ()

    # The next turn names both answers by their texts, in tokens that neither engine has made.
    prompt = [*PROMPT, *foreign, 15, *foreign, 16]
    spans = (
        HistorySpan(5, 7, digest_of(first_answer)),
        HistorySpan(8, 10, digest_of(second_answer)),
    )
    third = turn(prompt, 8, "moved", spans=spans)
    answer = await ask(other, third)
    own = [*history, *second_answer, 16]
    assert answer.tokens == (await ask(whole, turn(own, 8))).tokens
    assert answer.accepted is not None
    assert answer.accepted.prompt_tokens == len(own)
    assert answer.accepted.cached_tokens == len(own) - 2  # all but the last answer's last token, and what is new
    await stop(whole, other)


async def test_a_turn_that_comes_back_to_an_engine_which_has_part_of_it_is_one_answer() -> None:
    """As after a replica that hung: it still holds a longer or shorter part of the answer."""
    whole, other = await pair()
    request = replace(turn(PROMPT, 10, "s"), ignore_eos=True)
    undisturbed = await ask(whole, request)
    for held, delivered in ((3, 6), (6, 3), (6, 6)):
        name = f"{held}-{delivered}"
        await ask(other, replace(request, session_id=name, max_generated_tokens=held))
        rest = await ask(other, replace(request.resumed(undisturbed.tokens[:delivered]), session_id=name))
        assert rest.tokens == undisturbed.tokens[delivered:]
        assert rest.accepted is not None and rest.ended is not None
        assert 0 < rest.accepted.cached_tokens <= rest.ended.cached_tokens <= len(PROMPT)
        span = HistorySpan(5, 6, digest_of(undisturbed.tokens))
        following = await ask(other, turn([*PROMPT, 3, 17], 4, name, spans=(span,)))
        assert following.accepted is not None
        assert following.accepted.prompt_tokens == len(PROMPT) + 10 + 1
    await stop(whole, other)


async def test_spans_are_found_although_another_before_them_is_unknown() -> None:
    actor, other = await pair()
    answer = await ask(actor, turn(PROMPT, 6, "s"))
    prompt = [*PROMPT, 22, 23, 17]
    spans = (HistorySpan(1, 2, digest_of([1])), HistorySpan(5, 7, digest_of(answer.tokens)))
    second = await ask(actor, turn(prompt, 4, "s", spans=spans))
    assert second.accepted is not None and second.accepted.own_tokens == ((1, tuple(answer.tokens)),)
    await stop(actor, other)


async def test_no_full_queue_refuses_a_turn_that_was_accepted_before() -> None:
    decoder = SyntheticDecoder(vocab=1000, eos=5000)
    actor = await start_actor(decoder, 1500, max_model_len=2000, max_batch_size=1, max_queued_turns=1)
    over, choose = threading.Event(), decoder.choose
    decoder.choose = lambda sequence: (over.wait(0.01), choose(sequence))[1]  # 1,900 tokens take long
    running = asyncio.create_task(ask(actor, turn([5, 9], 1900)))
    while not decoder.steps:
        await asyncio.sleep(0.001)
    queued = asyncio.create_task(ask(actor, turn([6, 9], 2)))
    await asyncio.sleep(0)
    await actor.stats()
    assert (await ask(actor, turn([7, 9], 2))).refused is not None
    resumed = asyncio.create_task(ask(actor, turn([7, 9], 2).resumed([])))
    await asyncio.sleep(0)
    await actor.stats()
    running.cancel()
    over.set()
    answers: list[Answer] = [await queued, await resumed]
    assert all(len(answer.tokens) == 2 for answer in answers)
    await stop(actor)


@pytest.mark.parametrize("fails", ["decoder", "command"])
async def test_an_engine_that_stops_ends_its_turns_as_resumable_and_says_so_at_once(fails: str) -> None:
    decoder = SyntheticDecoder(vocab=1000, eos=5000)
    actor = await start_actor(decoder, 1500, max_model_len=4000)
    asking = asyncio.create_task(ask(actor, turn([5, 9], 3000)))
    while len(decoder.steps) < 3:
        await asyncio.sleep(0.001)
    assert actor.routing_stats()["accepting"] is True

    def fail() -> None:
        raise RuntimeError("as the test wants")

    if fails == "decoder":
        decoder.fail_next = lambda: RuntimeError("as the test wants")
    else:
        assert owner_of(actor).post(fail)
    answer = await asking
    assert isinstance(answer.ended, TurnEnded)
    assert answer.ended.reason is EndReason.FAILED and answer.ended.resumable
    assert "as the test wants" in answer.ended.message
    assert actor.routing_stats()["accepting"] is False
    assert (await ask(actor, turn([5, 9], 3))).refused is not None
    await actor.stop()


async def test_a_replica_that_shuts_down_ends_its_turns_as_resumable_and_a_deleted_session_does_not() -> None:
    decoder = SyntheticDecoder(vocab=1000, eos=5000)
    actor = await start_actor(decoder, 1500, max_model_len=2000)
    deleted = asyncio.create_task(ask(actor, turn([5, 9], 1900, "s")))
    stopped = asyncio.create_task(ask(actor, turn([6, 9], 1900)))
    while len(decoder.steps) < 3:
        await asyncio.sleep(0.001)
    await actor.close_session("public", "s")
    await actor.stop()
    ends = [(await deleted).ended, (await stopped).ended]
    assert [end is not None and end.failure for end in ends] == [Failure.SESSION_DELETED, Failure.UNAVAILABLE]
    assert [end is not None and end.resumable for end in ends] == [False, True]
