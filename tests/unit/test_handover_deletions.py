"""A session that is deleted while its replica hands it over does not come back, whoever heard of it, and when.

Real engines: `r` is stopped, `h` is where its sessions go, `s` is another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import chain, combinations
from typing import Any

import pytest

from engine_actor.actor.actor import EngineActor
from engine_actor.messages import EndReason, MovedSession, session_key
from engine_actor.sessions import deletions
from engine_actor.sessions.deletions import RecentDeletions
from serve_app.cluster import handover as module
from serve_app.cluster.handover import Handover
from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.cluster.routing.sticky_router import AVOID, ONLY
from tests.support.actor_view import remembered
from tests.support.doubles import SyntheticDecoder, solo
from tests.unit.actor.helpers import ask, start_actor, turn

KEY = session_key("public", "deleted")
MOMENTS = ("before", "asked", "exported", "imported")
REPLICAS = ("r", "h", "s")
REACHED = tuple(chain.from_iterable(combinations(REPLICAS, count) for count in (1, 2, 3)))


class ReplicasBehindHandle:
    """The replicas behind the handle that `r` has; `hooks` are called once, at their moment."""

    def __init__(self, actors: dict[str, EngineActor]) -> None:
        self.actors = actors
        self.known = KnownReplicas()
        self.known.set_running(["h", "s"])
        self.hooks: dict[str, Callable[[], Awaitable[None]]] = {}
        self.deaf: set[str] = set()
        self.held: asyncio.Event | None = None
        self.calls: list[asyncio.Task[Any]] = []
        self.sent: list[str | None] = []
        self.exported = False
        self._method = ""
        self._take_along = actors["r"].take_along
        actors["r"].take_along = self.take_along  # type: ignore[method-assign]
        self.handover = Handover("r", actors["r"], self, self.known)

    def options(self, method_name: str = "", **_: Any) -> ReplicasBehindHandle:
        view = object.__new__(ReplicasBehindHandle)
        view.__dict__ = {**self.__dict__, "_method": method_name or self._method}
        view.__dict__["root"] = self.__dict__.get("root", self)
        return view

    def remote(self, argument: Any, **kwargs: Any) -> Any:
        root: ReplicasBehindHandle = self.__dict__["root"]
        call = asyncio.create_task(root.answer(self._method, argument, kwargs))
        root.calls.append(call)
        return asyncio.shield(call)  # a call that is cancelled may be on its way all the same

    async def answer(self, method: str, argument: Any, kwargs: dict[str, Any]) -> Any:
        if method == "adopt":
            assert kwargs == {AVOID: ("r",)}
            self.sent.append(argument.session_id)
            await self.at("exported", argument)
            if self.held is not None and argument.session_id == "deleted":
                await self.held.wait()
            adopted = await self.actors["h"].adopt(argument)
            await self.at("imported", argument)
            return adopted
        replica = kwargs[ONLY]
        if replica in self.deaf:
            await asyncio.Event().wait()
        answer = getattr(self.actors[replica], method)(argument)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def take_along(self, cache_scope: str, session_id: str, most_bytes: int) -> MovedSession | None:
        if session_id == "deleted":
            await self.at("asked")
        moved = await self._take_along(cache_scope, session_id, most_bytes)
        self.exported |= moved is not None and session_id == "deleted"
        return moved

    async def at(self, moment: str, moved: MovedSession | None = None) -> None:
        if (moved is None or moved.session_id == "deleted") and (hook := self.hooks.pop(moment, None)) is not None:
            await hook()

    async def delete(self, *reached: str) -> None:
        """As ingress processes do that have these replicas in their sets."""
        for replica in reached:
            await self.actors[replica].close_session("public", "deleted")

    async def resident(self) -> dict[str, set[str | None]]:
        return {name: {s.session_id for s in await self.actors[name].dormant_sessions()} for name in "hs"}

    async def end(self) -> None:
        """Calls that are on their way arrive."""
        if self.held is not None:
            self.held.set()
        self.deaf.clear()
        _, late = await asyncio.wait(self.calls, timeout=0.2)
        for call in late:
            call.cancel()


@pytest.fixture
async def room(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReplicasBehindHandle]:
    monkeypatch.setattr(module, "_ASK_SECONDS", 0.1)
    actors = {name: await start_actor(SyntheticDecoder(vocab=1000, eos=5000), 400) for name in REPLICAS}
    for name in ("deleted", "kept"):
        await ask(actors["r"], turn([5, 9, 13], 6, name))
    room = ReplicasBehindHandle(actors)
    yield room
    await room.end()
    for actor in actors.values():
        await actor.check_integrity()
        await actor.stop()


@pytest.mark.parametrize("reached", REACHED, ids="".join)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("last", [False, True], ids=["in a pass", "in the last pass"])
async def test_it_is_gone_whenever_it_was_deleted_and_whoever_heard_of_it(
    room: ReplicasBehindHandle, moment: str, reached: tuple[str, ...], last: bool
) -> None:
    room.hooks[moment] = lambda: room.delete(*reached)
    await room.at("before")
    if not last:
        await room.handover._hand_over()
    await room.handover.hand_over_rest()
    assert await room.resident() == {"h": {"kept"}, "s": set()}
    assert not room.hooks and ("deleted" in room.sent) is (moment != "before" and room.exported)


async def test_it_is_gone_if_it_was_deleted_when_it_had_moved(room: ReplicasBehindHandle) -> None:
    for number, reached in enumerate(REACHED):
        await ask(room.actors["r"], turn([5, 9, 13], 6, f"later{number}"))
        await room.handover._hand_over()
        assert f"later{number}" in (await room.resident())["h"]
        for replica in reached:
            await room.actors[replica].close_session("public", f"later{number}")
    await room.handover.hand_over_rest()
    assert await room.resident() == {"h": {"deleted", "kept"}, "s": set()}


@pytest.mark.parametrize("reached", [("h",), ("s",), ("h", "s")], ids="".join)
async def test_a_turn_that_runs_there_ends_well_and_its_session_stays_behind(
    room: ReplicasBehindHandle, reached: tuple[str, ...]
) -> None:
    running = room.actors["r"].stream_turn(turn([5, 9, 13], 500, "deleted"))
    await anext(running)
    await room.handover._hand_over()
    await room.delete(*reached)
    *_, last = [delta async for delta in running]
    assert getattr(last, "reason", None) is EndReason.LENGTH
    await room.handover.hand_over_rest()
    assert await room.resident() == {"h": {"kept"}, "s": set()}


async def test_what_arrives_after_it_was_taken_back_is_refused(
    room: ReplicasBehindHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CALL_SECONDS", 0.05)
    room.held = asyncio.Event()
    await room.handover._hand_over()
    await room.delete("s")
    await room.handover.hand_over_rest()
    assert await room.resident() == {"h": {"kept"}, "s": set()}
    await room.end()
    assert await room.resident() == {"h": {"kept"}, "s": set()}


@pytest.mark.parametrize("running", [True, False])
async def test_what_has_been_used_since_it_moved_is_not_taken_back(room: ReplicasBehindHandle, running: bool) -> None:
    """It was deleted and begun anew: no turn is ended for what was before."""
    await room.handover._hand_over()
    next_turn = room.actors["h"].stream_turn(turn([7, 8], 300, "deleted"))
    await anext(next_turn)
    if not running:
        _ = [delta async for delta in next_turn]
    await room.delete("s")
    await room.handover.hand_over_rest()
    deltas = [delta async for delta in next_turn]
    assert not running or getattr(deltas[-1], "reason", None) is EndReason.LENGTH
    assert await room.resident() == {"h": {"deleted", "kept"}, "s": set()}
    assert (await ask(room.actors["h"], turn([7, 8], 4, "deleted"))).tokens == solo([7, 8], 4, vocab=1000)


async def test_the_old_one_does_not_take_the_place_of_one_that_was_begun_anew(room: ReplicasBehindHandle) -> None:
    await room.delete("h", "s")
    await ask(room.actors["h"], turn([7, 8], 4, "deleted"))
    await room.handover.hand_over_rest()
    [anew] = [s for s in await room.actors["h"].dormant_sessions() if s.session_id == "deleted"]
    assert anew.tokens[:2] == (7, 8)


async def test_a_replica_that_does_not_answer_holds_nothing_up_and_is_asked_for_all_of_it_later(
    room: ReplicasBehindHandle,
) -> None:
    await room.handover._hand_over()
    await ask(room.actors["r"], turn([5, 9, 13], 9, "deleted"))
    room.deaf = {"s"}
    await room.delete("s")
    await asyncio.sleep(0.2)  # longer than questions overlap
    await room.handover._hand_over()
    assert await room.resident() == {"h": {"deleted", "kept"}, "s": set()}, "only s knows, and says nothing"
    room.deaf = set()
    await room.handover.hand_over_rest()
    assert await room.resident() == {"h": {"kept"}, "s": set()}


async def test_the_next_home_may_be_stopped_itself(room: ReplicasBehindHandle) -> None:
    """What `h` was given and hands on is gone as well."""
    await room.handover._hand_over()
    await room.delete("r")
    await room.handover.hand_over_rest()
    assert room.actors["h"].deleted_sessions(60.0) == [KEY] == room.actors["s"].deleted_sessions(60.0)


def test_deletions_are_remembered_for_a_while_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    recent = RecentDeletions(lambda: now[0])
    assert "a" not in recent and recent.within(1e9) == []
    for key, at in (("a", 0.0), ("b", 100.0), ("a", 200.0), ("c", 300.0)):
        now[0] = at
        recent.note(key)
    assert recent.within(1e9) == ["c", "a", "b"]
    assert recent.within(150.0) == ["c", "a"]
    now[0] = 100.0 + deletions.KEPT_SECONDS + 1
    assert "b" not in recent and "a" in recent and recent.within(1e9) == ["c", "a"]
    recent.note("d")
    assert remembered(recent) == ["a", "c", "d"]
    monkeypatch.setattr(deletions, "MOST_KEPT", 2)
    recent.note("e")
    assert remembered(recent) == ["d", "e"]
