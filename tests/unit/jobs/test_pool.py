"""A pool of engines, some of which are lost: the others do the work, and what can be is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from engine_actor.actor_options import ActorOptions
from engine_actor.messages import EndReason, RefusalCode, TurnAccepted, TurnDelta, TurnEnded, TurnRefused, TurnRequest
from serve_app.jobs import pool as module
from serve_app.jobs.pool import BatchEngine, PoolClient
from tests.support.batch_engines import GOOD, REQUEST, STOPPED, UNAVAILABLE, ScriptedEngine


async def told(pool: PoolClient, request: TurnRequest = REQUEST) -> list[TurnDelta]:
    return [delta async for delta in pool.stream_turn(request, routing_key=None)]


def pool_of(*engines: Any) -> PoolClient:
    return PoolClient(engines, 100)


async def settled(pool: PoolClient) -> None:
    while pool._replacing:
        await asyncio.wait(pool._replacing)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the log says. Nothing is waited for, and Ray is not asked."""
    lines: list[str] = []
    monkeypatch.setattr(module, "say", lines.append)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)

    def kill(actor: Any, *, no_restart: bool = True) -> None:
        actor.kills.append(not no_restart)

    monkeypatch.setattr(ray, "kill", kill)
    return lines


DIED = RayActorError()


@pytest.mark.parametrize("lost", [DIED, STOPPED, UNAVAILABLE], ids=["died", "stopped", "unavailable"])
async def test_an_engine_that_is_lost_is_replaced_and_its_lines_are_done(lost: Any, said: list[str]) -> None:
    mortal, other = ScriptedEngine(lost, GOOD), ScriptedEngine(GOOD)
    pool = pool_of(mortal, other)
    assert await asyncio.gather(*(told(pool) for _ in range(20))) == [GOOD] * 20
    await settled(pool)
    assert mortal.started == 1
    assert mortal.kills == ([] if lost is DIED else [True]), "a process that has ended needs no end"
    assert [line.partition(":")[0] for line in said] == [
        "engine 1 is lost, and is started again (1 of 3)",
        "engine 1 is ready again",
    ]
    assert lost is DIED or said[0].endswith("the engine stopped")
    asked = mortal.asked
    await asyncio.gather(*(told(pool) for _ in range(4)))
    assert mortal.asked == asked + 2, "it takes its part again"


async def test_many_turns_that_lose_one_engine_lose_it_once(said: list[str]) -> None:
    mortal = ScriptedEngine(*[DIED] * 10, GOOD)
    pool = pool_of(mortal)
    assert await asyncio.gather(*(told(pool) for _ in range(10))) == [GOOD] * 10
    assert mortal.started == 1 and len(said) == 2


async def test_turns_wait_for_a_lone_engine_that_is_started_again(said: list[str]) -> None:
    engine = ScriptedEngine(DIED, GOOD, starts=[DIED, DIED, None])
    assert await told(pool_of(engine)) == GOOD
    assert engine.started == 3, "Ray may not have noticed yet that the process is gone"


@pytest.mark.parametrize("starts", [[RayTaskError("start", "", ValueError("no memory"))], [DIED]])
async def test_an_engine_that_does_not_start_again_is_lost_for_good(starts: list[Any], said: list[str]) -> None:
    broken, other = ScriptedEngine(STOPPED, starts=starts), ScriptedEngine(GOOD)
    pool = pool_of(broken, other)
    assert await asyncio.gather(*(told(pool) for _ in range(6))) == [GOOD] * 6
    await settled(pool)
    assert broken.kills == [True, False]
    assert broken.started == (5 if starts == [DIED] else 1)
    assert said[-1].startswith("engine 1 is lost for good, and 1 are left: ")
    assert starts == [DIED] or said[-1].endswith("no memory")
    asked = broken.asked
    assert await asyncio.gather(*(told(pool) for _ in range(6))) == [GOOD] * 6
    assert broken.asked == asked


async def test_an_engine_that_fails_again_and_again_is_lost_for_good_and_one_that_answers_between_is_not(
    said: list[str],
) -> None:
    failing, other = ScriptedEngine(STOPPED), ScriptedEngine(GOOD)
    pool = pool_of(failing, other)
    for _ in range(10):
        assert list(await asyncio.gather(told(pool), told(pool))) == [GOOD, GOOD]
        await settled(pool)
    assert failing.started == 3 and failing.asked == 4
    assert said[-1].startswith("engine 1 is lost for good")
    said.clear()
    flaky = ScriptedEngine(*[STOPPED, GOOD] * 10)
    pool = pool_of(flaky)
    for _ in range(10):
        assert await told(pool) == GOOD
    assert flaky.started == 10 and all("(1 of 3)" in line for line in said if "is lost" in line)


async def test_a_turn_that_costs_three_engines_has_failed_and_the_others_go_on(said: list[str]) -> None:
    engines = [ScriptedEngine(STOPPED) for _ in range(4)]
    pool = pool_of(*engines)
    accepted, *ends = await told(pool, replace(REQUEST, choices=2))
    assert isinstance(accepted, TurnAccepted)
    assert [(end.reason, end.choice) for end in ends if isinstance(end, TurnEnded)] == [
        (EndReason.FAILED, 0),
        (EndReason.FAILED, 1),
    ]
    assert "3 engines were lost that had this request: the engine stopped" in getattr(ends[0], "message", "")
    assert sum(engine.asked for engine in engines) == 3


async def test_where_all_engines_are_lost_for_good_turns_are_refused_with_the_reason(said: list[str]) -> None:
    engines = ScriptedEngine(DIED), ScriptedEngine(STOPPED)
    pool = pool_of(*engines)
    outcomes = [await told(pool) for _ in range(10)]
    await settled(pool)
    outcomes += await asyncio.gather(*(told(pool) for _ in range(10)))
    for outcome in outcomes[-11:]:
        [refused] = outcome
        assert isinstance(refused, TurnRefused) and refused.code is RefusalCode.UNAVAILABLE and refused.retry_after
        assert refused.message == "the engines of this job are lost: the engine stopped"
    assert [engine.asked for engine in engines] == [4, 4]
    assert [engine.kills[-1] for engine in engines] == [False, False]


async def test_turns_are_spread() -> None:
    engines = ScriptedEngine(GOOD), ScriptedEngine(GOOD)
    pool = pool_of(*engines)
    await asyncio.gather(*(told(pool) for _ in range(10)))
    assert [engine.asked for engine in engines] == [5, 5]


class Actor:
    """In the place of an EngineActor: sends `deltas`, and hangs for ever if they have no end."""

    def __init__(self, *deltas: TurnDelta, failure: str | None = None) -> None:
        self._deltas = deltas
        self._failure = failure
        self.open = 0

    def failure(self) -> str | None:
        return self._failure

    async def stream_turn(self, request: TurnRequest) -> AsyncGenerator[TurnDelta, None]:
        self.open += 1
        try:
            for delta in self._deltas:
                yield delta
            if not self._deltas or not isinstance(self._deltas[-1], TurnEnded | TurnRefused):
                await asyncio.Event().wait()
        finally:
            self.open -= 1


def engine_over(actor: Actor) -> BatchEngine:
    engine = BatchEngine(ActorOptions("m"))
    engine._actor = actor  # type: ignore[assignment]
    engine._starting = asyncio.create_task(asyncio.sleep(0, 100))
    return engine


async def test_a_turn_of_an_engine_that_hangs_ends_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    actor = Actor(GOOD[0], failure="no step for 20 s")
    assert await engine_over(actor).run_turn(REQUEST) == [TurnRefused(RefusalCode.UNAVAILABLE, "no step for 20 s")]
    await asyncio.sleep(0)
    assert actor.open == 0
    assert await engine_over(Actor(*GOOD)).run_turn(REQUEST) == GOOD


async def test_a_turn_that_is_cancelled_leaves_the_engine_and_its_start_alone() -> None:
    actor = Actor(GOOD[0])
    engine = engine_over(actor)
    engine._starting = asyncio.create_task(asyncio.sleep(0.02, 100))
    early = asyncio.create_task(engine.run_turn(REQUEST))
    await asyncio.sleep(0)
    early.cancel()
    running = asyncio.create_task(engine.run_turn(REQUEST))
    while not actor.open:
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([early, running])
    await asyncio.sleep(0)
    assert early.cancelled() and running.cancelled() and actor.open == 0
