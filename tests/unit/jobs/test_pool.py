"""A pool of engines, some of which are lost: the others do the work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from engine_actor.options import SamplingParams
from engine_actor.turns import (
    EndReason,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
)
from serve_app.jobs import pool as module
from serve_app.jobs.pool import PoolClient

REQUEST = TurnRequest("r", "public", None, (1, 2), SamplingParams())
GOOD: list[TurnDelta] = [TurnAccepted("e", 2, 0), TurnTokens((7,)), TurnEnded(EndReason.STOP, 2, 0, 1)]
STOPPED: list[TurnDelta] = [
    TurnAccepted("e", 2, 0),
    TurnTokens((7,)),
    TurnEnded(EndReason.FAILED, 2, 0, 0, "the engine stopped", resumable=True),
]
UNAVAILABLE: list[TurnDelta] = [TurnRefused(RefusalCode.UNAVAILABLE, "the engine stopped")]


class Engine:
    """Says what it is told to; the last of it again and again."""

    def __init__(self, *outcomes: list[TurnDelta] | Exception) -> None:
        self._outcomes = list(outcomes)
        self.asked = 0
        self.run_turn = SimpleNamespace(remote=self._remote)

    async def _remote(self, request: TurnRequest) -> list[TurnDelta]:
        self.asked += 1
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def told(pool: PoolClient) -> list[TurnDelta]:
    return [delta async for delta in pool.stream_turn(REQUEST, routing_key=None)]


def pool_of(*engines: Any) -> PoolClient:
    return PoolClient(engines, 100)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seen: list[float] = []

    async def sleep(seconds: float) -> None:
        seen.append(seconds)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    return seen


@pytest.mark.parametrize("lost", [RayActorError(), STOPPED, UNAVAILABLE])
async def test_one_engine_that_is_lost_for_good_stops_no_turn(lost: Any, pauses: list[float]) -> None:
    dead, alive = Engine(lost), Engine(GOOD)
    pool = pool_of(dead, alive)
    assert await asyncio.gather(*(told(pool) for _ in range(20))) == [GOOD] * 20
    assert alive.asked == 20
    assert pauses == [], "the others are there"


async def test_a_lone_engine_has_time_to_come_back(pauses: list[float]) -> None:
    engine = Engine(RayActorError(), STOPPED, GOOD)
    assert await told(pool_of(engine)) == GOOD
    assert pauses == [1.0, 2.0]


async def test_where_all_engines_are_lost_the_turn_is_refused(pauses: list[float]) -> None:
    engines = Engine(RayActorError()), Engine(STOPPED)
    [refused] = await told(pool_of(*engines))
    assert isinstance(refused, TurnRefused) and refused.code is RefusalCode.UNAVAILABLE and refused.retry_after
    assert sum(engine.asked for engine in engines) == 5


async def test_turns_are_spread() -> None:
    engines = Engine(GOOD), Engine(GOOD)
    pool = pool_of(*engines)
    await asyncio.gather(*(told(pool) for _ in range(10)))
    assert [engine.asked for engine in engines] == [5, 5]
