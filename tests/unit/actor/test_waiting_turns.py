"""Turns wait for a place in the order of the queue, and are told what to expect where it is full."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine_actor.messages import EndReason, ForkOutcome, RefusalCode, TurnRequest
from tests.support.actor_view import owner_of
from tests.support.doubles import solo
from tests.unit.actor.helpers import turn
from tests.unit.actor.stepped import Asked, Stage, staged

LONG = 3000


def long_turn(first: int, session: str | None = None, *, priority: int = 0, choices: int = 1) -> TurnRequest:
    """Goes on until the test ends it; known by its first token."""
    return replace(turn([first, 7, 9], LONG, session), priority=priority, choices=choices)


def begun(asked: list[Asked]) -> list[bool]:
    return [one.begun for one in asked]


async def order_of(stage: Stage, firsts: list[int], waiting: dict[int, Asked]) -> list[int]:
    """In which order turns begin when what runs is ended one after the other."""
    order: list[int] = []
    running = list(firsts)
    while waiting:
        await stage.end(running.pop(0))
        new = [first for first, one in waiting.items() if one.begun]
        for first in new:
            del waiting[first]
        order += new
        running += new
    return order


async def test_the_33rd_turn_waits_while_32_run_and_begins_when_one_ends() -> None:
    async with staged() as stage:
        asked = await stage.ask(*(long_turn(10 + i) for i in range(34)))
        assert begun(asked) == [True] * 32 + [False] * 2
        stats = await stage.settle()
        assert (stats["running"], stats["waiting"], stats["waiting_turns"]) == (32, 0, 2)
        tokens = len(asked[32].answer.tokens)
        assert tokens == 0
        await stage.end(20)
        assert asked[10].answer.ended is not None
        assert begun(asked) == [True] * 33 + [False]
        stats = await stage.settle()
        assert (stats["running"], stats["waiting_turns"]) == (32, 1)


async def test_a_turn_that_has_waited_hears_that_it_begins_before_its_first_step() -> None:
    async with staged(max_batch_size=1) as stage:
        _, waiting = await stage.ask(long_turn(10), long_turn(11))
        async with asyncio.timeout(20):
            while not stage.decoder.waits:
                await asyncio.sleep(0.001)
            stage.decoder.over.add(10)
            stage.decoder.make_step()
            while not waiting.begun:
                await asyncio.sleep(0.001)
        assert not waiting.answer.tokens


async def test_a_running_answer_gets_a_token_in_every_step_whoever_waits() -> None:
    async with staged(max_batch_size=4) as stage:
        running = await stage.ask(*(long_turn(10 + i) for i in range(4)))
        steps, tokens = len(stage.decoder.steps), [len(one.answer.tokens) for one in running]
        await stage.ask(*(long_turn(20 + i) for i in range(12)))
        made = len(stage.decoder.steps) - steps
        gained = [len(one.answer.tokens) - before for one, before in zip(running, tokens, strict=True)]
        assert made > 3 and all(abs(made - one) <= 1 for one in gained)  # what the last step made may be on its way


async def test_a_full_queue_refuses_with_the_time_after_which_those_that_wait_have_begun() -> None:
    async with staged(max_batch_size=2, max_queued_turns=3) as stage:
        asked = await stage.ask(*(long_turn(10 + i) for i in range(6)))
        assert begun(asked) == [True] * 2 + [False] * 4
        refused = [one.answer.refused for one in asked]
        assert refused[:5] == [None] * 5
        last = refused[5]
        assert last is not None and last.code is RefusalCode.QUEUE_FULL
        assert "3 turns" in last.message and last.retry_after == 1.0  # nothing has ended yet
        await stage.end(10)  # then there is room for one
        again, more = await stage.ask(long_turn(30), long_turn(31))
        assert again.answer.refused is None and more.answer.refused is not None


async def test_by_default_three_wait_for_each_that_runs() -> None:
    async with staged(max_batch_size=2) as stage:
        asked = await stage.ask(*(long_turn(10 + i) for i in range(9)))
        assert [one.answer.refused is not None for one in asked] == [False] * 8 + [True]


async def test_a_burst_that_finds_free_places_does_not_fill_the_queue() -> None:
    async with staged(max_batch_size=4, max_queued_turns=1) as stage:
        asked = await stage.ask(*(long_turn(10 + i) for i in range(6)))
        assert begun(asked) == [True] * 4 + [False] * 2
        assert [one.answer.refused is None for one in asked] == [True] * 5 + [False]


async def test_a_queue_that_is_full_of_a_sessions_turns_keeps_nobody_from_a_free_place() -> None:
    async with staged(max_batch_size=2, max_queued_turns=1) as stage:
        asked = await stage.ask(long_turn(10, "s"), long_turn(11, "s"), long_turn(12), long_turn(13))
        assert begun(asked) == [True, False, True, False]
        assert asked[3].answer.refused is not None


async def test_a_place_that_a_caller_left_is_taken_before_anybody_is_refused() -> None:
    async with staged(max_batch_size=1, max_queued_turns=1) as stage:
        running, waiting = await stage.ask(long_turn(10), long_turn(11))
        running.task.cancel()
        await asyncio.sleep(0)  # the cancellation and the next turn reach the owner at once
        [third] = await stage.ask(long_turn(12))
        assert waiting.begun and not third.begun and third.answer.refused is None


async def test_after_the_overload_a_turn_begins_at_once() -> None:
    async with staged(max_batch_size=2, max_queued_turns=4) as stage:
        asked = await stage.ask(*(long_turn(10 + i) for i in range(18)))
        assert sum(one.answer.refused is not None for one in asked) == 12
        await stage.end(*range(10, 28))
        await stage.settle()
        assert all(one.task.done() for one in asked)
        assert all(one.answer.ended is not None for one in asked[:6])
        steps = len(stage.decoder.steps)
        [late] = await stage.ask(long_turn(40))
        made = len(stage.decoder.steps) - steps
        assert late.begun and made >= len(late.answer.tokens) >= made - 1  # it was in the first step, as in all
        stats = await stage.settle()
        assert (stats["running"], stats["waiting_turns"], stats["tokens_due"]) == (1, 0, 1)


async def test_a_waiting_turn_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    async with staged(max_batch_size=1) as stage:
        asked = await stage.ask(long_turn(10), long_turn(11, "s"), long_turn(12), long_turn(13))
        await stage.leave(asked[1], asked[2])
        assert (await stage.settle())["waiting_turns"] == 1
        await stage.end(10)
        assert asked[3].begun and not asked[1].begun and not asked[2].begun
        assert await stage.during(stage.actor.dormant_sessions()) == [], "nothing is left of a turn that never began"


async def test_lower_priority_numbers_begin_first_and_equal_ones_in_order_of_arrival() -> None:
    async with staged(max_batch_size=1, max_queued_turns=9) as stage:
        await stage.ask(long_turn(10))
        priorities = {11: 0, 12: 2, 13: -1, 14: 0, 15: 2, 16: -1}
        asked = await stage.ask(*(long_turn(first, priority=p) for first, p in priorities.items()))
        waiting = dict(zip(priorities, asked, strict=True))
        assert await order_of(stage, [10], waiting) == [13, 16, 11, 14, 12, 15]


async def test_a_turn_that_another_replica_had_accepted_goes_first_and_is_never_refused() -> None:
    async with staged(max_batch_size=1, max_queued_turns=2) as stage:
        [_, *new] = await stage.ask(long_turn(10), long_turn(11, priority=-5), long_turn(12))
        resumed = await stage.ask(*(long_turn(first).resumed([77, 78]) for first in (13, 14)))
        assert all(one.answer.refused is None for one in (*new, *resumed))
        waiting = dict(zip((11, 12, 13, 14), (*new, *resumed), strict=True))
        assert await order_of(stage, [10], waiting) == [13, 14, 11, 12]


async def test_within_a_session_what_another_replica_had_accepted_comes_before_what_waits() -> None:
    async with staged(max_batch_size=4) as stage:
        [_, new, resumed] = await stage.ask(
            long_turn(10, "s"), long_turn(11, "s"), long_turn(12, "s").resumed([77, 78])
        )
        assert await order_of(stage, [10], {11: new, 12: resumed}) == [12, 11]


async def test_within_a_session_no_priority_changes_the_order() -> None:
    async with staged(max_batch_size=1) as stage:
        [_, *waiting] = await stage.ask(long_turn(10), long_turn(11, "s"), long_turn(12, "s", priority=-1))
        assert await order_of(stage, [10], dict(zip((11, 12), waiting, strict=True))) == [11, 12]


async def test_turns_of_a_session_keep_their_places_while_they_wait_for_earlier_ones() -> None:
    async with staged(max_batch_size=2, max_queued_turns=9) as stage:
        # 11 waits for 10 of its session; 13 and 14 have come after it.
        asked = await stage.ask(
            long_turn(10, "s"), long_turn(11, "s"), long_turn(12), long_turn(13), long_turn(14), long_turn(15, "s")
        )
        assert begun(asked) == [True, False, True, False, False, False]
        await stage.end(12)
        assert begun(asked) == [True, False, True, True, False, False], "its session runs: it is passed over"
        await stage.end(10)
        assert begun(asked) == [True, True, True, True, False, False], "and comes before what arrived later"
        await stage.end(13)
        assert begun(asked) == [True, True, True, True, True, False]
        await stage.end(11)
        assert begun(asked) == [True] * 6


async def test_a_session_of_which_a_turn_waits_is_in_use() -> None:
    async with staged(max_batch_size=1, max_turns_per_session=2) as stage:
        await stage.ask(long_turn(10, "s"))
        await stage.end(10)
        assert len(await stage.during(stage.actor.dormant_sessions())) == 1
        await stage.ask(long_turn(11))
        first, second, third = await stage.ask(*(long_turn(12 + i, "s") for i in range(3)))
        assert not first.begun and not second.begun and second.answer.refused is None
        assert third.answer.refused is not None and third.answer.refused.code is RefusalCode.SESSION_BUSY
        assert third.answer.refused.retry_after >= 1.0
        assert await stage.during(stage.actor.dormant_sessions()) == []
        assert await stage.during(stage.actor.take_along("public", "s", 2**30)) is None
        assert await stage.during(stage.actor.fork_session("public", "s", "t")) is ForkOutcome.RUNNING


async def test_a_conversation_of_which_a_turn_waits_loses_its_memory_last_and_is_then_computed_again() -> None:
    async with staged(blocks=24, max_batch_size=1, max_model_len=90) as stage:
        for first, name in ((10, "a"), (11, "b")):
            await stage.ask(turn(list(range(first, first + 20)), 60, name))
            await stage.end(first)
        stage.decoder.over.clear()
        # The turn of a waits while b is used: a is the older one, and has something to lose.
        _, waiting, _, large = await stage.ask(
            long_turn(30),
            turn([*range(10, 30), 40], 4, "a"),
            replace(turn([11, 12], 1, "b"), priority=-1),
            replace(turn([20, *range(300, 350)], 38), priority=-1),
        )
        assert {info.session_id for info in await stage.during(stage.actor.sessions())} == {"a", "b"}
        await stage.end(30)
        seen = []
        while not large.task.done():
            seen.append(sorted(info.session_id for info in await stage.during(stage.actor.sessions())))
        assert seen[-1] == [] and ["a"] in seen and ["b"] not in seen
        await stage.during(waiting.task)
        assert waiting.answer.tokens == solo([*range(10, 30), 40], 4, vocab=1000)


async def test_however_many_are_remembered_none_is_forgotten_of_which_a_turn_waits() -> None:
    async with staged(max_batch_size=1, max_sessions=1, max_queued_turns=20) as stage:
        names = [f"s{i}" for i in range(8)]  # four are remembered
        await stage.ask(long_turn(10), *(long_turn(11 + i, name) for i, name in enumerate(names)))
        for name in names:
            assert await stage.during(stage.actor.close_session("public", name))


async def test_deleting_a_session_ends_what_runs_and_what_waits_begins_anew_in_its_place() -> None:
    async with staged(max_batch_size=1) as stage:
        asked = await stage.ask(long_turn(10, "s"), long_turn(11, "s"), long_turn(12), long_turn(13, "s"))
        assert await stage.during(stage.actor.close_session("public", "s"))
        await stage.settle()
        ended = asked[0].answer.ended
        assert ended is not None and ended.reason is EndReason.FAILED and "deleted" in ended.message
        assert begun(asked) == [True, True, False, False]
        waiting = {12: asked[2], 13: asked[3]}
        assert await order_of(stage, [11], waiting) == [12, 13]


async def test_deleting_a_session_that_only_waits_changes_nothing_for_its_turns() -> None:
    async with staged(max_batch_size=1) as stage:
        asked = await stage.ask(long_turn(10), long_turn(11, "s"), long_turn(12, "s"))
        assert await stage.during(stage.actor.close_session("public", "s"))
        assert not await stage.during(stage.actor.close_session("public", "t"))
        assert await order_of(stage, [10], {11: asked[1], 12: asked[2]}) == [11, 12]


async def test_a_turn_with_several_choices_takes_as_many_places_from_its_beginning_on() -> None:
    async with staged(max_batch_size=4) as stage:
        asked = await stage.ask(long_turn(10, choices=3), long_turn(11), long_turn(12))
        assert begun(asked) == [True, True, False]
        await stage.end(11)
        assert begun(asked) == [True, True, True]


async def test_what_does_not_fit_is_not_overtaken() -> None:
    async with staged(max_batch_size=4, max_queued_turns=9) as stage:
        asked = await stage.ask(long_turn(10), long_turn(11), long_turn(12, choices=3), long_turn(13))
        assert begun(asked) == [True, True, False, False]
        stats = await stage.settle()
        assert (stats["waiting_turns"], stats["waiting_sequences"]) == (2, 4)
        await stage.end(10)
        assert begun(asked) == [True, True, True, False]


async def test_a_turn_larger_than_the_limit_runs_alone() -> None:
    async with staged(max_batch_size=4, max_running_sequences=2, max_queued_turns=9) as stage:
        asked = await stage.ask(long_turn(10), long_turn(11, choices=5), long_turn(12))
        assert begun(asked) == [True, False, False]
        await stage.end(10)
        assert begun(asked) == [True, True, False]
        await stage.end(11)
        assert begun(asked) == [True, True, True]


async def test_more_may_run_than_a_step_has_rows() -> None:
    async with staged(max_batch_size=2, max_running_sequences=5) as stage:
        asked = await stage.ask(*(long_turn(10 + i) for i in range(6)))
        assert begun(asked) == [True] * 5 + [False]


async def test_a_turn_that_the_engine_refuses_leaves_its_place_to_the_next() -> None:
    async with staged(max_batch_size=1, max_model_len=60) as stage:
        bad = replace(turn([11, 7, 9], 0, "s"), min_generated_tokens=58)
        asked = await stage.ask(turn([10, 7], 40), bad, turn([12, 7], 40, "s"))
        assert begun(asked) == [True, False, False]
        await stage.end(10)
        refused = asked[1].answer.refused
        assert refused is not None and refused.code is RefusalCode.INVALID
        assert asked[2].begun


async def test_waiting_turns_are_in_the_load_and_in_the_tokens_that_are_due() -> None:
    async with staged(max_batch_size=1) as stage:
        await stage.ask(long_turn(10, "s"))
        await stage.end(10)
        await stage.ask(long_turn(11))
        before = await stage.settle()
        [dormant] = await stage.during(stage.actor.dormant_sessions())
        await stage.ask(turn(list(range(20, 120)), LONG), turn([*dormant.tokens, 55, 56, 57], LONG, "s"))
        stats = await stage.settle()
        assert stats["tokens_due"] - before["tokens_due"] == 100 + 3
        await stage.during(asyncio.sleep(0.15))
        await stage.settle()
        assert stage.actor.routing_stats()["load"] == 3


async def test_draining_waits_for_those_that_wait() -> None:
    async with staged(max_batch_size=1) as stage:
        asked = await stage.ask(long_turn(10), long_turn(11))
        draining = asyncio.create_task(stage.actor.drain())
        await stage.end(10)
        assert asked[1].begun and not draining.done()
        await stage.end(11)
        await stage.during(draining)


@pytest.mark.parametrize("how", ["stop", "step", "begin"])
async def test_whatever_ends_the_engine_those_that_wait_can_go_elsewhere(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(max_batch_size=1) as stage:
        asked = await stage.ask(long_turn(10), long_turn(11, "s"), long_turn(12, "s"), long_turn(13))
        if how == "stop":
            stage.decoder.make_step(1000)
            await stage.actor.stop()
        elif how == "step":
            stage.decoder.fail_next = lambda: RuntimeError("the device is gone")
            stage.decoder.make_step(2)
        else:

            def fail(*_: Any) -> None:
                raise RuntimeError("the device is gone")

            monkeypatch.setattr(owner_of(stage.actor).sessions, "begin", fail)
            stage.decoder.over.add(10)
            stage.decoder.make_step(3)
        await asyncio.wait_for(asyncio.gather(*(one.task for one in asked)), 20)
        for one in asked[1:]:
            refused = one.answer.refused
            assert refused is not None and refused.code is RefusalCode.UNAVAILABLE
        if how != "stop":
            return
        assert asked[0].answer.ended is not None and asked[0].answer.ended.resumable
