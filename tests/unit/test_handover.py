"""When a replica hands its conversations over, to whom, and what of it may fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_actor.memory.kv_blocks import KvBlocks
from engine_actor.messages import MovedSession, session_key
from serve_app.cluster import handover as module
from serve_app.cluster.handover import Handover
from serve_app.cluster.routing.known_replicas import KnownReplicas

BYTES = 100  # of each session's cache


def session(name: str, length: int = 3) -> MovedSession:
    return MovedSession("o", name, tuple(range(length)), (), 1.0, cached_tokens=length)


class Answer:
    def __init__(self, value: Any) -> None:
        self._value = value
        self.cancelled = False

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        if self._value is None:
            await asyncio.Event().wait()
        return self._value

    def cancel(self) -> None:
        """As Serve has it: of a call that was never taken it raises what the call did."""
        self.cancelled = True
        if isinstance(self._value, Exception):
            raise self._value


class LeavingReplica:
    """A replica `r` with dormant sessions, and the others, which adopt as `outcomes` says."""

    def __init__(self, *sessions: MovedSession) -> None:
        self.dormant = list(sessions)
        self.known = KnownReplicas()
        self.outcomes: dict[str, list[Any]] = {}
        self.adopted: list[tuple[str, str, int]] = []
        self.sign: Any = ("r", True)
        self.with_cache: list[bool] = []
        self.answers: list[Answer] = []
        self._method = self._key = ""
        self.handover = Handover("r", self, self, self.known)  # type: ignore[arg-type]

    async def dormant_sessions(self) -> list[MovedSession]:
        return list(self.dormant)

    async def take_along(self, cache_scope: str, session_id: str, most_bytes: int) -> MovedSession | None:
        found = next(
            (moved for moved in self.dormant if (moved.cache_scope, moved.session_id) == (cache_scope, session_id)),
            None,
        )
        if found is None or most_bytes < BYTES:
            return found
        return replace(found, kv=KvBlocks("", found.cached_tokens, np.zeros(BYTES, np.uint8)))

    def deleted_sessions(self, within: float) -> list[str]:
        return []

    def options(self, method_name: str = "", session_id: str = "") -> LeavingReplica:
        view = object.__new__(LeavingReplica)
        view.__dict__ = {**self.__dict__, "_method": method_name or self._method, "_key": session_id}
        return view

    def remote(self, *args: Any, **kwargs: Any) -> Answer:
        if self._method in ("deleted_sessions", "forget_moved"):
            return Answer([])
        if self._method == "sign_of_life":
            assert kwargs == {"only": "r"}
            return Answer(self.sign)
        assert kwargs == {"avoid": ("r",)}
        self.adopted.append((args[0].session_id, self._key, len(args[0].tokens)))
        self.with_cache.append(args[0].kv is not None)
        outcomes = self.outcomes.get(args[0].session_id, [])
        self.answers.append(Answer(outcomes.pop(0) if outcomes else True))
        return self.answers[-1]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(module, "_CALL_SECONDS", 0.05)
    monkeypatch.setattr(module, "_LAST_SECONDS", 0.2)


async def test_nothing_moves_while_the_replica_is_in_the_set_or_not_yet_in_it() -> None:
    room = LeavingReplica(session("a"))
    running = asyncio.create_task(room.handover.run())
    await settle()
    room.known.set_running(["s"])
    await settle()
    room.known.set_running(["r", "s"])
    await settle()
    assert room.adopted == []
    running.cancel()


async def test_once_it_is_taken_out_everything_goes_once_and_again_where_it_has_grown() -> None:
    room = LeavingReplica(session("a"), session("b"))
    running = asyncio.create_task(room.handover.run())
    await settle()
    room.known.set_running(["r", "s"])
    await settle()
    room.known.set_running(["s"])
    await settle()
    assert room.adopted == [("a", session_key("o", "a"), 3), ("b", session_key("o", "b"), 3)]
    room.dormant = [session("a", 5), session("c")]  # a turn of a has ended, and c's first one
    await settle()
    running.cancel()
    await room.handover.hand_over_rest()
    assert [(name, length) for name, _, length in room.adopted[2:]] == [("a", 5), ("c", 3)]


async def test_a_replica_that_is_lost_while_it_answers_the_first_question_changes_nothing() -> None:
    room = LeavingReplica(session("a"))
    room.handover._signs.sign = ConnectionError("x")
    running = asyncio.create_task(room.handover.run())
    await settle()
    room.known.set_running(["r", "s"])
    await settle()
    room.known.set_running(["s"])
    await settle()
    running.cancel()
    assert [name for name, _, _ in room.adopted] == ["a"]


async def test_the_rest_goes_at_the_end_though_nobody_said_before_that_it_comes() -> None:
    room = LeavingReplica(session("a"))
    room.known.set_running(["r", "s"])
    await room.handover.hand_over_rest()
    assert [name for name, _, _ in room.adopted] == ["a"]


async def test_where_no_other_replica_is_nothing_is_tried() -> None:
    room = LeavingReplica(session("a"))
    room.known.set_running(["r"])
    await room.handover.hand_over_rest()
    assert room.adopted == []


async def test_what_fails_is_tried_again_and_holds_nobody_up() -> None:
    room = LeavingReplica(session("dead"), session("deaf"), session("fine"))
    room.outcomes |= {"dead": [ConnectionError("x")], "deaf": [None, False]}
    room.known.set_running(["s"])
    await room.handover.hand_over_rest()
    assert sorted(name for name, _, _ in room.adopted) == ["dead", "deaf", "fine"]
    assert [answer.cancelled for answer in room.answers] == [True, True, False]
    await room.handover.hand_over_rest()
    assert sorted(name for name, _, _ in room.adopted[3:]) == ["dead", "deaf"]
    # What made them fail may have been the size of their caches.
    assert room.with_cache == [True, True, True, False, False]


async def test_only_some_caches_are_on_their_way_at_a_time_and_they_keep_nothing_small_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CALL_SECONDS", 60.0)
    large = [session(f"large{i}") for i in range(10)]
    small = [replace(session(f"small{i}"), cached_tokens=0) for i in range(10)]
    room = LeavingReplica(*large, *small)
    room.outcomes |= {moved.session_id: [None, True] for moved in large}
    room.known.set_running(["s"])
    handing = asyncio.create_task(room.handover._hand_over())
    await settle()
    names = [name for name, _, _ in room.adopted]
    assert sum(name.startswith("large") for name in names) == module._CACHES_AT_A_TIME
    assert sum(name.startswith("small") for name in names) == 10
    handing.cancel()


async def test_what_is_left_when_time_runs_out_goes_without_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CALL_SECONDS", 60.0)
    monkeypatch.setattr(module, "_LAST_SECONDS", 0.5)
    room = LeavingReplica(*[session(str(i)) for i in range(10)])
    room.outcomes |= {moved.session_id: [None, True] for moved in room.dormant[:4]}
    room.known.set_running(["s"])
    await room.handover.hand_over_rest()
    assert [name for name, _, _ in room.adopted[4:]] == [str(i) for i in range(10)]
    assert room.with_cache == [True] * 4 + [False] * 10


async def test_a_session_that_is_dormant_no_more_stays() -> None:
    room = LeavingReplica(session("a"), session("b"))
    taken = room.take_along

    async def take_along(cache_scope: str, session_id: str, most_bytes: int) -> MovedSession | None:
        return None if session_id == "a" else await taken(cache_scope, session_id, most_bytes)

    room.take_along = take_along  # type: ignore[method-assign]
    room.known.set_running(["s"])
    await room.handover.hand_over_rest()
    assert [name for name, _, _ in room.adopted] == ["b"]
