"""Serve, router, handle client and front door around scripted engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import httpx
import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from engine_actor.messages import (
    EndReason,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
    session_key,
)
from engine_actor.options import SamplingParams
from serve_app.cluster.app import ENGINES
from serve_app.cluster.client import HandleEngineClient
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.commands.local_ray import APPLICATION
from tests.cluster.scripted import LETTERS, Deploy, ScriptedEngine

KEY, OTHER_KEY = "key-of-team-a", "key-of-team-b"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def engines(deploy: Deploy) -> DeploymentHandle:
    return deploy(ScriptedEngine, replicas=2, api_keys=(KEY, OTHER_KEY), graceful_shutdown_timeout_seconds=2.0)


@pytest.fixture
def client(engines: DeploymentHandle) -> HandleEngineClient:
    return HandleEngineClient(engines, placement_timeout=20.0)


@pytest.fixture
async def http(base_url: str, engines: DeploymentHandle) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, headers=HEADERS, timeout=60) as session:
        yield session


def request(script: str, session: str | None = None, owner: str = "o", tokens: int = 3) -> TurnRequest:
    return TurnRequest(script, owner, session, (1, 2, 3), SamplingParams(), tokens)


async def states(engines: DeploymentHandle) -> list[dict[str, Any]]:
    try:
        answers = await engines.broadcast("state").results_async(timeout_s=20, return_exceptions=True)
    except DeploymentUnavailableError:  # none is running at this moment
        return []
    return [answer for answer in answers if isinstance(answer, dict)]


async def until(condition: Callable[[list[dict[str, Any]]], bool], engines: DeploymentHandle) -> float:
    """Seconds until the engines' states satisfy the condition; it has half a minute."""
    begun = time.monotonic()
    while not condition(seen := await states(engines)):
        assert time.monotonic() < begun + 30, seen
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


def is_open(script: str) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda seen: any(script in state["open"] for state in seen)


def is_gone(script: str) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda seen: not any(script in state["open"] for state in seen)


async def turn(client: HandleEngineClient, asked: TurnRequest, key: str | None = None) -> list[Any]:
    return [delta async for delta in client.stream_turn(asked, routing_key=key)]


async def test_turns_of_a_session_stay_on_one_replica_and_sessions_spread(client: HandleEngineClient) -> None:
    homes = {}
    for number in range(8):
        session = f"s{number}"
        key = session_key("o", session)
        replicas = set()
        for _ in range(3):
            accepted, *_, ended = await turn(client, request("plain", session), key)
            assert isinstance(ended, TurnEnded)
            replicas.add(accepted.replica)
        assert len(replicas) == 1
        homes[session] = replicas.pop()
    assert len(set(homes.values())) == 2


@pytest.mark.parametrize("code", [RefusalCode.QUEUE_FULL, RefusalCode.UNAVAILABLE])
async def test_a_turn_that_its_home_refuses_is_taken_by_another(
    client: HandleEngineClient, engines: DeploymentHandle, code: RefusalCode
) -> None:
    key = session_key("o", f"refused-{code}")
    home = (await turn(client, request("plain", f"refused-{code}"), key))[0].replica
    try:
        await engines.broadcast("script", home, code.value).results_async(timeout_s=20)
        accepted = (await turn(client, request(f"again-{code}", f"refused-{code}"), key))[0]
        assert isinstance(accepted, TurnAccepted)
        assert accepted.replica != home
        asked = {state["replica"] for state in await states(engines) if f"again-{code}" in state["seen"]}
        assert asked == {home, accepted.replica}
    finally:
        await engines.broadcast("script", "*", None).results_async(timeout_s=20)


async def test_when_all_refuse_the_refusal_is_the_answer_after_bounded_tries(
    client: HandleEngineClient, engines: DeploymentHandle, http: httpx.AsyncClient
) -> None:
    try:
        await engines.broadcast("script", "*", "queue_full").results_async(timeout_s=20)
        [refused] = await turn(client, request("all-refuse"))
        assert isinstance(refused, TurnRefused)
        assert refused.code is RefusalCode.QUEUE_FULL
        assert [state["seen"].count("all-refuse") for state in await states(engines)] == [1, 1]
        answer = await http.post("/v1/completions", json={"model": "smollm2", "prompt": "a"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
    finally:
        await engines.broadcast("script", "*", None).results_async(timeout_s=20)


async def test_a_refusal_that_is_the_clients_to_mend_is_not_tried_elsewhere(
    client: HandleEngineClient, engines: DeploymentHandle
) -> None:
    try:
        await engines.broadcast("script", "*", "context_length_exceeded").results_async(timeout_s=20)
        [refused] = await turn(client, request("too-long"))
        assert refused.code is RefusalCode.CONTEXT_LENGTH
        assert sum(state["seen"].count("too-long") for state in await states(engines)) == 1
    finally:
        await engines.broadcast("script", "*", None).results_async(timeout_s=20)


@pytest.mark.parametrize("script", ["slow", "silent"])
async def test_closing_the_iterator_closes_the_replicas_generator(
    client: HandleEngineClient, engines: DeploymentHandle, script: str
) -> None:
    async with aclosing(client.stream_turn(request(f"{script}-closed"), routing_key=None)) as deltas:
        assert isinstance(await anext(deltas), TurnAccepted)
        await until(is_open(f"{script}-closed"), engines)
    print(f"closed after {await until(is_gone(f'{script}-closed'), engines):.3f} s")


async def test_cancelling_before_the_first_delta_closes_the_replicas_generator(
    client: HandleEngineClient, engines: DeploymentHandle
) -> None:
    waiting = asyncio.create_task(turn(client, request("queued-cancelled")))
    await until(is_open("queued-cancelled"), engines)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    print(f"closed after {await until(is_gone('queued-cancelled'), engines):.3f} s")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", ["slow", "silent", "queued"])
async def test_a_client_that_leaves_ends_its_turn(
    http: httpx.AsyncClient, engines: DeploymentHandle, script: str, stream: bool
) -> None:
    name = f"{script}-left-{stream}"
    body = {"model": "smollm2", "prompt": "a", "stream": stream}
    asking = asyncio.create_task(http.post("/v1/completions", json=body, headers={"x-request-id": name}))
    await until(is_open(name), engines)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    print(f"{name}: closed after {await until(is_gone(name), engines):.3f} s")


LARGE = 4 * 2**20 - 200
ONE_MESSAGE = '{"messages": [{"role": "user", "content": "Hi"}], '
HEAVY = [
    ("/v1/chat/completions", f'{ONE_MESSAGE}"tools": [{"0," * (LARGE // 2 - 100)}0]}}', 400),
    ("/v1/chat/completions", f'{{"messages": [{"{}," * (LARGE // 3)}{{}}]}}', 400),
    ("/v1/responses", f'{{"input": {"[" * LARGE}', 400),
    ("/v1/completions", f'{{"prompt": [{"80," * (LARGE // 3)}80]}}', 400),
    ("/v1/completions", f'{{"prompt": "{"a" * LARGE}"}}', 400),
    ("/tokenize", f'{{"prompt": "{"a" * LARGE}"}}', 200),
]


async def test_streams_go_on_while_another_client_sends_what_takes_seconds_to_read(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    """The stream has a token each 20 ms. The bound is generous: one such body used to stop all for half a minute."""
    arrived: list[float] = []

    async def listen() -> None:
        body = {"model": "smollm2", "prompt": "a", "stream": True}
        asked = http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "slow-heard"})
        async with asked as response:
            async for _ in response.aiter_bytes():
                arrived.append(time.monotonic())

    listening = asyncio.create_task(listen())
    await until(is_open("slow-heard"), engines)
    headers = {"content-type": "application/json"}
    sent = [http.post(path, content=body.encode(), headers=headers) for path, body, _ in HEAVY]
    answers = await asyncio.gather(*sent)
    assert [answer.status_code for answer in answers] == [status for *_, status in HEAVY]
    heard = len(arrived)
    while len(arrived) == heard:
        await asyncio.sleep(0.01)
    listening.cancel()
    pauses = [later - earlier for earlier, later in pairwise(arrived)]
    print(f"longest pause {max(pauses):.3f} s")
    assert max(pauses) < 5
    await until(is_gone("slow-heard"), engines)


async def test_sessions_are_listed_and_closed_for_their_owner_only(http: httpx.AsyncClient) -> None:
    body = {"model": "smollm2", "prompt": "a", "max_tokens": 2}
    for session in ("mine-1", "mine-2"):
        answer = await http.post("/v1/completions", json=body, headers={"x-session-id": session})
        assert answer.status_code == 200, answer.text
    listed = (await http.get("/v1/sessions")).json()["data"]
    assert {"mine-1", "mine-2"} <= {item["id"] for item in listed}
    other = {"Authorization": f"Bearer {OTHER_KEY}"}
    assert (await http.get("/v1/sessions", headers=other)).json()["data"] == []
    assert (await http.delete("/v1/sessions/mine-1", headers=other)).status_code == 404
    assert (await http.delete("/v1/sessions/mine-1")).status_code == 200
    assert (await http.delete("/v1/sessions/mine-1")).status_code == 404


async def replicas_of_sessions(http: httpx.AsyncClient) -> dict[str, str]:
    return {item["id"]: item["replica"] for item in (await http.get("/v1/sessions")).json()["data"]}


async def test_sessions_of_a_replica_that_hangs_are_not_known_and_not_denied(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    """All at once, since Serve ends a replica that hangs for long."""
    body = {"model": "smollm2", "prompt": "a", "max_tokens": 2}
    at: dict[str, str] = {}
    while len(set(at.values())) < 2:
        name = f"hangs-{len(at)}"
        answer = await http.post("/v1/completions", json=body, headers={"x-session-id": name})
        at[name] = answer.headers["x-moorage-replica"]
    here, there = (next(name for name in at if at[name] == replica) for replica in sorted(set(at.values())))
    [pid] = [state["pid"] for state in await states(engines) if state["replica"] == at[there]]
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = [
            http.get("/v1/sessions"),
            http.get(f"/v1/sessions/{there}"),
            http.delete(f"/v1/sessions/{there}"),
            http.post(f"/v1/sessions/{there}/fork", json={"session_id": "of-a-session-that-hangs"}),
            http.get(f"/v1/sessions/{here}"),
            http.delete("/v1/sessions/hangs-never"),
        ]
        listed, *unknown, known, never = await asyncio.gather(*asked)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert listed.status_code == 200
    assert (listed.json()["incomplete"], listed.json()["unanswered_replicas"]) == (True, 1)
    assert {item["replica"] for item in listed.json()["data"]} == {at[here]}
    for answer in (*unknown, never):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    assert (known.status_code, known.json()["replica"]) == (200, at[here])
    whole = (await http.get("/v1/sessions")).json()
    assert (whole["incomplete"], whole["unanswered_replicas"]) == (False, 0)
    at.pop(there)  # its deletion may have reached the replica all the same
    assert (await replicas_of_sessions(http)).items() >= at.items()
    assert (await http.delete(f"/v1/sessions/{there}")).status_code in (200, 404)
    assert (await http.get(f"/v1/sessions/{there}")).status_code == 404
    assert (await http.delete("/v1/sessions/hangs-never")).status_code == 404


async def test_a_session_that_is_at_two_replicas_is_listed_once_and_forked_and_deleted_as_one(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    """What a session left behind where it has been is shorter."""

    async def turn_of(session: str, tokens: int) -> str:
        body = {"model": "smollm2", "prompt": "a", "max_tokens": tokens}
        answer = await http.post("/v1/completions", json=body, headers={"x-session-id": session})
        return answer.headers["x-moorage-replica"]

    first = await turn_of("copied", 2)
    try:
        await engines.broadcast("script", first, "queue_full").results_async(timeout_s=20)
        longer = await turn_of("copied", 9)
    finally:
        await engines.broadcast("script", "*", None).results_async(timeout_s=20)
    assert longer != first
    listed = [item for item in (await http.get("/v1/sessions")).json()["data"] if item["id"] == "copied"]
    assert [(item["replica"], item["tokens"]) for item in listed] == [(longer, 9)]

    forks = [http.post("/v1/sessions/copied/fork", json={"session_id": "fork"}) for _ in range(8)]
    assert sorted(answer.status_code for answer in await asyncio.gather(*forks)) == [200] + [409] * 7
    forked = {state["replica"] for state in await states(engines) if "fork" in state["sessions"]}
    assert forked == {longer} == {(await http.get("/v1/sessions/fork")).json()["replica"]}
    assert await turn_of("fork", 2) == longer, "a fork has its home from the start"

    assert (await http.delete("/v1/sessions/copied")).status_code == 200
    assert (await http.get("/v1/sessions/copied")).status_code == 404
    assert not [state for state in await states(engines) if "copied" in state["sessions"]]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/sessions", "/no-such-path"])
async def test_every_path_but_health_and_ready_wants_a_key(base_url: str, engines: DeploymentHandle, path: str) -> None:
    async with httpx.AsyncClient(base_url=base_url) as stranger:
        assert [(await stranger.get(free)).status_code for free in ("/health", "/ready")] == [200, 200]
        assert (await stranger.get(path)).status_code == 401
        assert (await stranger.get(path, headers={"Authorization": "Bearer wrong-key"})).status_code == 401


def replica_of(delta: TurnDelta) -> str:
    assert isinstance(delta, TurnAccepted)
    return delta.replica


def tokens_of(delta: TurnDelta) -> tuple[int, ...]:
    assert isinstance(delta, TurnTokens)
    return delta.token_ids


async def test_an_answer_leaves_a_replica_that_is_stopped_and_ends_there_when_that_goes_on(
    client: HandleEngineClient, engines: DeploymentHandle
) -> None:
    stream = client.stream_turn(request("slow-stopped", "stopped"), routing_key=session_key("o", "stopped"))
    async with aclosing(stream):
        home = replica_of(await anext(stream))
        [pid] = [state["pid"] for state in await states(engines) if state["replica"] == home]
        os.kill(pid, signal.SIGSTOP)
        tokens: list[int] = []
        try:
            while home not in known_replicas(APPLICATION, ENGINES).silent:
                tokens += tokens_of(await anext(stream))
        finally:
            os.kill(pid, signal.SIGCONT)

        def moved(seen: list[dict[str, Any]]) -> bool:
            return {state["replica"] == home for state in seen if "slow-stopped" in state["open"]} == {False}

        await until(moved, engines)
        tokens += tokens_of(await anext(stream))
        assert tokens == [LETTERS[i % 4] for i in range(len(tokens))]
    await until(is_gone("slow-stopped"), engines)


async def test_an_answer_whose_replica_dies_goes_on_elsewhere_and_so_does_the_next_turn(
    client: HandleEngineClient, engines: DeploymentHandle, http: httpx.AsyncClient
) -> None:
    """This and the next test come last in this module: they cost replicas."""
    key = session_key("o", "doomed")
    stream = client.stream_turn(request("steady-doomed", "doomed", tokens=40), routing_key=key)
    deltas = [await anext(stream), await anext(stream)]
    home = replica_of(deltas[0])
    await engines.broadcast("die", home).results_async(timeout_s=20, return_exceptions=True)
    deltas += [delta async for delta in stream]
    tokens = [token for delta in deltas if isinstance(delta, TurnTokens) for token in delta.token_ids]
    assert tokens == [LETTERS[i % 4] for i in range(40)]
    assert sum(isinstance(delta, TurnAccepted) for delta in deltas) == 1
    assert deltas[-1] == TurnEnded(EndReason.LENGTH, 3, 0, 40)

    accepted, *_, ended = await turn(client, request("plain", "doomed"), key)
    assert accepted.replica != home
    assert ended.reason is EndReason.LENGTH
    assert (await http.get("/ready")).status_code == 200


async def test_a_turn_that_kills_its_replica_is_given_two_at_most(
    client: HandleEngineClient, engines: DeploymentHandle
) -> None:
    await until(lambda seen: len(seen) == 2, engines)
    before = {state["replica"] for state in await states(engines)}
    [refused] = await turn(client, request("poison"))
    assert refused.code is RefusalCode.UNAVAILABLE
    await until(lambda seen: len(seen) == 2 and all(state["replica"] not in before for state in seen), engines)
    accepted, *_ = await turn(client, request("plain"))
    assert isinstance(accepted, TurnAccepted)
