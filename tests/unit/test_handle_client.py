"""Control calls of the client in front of many engines. Its turns are in `failover`."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.messages import ForkOutcome, SessionInfo
from serve_app.cluster import client as handle_client
from tests.support.failing_replicas import Replicas, client_of


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
    handle = Replicas(sessions=[[], []], fork_session=answers)
    assert await client_of(handle).fork_session("public", "a", "b") is outcome
    assert handle.asked == [("sessions", "public"), ("fork_session", "public", "a", "b")]


async def test_a_name_that_any_replica_knows_is_taken() -> None:
    handle = Replicas(sessions=[[], [SessionInfo("b", "public", "r", 1, 1, 1, False, 0.0)]])
    assert await client_of(handle).fork_session("public", "a", "b") is ForkOutcome.EXISTS
    assert handle.asked == [("sessions", "public")]


@pytest.mark.parametrize(
    ("works", "ready"),
    [({"a": None}, True), ({"a": None, "b": ("b", False)}, False), ({"a": None, "b": RuntimeError()}, False)],
)
async def test_a_replica_that_does_not_answer_does_not_speak_for_all(
    monkeypatch: pytest.MonkeyPatch, works: dict[str, Any], ready: bool
) -> None:
    monkeypatch.setattr(handle_client, "_READY_TIMEOUT_SECONDS", 0.05)
    replicas = Replicas(works=works, accepting=[True, TimeoutError])
    replicas.known.set_running(["a", "b"])
    client = client_of(replicas)
    assert await client.ready() is ready
    replicas.known.set_silent("a", True)
    assert await client.ready() is ready
    assert replicas.asked == [("accepting",)], "nobody waits twice for a replica that is known to be silent"


@pytest.mark.parametrize("starts_on_demand", [True, False])
@pytest.mark.parametrize(("answers", "ready"), [([], None), ([False], False), ([True], True)])
async def test_without_a_replica_it_is_ready_only_where_a_turn_starts_one(
    answers: list[bool], ready: bool | None, starts_on_demand: bool
) -> None:
    client = client_of(Replicas(accepting=answers), starts_on_demand=starts_on_demand)
    assert await client.ready() is (starts_on_demand if ready is None else ready)
