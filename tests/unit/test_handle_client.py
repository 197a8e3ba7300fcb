"""Control calls of the client in front of many engines. Its turns are in `failover`."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from engine_actor.messages import DeleteOutcome, ForkOutcome, SessionHolding, SessionInfo, session_key
from serve_app.cluster import client as handle_client
from serve_app.cluster import control_calls
from tests.support.failing_replicas import Replicas, client_of

SILENT = None
GONE = ActorDiedError()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_client, "_READY_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(control_calls, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(control_calls.ControlCalls.ask, "__kwdefaults__", {"seconds": 0.05})
    monkeypatch.setattr(control_calls.ControlCalls.ask_each, "__kwdefaults__", {"seconds": 0.05})


def replicas(running: str, leaving: str = "", **answers: Any) -> Replicas:
    made = Replicas(**answers)
    made.known.set_running(running, leaving)
    return made


def info(name: str, replica: str, tokens: int, *, running: bool = False, idle: float = 0.0) -> SessionInfo:
    return SessionInfo(name, "public", replica, tokens, tokens, 1, running, idle)


async def test_one_that_hangs_is_counted_and_hides_nothing_of_the_others() -> None:
    handle = replicas("abc", sessions=[[info("x", "a", 5)], SILENT, RuntimeError("its engine has failed")])
    found = await client_of(handle).sessions("public")
    assert ([i.session_id for i in found.sessions], found.unanswered) == (["x"], 2)


async def test_one_that_is_dead_or_was_replaced_by_another_hides_nothing() -> None:
    found = await client_of(replicas("abc", sessions=[[info("x", "a", 5)], GONE, []])).sessions("public")
    assert ([i.session_id for i in found.sessions], found.unanswered) == (["x"], 0)


@pytest.mark.parametrize(
    ("copies", "counts"),
    [
        ([info("x", "a", 5), info("x", "b", 9)], "b"),
        ([info("x", "a", 5, running=True), info("x", "b", 9)], "a"),
        ([info("x", "a", 5, idle=2.0), info("x", "b", 5, idle=1.0)], "b"),
        ([info("x", "a", 5), info("x", "c", 9)], "a"),
        ([info("x", "a", 5), info("x", "c", 9, running=True)], "c"),
    ],
)
async def test_a_session_is_listed_once_where_it_goes_on(copies: list[SessionInfo], counts: str) -> None:
    """Replica c is being stopped."""
    held = [[copy for copy in copies if copy.replica == replica] for replica in "abc"]
    found = await client_of(replicas("ab", "c", sessions=held)).sessions("public")
    assert [i.replica for i in found.sessions] == [counts]


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([True, False], DeleteOutcome.DELETED),
        ([True, SILENT], DeleteOutcome.DELETED),
        ([False, SILENT], DeleteOutcome.UNANSWERED),
        ([False, GONE], DeleteOutcome.UNKNOWN),
        ([False, True], DeleteOutcome.DELETED),
    ],
)
async def test_a_session_is_deleted_wherever_it_is(answers: list[Any], outcome: DeleteOutcome) -> None:
    """Also at a replica that is being stopped, which is the second one."""
    handle = replicas("a", "b", close_session=answers)
    assert await client_of(handle).delete_session("public", "x") is outcome
    assert sorted(handle.asked) == [("close_session", "a", "public", "x"), ("close_session", "b", "public", "x")]


NOTHING = (None, None)
IDLE, LONGER, BUSY = SessionHolding(5, False), SessionHolding(9, False), SessionHolding(5, True)


@pytest.mark.parametrize(
    ("holdings", "home", "outcome"),
    [
        ([NOTHING, (IDLE, None)], "b", ForkOutcome.FORKED),
        ([(IDLE, None), (LONGER, None)], "b", ForkOutcome.FORKED),
        ([(LONGER, None), (IDLE, None)], "a", ForkOutcome.FORKED),
        ([(IDLE, None), (BUSY, None)], None, ForkOutcome.RUNNING),
        ([(IDLE, None), (None, IDLE)], None, ForkOutcome.EXISTS),
        ([(IDLE, None), SILENT], None, ForkOutcome.UNANSWERED),
        ([(IDLE, None), GONE], "a", ForkOutcome.FORKED),
        ([NOTHING, NOTHING], None, ForkOutcome.UNKNOWN),
    ],
)
async def test_one_replica_makes_a_fork_and_is_its_home(
    holdings: list[Any], home: str | None, outcome: ForkOutcome
) -> None:
    handle = replicas("ab", session_holdings=holdings, fork_session=[ForkOutcome.FORKED] * 2)
    assert await client_of(handle).fork_session("public", "x", "y") is outcome
    forks = [call for call in handle.asked if call[0] == "fork_session"]
    assert forks == ([("fork_session", home, "public", "x", "y")] if home else [])
    if home:
        assert handle.known.homes.last(session_key("public", "y")) == home


async def test_of_equal_copies_every_process_takes_the_same_one() -> None:
    homes = set()
    for running in ("ab", "ba"):
        handle = replicas(running, session_holdings=[(IDLE, None)] * 2, fork_session=[ForkOutcome.FORKED] * 2)
        await client_of(handle).fork_session("public", "x", "y")
        homes.add(handle.asked[-1][1])
    assert len(homes) == 1


@pytest.mark.parametrize(
    ("works", "ready"),
    [
        ({"a": SILENT}, True),
        ({"a": SILENT, "b": ("b", False)}, False),
        ({"a": SILENT, "b": RuntimeError()}, False),
        ({"a": ("a", False)}, True),
    ],
)
async def test_a_replica_that_does_not_answer_does_not_speak_for_all(works: dict[str, Any], ready: bool) -> None:
    handle = Replicas(works=works)
    handle.known.set_running(["a", "b"])
    assert await client_of(handle).ready() is ready


@pytest.mark.parametrize("starts_on_demand", [True, False])
async def test_without_a_replica_it_is_ready_only_where_a_turn_starts_one(starts_on_demand: bool) -> None:
    client = client_of(replicas(""), starts_on_demand=starts_on_demand)
    assert await client.ready() is starts_on_demand


async def test_the_longest_context_is_kept_once_all_have_said_theirs() -> None:
    handle = replicas("abc", context_limit=[100, 300, SILENT])
    client = client_of(handle)
    assert await client.context_limit() == 300
    handle._answers["context_limit"][2] = 200
    assert await client.context_limit() == 300
    asked = len(handle.asked)
    assert await client.context_limit() == 300
    assert len(handle.asked) == asked
