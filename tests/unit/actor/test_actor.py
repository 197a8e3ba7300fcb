"""EngineActor over the synthetic decoder: streams, cancellation, pressure, failure, shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from engine_actor.actor.actor import EngineActor
from engine_actor.errors import EngineUnhealthy, RetryableStepError
from engine_actor.messages import EndReason, RefusalCode, TurnAccepted, TurnRefused, TurnTokens
from engine_actor.scheduling.scheduler import Scheduler
from engine_actor.scheduling.step_plan import StepPlan
from tests.support.actor_view import owner_of
from tests.support.doubles import SyntheticDecoder, solo
from tests.unit.actor.helpers import ask, start_actor, turn


@pytest.fixture
async def decoder() -> SyntheticDecoder:
    return SyntheticDecoder(vocab=1000)


@pytest.fixture
async def actor(decoder: SyntheticDecoder) -> AsyncIterator[EngineActor]:
    actor = await start_actor(decoder)
    yield actor
    await actor.check_integrity()
    await actor.stop()


def answer_of(prompt: list[int], count: int) -> list[int]:
    return solo(prompt, count, vocab=1000)


async def test_a_turn_is_accepted_streams_and_ends_with_its_usage(actor: EngineActor) -> None:
    answer = await ask(actor, turn([5, 9, 13], 6))
    assert answer.tokens == answer_of([5, 9, 13], 6)
    assert answer.accepted == TurnAccepted("replica-1", 3, 0)
    assert answer.ended is not None
    assert (answer.ended.reason, answer.ended.prompt_tokens, answer.ended.generated_tokens) == (EndReason.LENGTH, 3, 6)


async def test_many_turns_at_once_each_equal_their_solo_run(actor: EngineActor) -> None:
    prompts = [[3 + i, 9, 13 + i] for i in range(40)]
    answers = await asyncio.gather(*[ask(actor, turn(prompt, 12)) for prompt in prompts])
    assert [answer.tokens for answer in answers] == [answer_of(prompt, 12) for prompt in prompts]
    assert (await actor.stats())["requests"] == 0


async def test_a_prompt_that_never_fits_is_refused_with_its_numbers_while_others_go_on(actor: EngineActor) -> None:
    good = asyncio.create_task(ask(actor, turn([5, 9, 13], 30)))
    refused = (await ask(actor, turn(list(range(2, 302)), 5))).refused
    assert refused is not None and refused.code is RefusalCode.CONTEXT_LENGTH
    assert (refused.prompt_tokens, refused.limit, refused.retry_after) == (300, 256, 0.0)
    assert (await good).tokens == answer_of([5, 9, 13], 30)


async def test_a_token_outside_the_vocabulary_is_refused_as_invalid(actor: EngineActor) -> None:
    refused = (await ask(actor, turn([5, 1000], 5))).refused
    assert refused is not None and refused.code is RefusalCode.INVALID and "1000" in refused.message


async def test_closing_the_iterator_stops_the_turn_and_frees_an_anonymous_one(
    actor: EngineActor, decoder: SyntheticDecoder
) -> None:
    stream = actor.stream_turn(turn([5, 9, 13], 200))
    seen = 0
    async for delta in stream:
        seen += isinstance(delta, TurnTokens)
        if seen == 3:
            break
    await stream.aclose()
    stats = await actor.stats()  # a command posted after the cancel: the owner has handled both
    steps = len(decoder.steps)
    assert (stats["requests"], stats["running"], stats["residents"]) == (0, 0, 0)
    await actor.stats()
    assert len(decoder.steps) == steps


async def test_a_cancelled_turn_of_a_session_keeps_its_committed_tokens(actor: EngineActor) -> None:
    stream = actor.stream_turn(turn([5, 9, 13], 200, "s"))
    tokens: list[int] = []
    async for delta in stream:
        if isinstance(delta, TurnTokens):
            tokens += delta.token_ids
        if len(tokens) >= 9:
            break
    await stream.aclose()
    answer = await ask(actor, turn([5, 9, 13, *tokens, 77], 5, "s"))
    assert answer.accepted is not None and answer.accepted.cached_tokens >= 3 + 9 - 1
    assert answer.tokens == answer_of([5, 9, 13, *tokens, 77], 5)
    assert len(await actor.sessions()) == 1


async def test_cancelling_before_anything_arrived_leaves_nothing(actor: EngineActor) -> None:
    for session in (None, "s"):
        task = asyncio.create_task(ask(actor, turn([5, 9, 13], 1000, session)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await actor.drain()
    stats = await actor.stats()
    assert stats["running"] == stats["waiting"] == 0


async def test_turns_of_one_session_run_one_after_the_other_in_order(actor: EngineActor) -> None:
    first = asyncio.create_task(ask(actor, turn([5, 9, 13], 20, "s")))
    await asyncio.sleep(0)
    prompt = [5, 9, 13, *answer_of([5, 9, 13], 20), 8]
    second = asyncio.create_task(ask(actor, turn(prompt, 4, "s")))
    await first
    answer = await second
    assert answer.tokens == answer_of(prompt, 4)
    # The last token of a turn that ended by its limit is not in the cache (F029); all else is.
    assert answer.accepted is not None and answer.accepted.cached_tokens == len(prompt) - 2


async def test_a_waiting_turn_of_a_session_can_be_cancelled(actor: EngineActor) -> None:
    first = asyncio.create_task(ask(actor, turn([5, 9, 13], 60, "s")))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(ask(actor, turn([7], 4, "s")))
    await asyncio.sleep(0)
    waiting.cancel()
    assert (await first).tokens == answer_of([5, 9, 13], 60)
    assert (await ask(actor, turn([7, 8], 3, "s"))).tokens == answer_of([7, 8], 3)


def _wait(event: threading.Event) -> None:
    assert event.wait(20)


async def test_whoever_is_accepted_or_refused_hears_of_it_before_the_step(decoder: SyntheticDecoder) -> None:
    commands, step = threading.Event(), threading.Event()
    choose, decoder.choose = decoder.choose, lambda sequence: (step.wait(20), choose(sequence))[1]
    actor = await start_actor(decoder, max_turns_per_session=1)
    owner_of(actor).post(partial(_wait, commands))  # so that the turns come to the same round
    turns = [actor.stream_turn(turn([5, 9, i], 3, session)) for i, session in ((11, "s"), (12, "s"), (13, None))]
    first = [asyncio.ensure_future(anext(deltas)) for deltas in turns]
    await asyncio.sleep(0)
    commands.set()
    async with asyncio.timeout(10):
        accepted, refused, anonymous = await asyncio.gather(*first)
    assert isinstance(accepted, TurnAccepted) and isinstance(anonymous, TurnAccepted)
    assert isinstance(refused, TurnRefused) and refused.code is RefusalCode.SESSION_BUSY
    step.set()
    for i, deltas in ((11, turns[0]), (13, turns[2])):
        tokens = [token async for delta in deltas if isinstance(delta, TurnTokens) for token in delta.token_ids]
        assert tokens == answer_of([5, 9, i], 3)
    await actor.stop()


async def test_whoever_waits_or_asks_again_each_answer_equals_its_solo_run(decoder: SyntheticDecoder) -> None:
    actor = await start_actor(decoder, max_batch_size=4, max_queued_turns=4)
    prompts = [[3 + i, 9, 13 + i] for i in range(40)]
    refusals = 0

    async def insist(prompt: list[int]) -> list[int]:
        nonlocal refusals
        while (answer := await ask(actor, turn(prompt, 12))).refused is not None:
            refusals += 1
            await asyncio.sleep(0.001)
        return answer.tokens

    answers = await asyncio.gather(*[insist(prompt) for prompt in prompts])
    assert answers == [answer_of(prompt, 12) for prompt in prompts] and refusals
    await actor.check_integrity()
    await actor.stop()


async def test_queues_are_bounded(decoder: SyntheticDecoder) -> None:
    gate = threading.Event()
    choose, decoder.choose = decoder.choose, lambda sequence: (gate.wait(20), choose(sequence))[1]
    actor = await start_actor(decoder, max_queued_turns=3, max_turns_per_session=2, max_batch_size=1)
    tasks = [asyncio.create_task(ask(actor, turn([5, 9, i], 3, "busy" if i < 14 else None))) for i in range(11, 20)]
    await asyncio.sleep(0.05)
    gate.set()
    answers = [await task for task in tasks]
    refused = [answer.refused.code for answer in answers if answer.refused]
    assert RefusalCode.SESSION_BUSY in refused and RefusalCode.QUEUE_FULL in refused
    for i, answer in zip(range(11, 20), answers, strict=True):
        turned_away = answer.refused is not None and answer.refused.retry_after > 0
        assert turned_away or answer.tokens == answer_of([5, 9, i], 3)
    await actor.stop()


async def test_a_step_that_fails_once_changes_nothing_that_a_client_sees(
    actor: EngineActor, decoder: SyntheticDecoder
) -> None:
    choose = decoder.choose

    def fail_the_sixth_step(sequence: list[int]) -> int:
        if len(decoder.steps) == 5:
            decoder.fail_next = lambda: RetryableStepError("try again")
        return choose(sequence)

    decoder.choose = fail_the_sixth_step
    assert (await ask(actor, turn([5, 9, 13], 20))).tokens == answer_of([5, 9, 13], 20)
    assert (await actor.stats())["rollbacks"] == 1


async def test_no_memory_for_a_plan_is_a_pause_and_not_the_end(
    actor: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, calls = Scheduler.plan, 0

    def fail_at_first(scheduler: Scheduler, transaction_id: int) -> StepPlan:
        nonlocal calls
        calls += 1
        if calls in (1, 2, 5):
            raise MemoryError("injected")
        return plan(scheduler, transaction_id)

    monkeypatch.setattr(Scheduler, "plan", fail_at_first)
    assert (await ask(actor, turn([5, 9, 13], 9))).tokens == answer_of([5, 9, 13], 9)
    actor.check_health()


async def test_a_fatal_failure_ends_open_turns_refuses_new_ones_and_fails_the_health_check(
    decoder: SyntheticDecoder,
) -> None:
    actor = await start_actor(decoder)
    actor.check_health()
    tasks = [asyncio.create_task(ask(actor, turn([5, 9, 13], 400, session))) for session in (None, "s", "s")]
    while len(decoder.steps) < 3:
        await asyncio.sleep(0.001)
    decoder.fail_next = lambda: RuntimeError("the device is gone")
    first, second, third = [await task for task in tasks]
    for answer in (first, second):
        assert answer.ended is not None and answer.ended.reason is EndReason.FAILED
        assert "the device is gone" in answer.ended.message
    assert third.refused is not None and third.refused.code is RefusalCode.UNAVAILABLE
    later = (await ask(actor, turn([5], 1))).refused
    assert later is not None and later.code is RefusalCode.UNAVAILABLE
    with pytest.raises(EngineUnhealthy, match="the device is gone"):
        actor.check_health()
    assert actor.routing_stats()["accepting"] is False
    await actor.stop()


async def test_draining_lets_running_turns_finish_and_takes_no_new_ones(actor: EngineActor) -> None:
    running = asyncio.create_task(ask(actor, turn([5, 9, 13], 50)))
    await asyncio.sleep(0.01)
    draining = asyncio.create_task(actor.drain())
    await asyncio.sleep(0)
    refused = (await ask(actor, turn([5], 1))).refused
    assert refused is not None and refused.code is RefusalCode.UNAVAILABLE
    await draining
    assert running.done() or (await running)
    assert running.result().tokens == answer_of([5, 9, 13], 50)


async def test_stopping_ends_open_turns_with_a_reason() -> None:
    endless = SyntheticDecoder(vocab=1000, eos=5000)
    actor = await start_actor(endless, blocks=1500, max_model_len=4000)
    task = asyncio.create_task(ask(actor, turn([5, 9, 13], 3900)))
    while len(endless.steps) < 2:
        await asyncio.sleep(0.001)
    await actor.stop()
    ended = (await task).ended
    assert ended is not None and ended.reason is EndReason.FAILED and "shutting down" in ended.message


async def test_an_idle_owner_thread_makes_no_steps_and_stays_healthy(
    actor: EngineActor, decoder: SyntheticDecoder
) -> None:
    await ask(actor, turn([5, 9, 13], 3))
    steps = len(decoder.steps)
    await asyncio.sleep(0.2)
    assert len(decoder.steps) == steps
    actor.check_health()


async def test_seeds_decide_sampled_text(actor: EngineActor, decoder: SyntheticDecoder) -> None:
    # The double gives one token all the weight; a temperature this high makes every token likely.
    texts = [(await ask(actor, turn([5, 9, 13], 12, temperature=100.0, seed=seed))).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
