"""The client in front of many engines, over a handle that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayActorError

from engine_actor.options import SamplingParams
from engine_actor.turns import (
    EndReason,
    ForkOutcome,
    SessionInfo,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRequest,
    TurnTokens,
)
from serve_app.handle_client import HandleEngineClient

ACCEPTED = TurnAccepted("r", 7, 3)


class Call:
    """A streaming call: its items, and then the death of its replica if it is to die."""

    def __init__(self, items: list[Any], dies: bool) -> None:
        self._items = iter(items)
        self._dies = dies

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        for item in self._items:
            return item
        if self._dies:
            raise RayActorError
        raise StopAsyncIteration

    def cancel(self) -> None:
        return None


class Broadcast:
    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    async def results_async(self, **_: Any) -> list[Any]:
        return self._answers


class Handle:
    def __init__(self, items: list[Any] | None = None, dies: bool = False, **answers: list[Any]) -> None:
        self._items, self._dies, self._answers = items or [], dies, answers
        self.asked: list[tuple[Any, ...]] = []

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any, **__: Any) -> Call:
        return Call(self._items, self._dies)

    def broadcast(self, method: str, *args: Any) -> Broadcast:
        self.asked.append((method, *args))
        return Broadcast(self._answers[method])


def client_of(handle: Handle) -> HandleEngineClient:
    return HandleEngineClient(handle, placement_timeout=5)  # type: ignore[arg-type]


async def deltas(handle: Handle, choices: int) -> list[TurnDelta]:
    request = TurnRequest("r", "public", None, (1, 2), SamplingParams(), choices=choices)
    return [delta async for delta in client_of(handle).stream_turn(request, routing_key=None)]


def ended(choice: int, generated: int, reason: EndReason = EndReason.STOP, message: str = "") -> TurnEnded:
    return TurnEnded(reason, 7, 3, generated, message, choice)


@pytest.mark.parametrize("dies", [False, True])
async def test_a_turn_is_complete_when_its_last_choice_is(dies: bool) -> None:
    said = [ACCEPTED, TurnTokens((1,), 0), ended(0, 1), TurnTokens((2,), 1), ended(1, 1)]
    assert await deltas(Handle(["replica", *said], dies), 2) == said


async def test_a_lost_replica_fails_the_choices_that_ran() -> None:
    said = [ACCEPTED, TurnTokens((1,), 0), TurnTokens((2, 3), 2), ended(0, 1), TurnTokens((4,), 2)]
    found = await deltas(Handle(["replica", *said], dies=True), 3)
    lost = "the replica was lost in the middle of the answer"
    assert found[: len(said)] == said
    assert found[len(said) :] == [ended(1, 0, EndReason.FAILED, lost), ended(2, 3, EndReason.FAILED, lost)]


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([ForkOutcome.UNKNOWN, ForkOutcome.FORKED], ForkOutcome.FORKED),
        ([ForkOutcome.UNKNOWN, ForkOutcome.RUNNING], ForkOutcome.RUNNING),
        ([ForkOutcome.FORKED, ForkOutcome.RUNNING], ForkOutcome.FORKED),
        ([ForkOutcome.UNKNOWN, ForkOutcome.EXISTS], ForkOutcome.EXISTS),
        ([ForkOutcome.UNKNOWN] * 2, ForkOutcome.UNKNOWN),
        ([], ForkOutcome.UNKNOWN),
    ],
)
async def test_a_fork_is_made_where_the_session_is(answers: list[ForkOutcome], outcome: ForkOutcome) -> None:
    handle = Handle(sessions=[[], []], fork_session=answers)
    assert await client_of(handle).fork_session("public", "a", "b") is outcome
    assert handle.asked == [("sessions", "public"), ("fork_session", "public", "a", "b")]


async def test_a_name_that_any_replica_knows_is_taken() -> None:
    handle = Handle(sessions=[[], [SessionInfo("b", "public", "r", 1, 1, 1, False, 0.0)]])
    assert await client_of(handle).fork_session("public", "a", "b") is ForkOutcome.EXISTS
    assert handle.asked == [("sessions", "public")]
