"""Conversations with the demo model on two replicas, over HTTP, as a client has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import pytest
from ray.serve.handle import DeploymentHandle

from engine_actor.messages import TurnAccepted, TurnRequest
from engine_actor.options import SamplingParams
from serve_app.cluster.app import ENGINES
from serve_app.cluster.client import HandleEngineClient
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.cluster.routing.placement import by_rank
from serve_app.commands.local_ray import APPLICATION
from tests.cluster.scripted import Deploy, MeasuredEngine

QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is larger?",
    "Name a river there.",
    "How long is it?",
    "Say goodbye.",
)
SUBJECTS = ("a cat", "the sea", "bread", "rain", "a train", "winter", "tea", "a tree")


@dataclass(frozen=True)
class Answer:
    text: str
    replica: str
    prompt_tokens: int
    cached_tokens: int


@pytest.fixture(scope="module")
def engines(deploy: Deploy) -> DeploymentHandle:
    return deploy(
        MeasuredEngine,
        replicas=2,
        ingress_replicas=2,
        kv_memory="192MiB",
        threads=1,
        graceful_shutdown_timeout_seconds=5.0,
    )


@pytest.fixture
async def http(base_url: str, engines: DeploymentHandle) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=base_url, timeout=240, limits=limits) as client:
        yield client


async def ask(
    http: httpx.AsyncClient, messages: list[dict[str, str]], session: str | None = None, tokens: int = 12
) -> Answer:
    body = {"model": "smollm2", "messages": messages, "max_tokens": tokens, "temperature": 0}
    headers = {"x-session-id": session} if session else {}
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    return Answer(
        answer["choices"][0]["message"]["content"],
        response.headers["x-moorage-replica"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def converse(
    http: httpx.AsyncClient, questions: tuple[str, ...], session: str | None, tokens: int = 12
) -> list[Answer]:
    messages: list[dict[str, str]] = []
    answers = []
    for question in questions:
        messages.append(user(question))
        answers.append(await ask(http, messages, session, tokens))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def totals(engines: DeploymentHandle) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = await engines.broadcast("stats").results_async(timeout_s=60)
    return answers


async def test_turns_stay_on_one_replica_and_reuse_their_history(http: httpx.AsyncClient) -> None:
    with_session = await converse(http, QUESTIONS, "some-turns")
    assert len({answer.replica for answer in with_session}) == 1
    for before, answer in pairwise(with_session):
        # The history of a turn is the whole sequence of the one before: its prompt and its answer.
        assert answer.cached_tokens >= 0.95 * before.prompt_tokens
        assert answer.cached_tokens < answer.prompt_tokens
    without = await converse(http, QUESTIONS, None)
    assert [answer.text for answer in with_session] == [answer.text for answer in without]


async def test_an_edited_history_is_answered_as_if_it_had_been_sent_alone(http: httpx.AsyncClient) -> None:
    messages = [user("My cat is called Tom."), {"role": "assistant", "content": "Nice."}, user("What is its name?")]
    await ask(http, messages, "edited")
    messages[0] = user("My cat is called Felix, and it is black.")
    edited = await ask(http, messages, "edited")
    alone = await ask(http, messages)
    assert edited.text == alone.text


async def test_24_sessions_at_once_each_answer_as_alone_and_spread(http: httpx.AsyncClient) -> None:
    asked = [(f"Write about {SUBJECTS[i % 8]}, number {i}.", "Go on.") for i in range(24)]
    together = await asyncio.gather(*(converse(http, q, f"crowd-{i}", 8) for i, q in enumerate(asked)))
    assert len({answers[0].replica for answers in together}) == 2
    for answers in together:
        assert answers[0].replica == answers[1].replica
        assert answers[1].cached_tokens >= 0.95 * answers[0].prompt_tokens
    for i, questions in enumerate(asked):
        alone = await converse(http, questions, None, 8)
        assert [a.text for a in together[i]] == [a.text for a in alone], f"session {i}"


@pytest.mark.parametrize("name", ["new-1", "new-2", "new-3"])
async def test_turns_of_a_new_name_that_come_together_have_one_home(
    http: httpx.AsyncClient, engines: DeploymentHandle, name: str
) -> None:
    """By two front doors, while a dozen other conversations run. More than a session may have at once are refused."""

    async def first_turn(number: int) -> tuple[int, str | None]:
        body = {"model": "smollm2", "messages": [user(f"Tell me about number {number}.")], "max_tokens": 16}
        response = await http.post("/v1/chat/completions", json=body, headers={"x-session-id": name})
        return response.status_code, response.headers.get("x-moorage-replica")

    others = asyncio.gather(*(converse(http, ("Hello.",), f"beside-{name}-{i}", 64) for i in range(12)))
    while sum(state["running"] for state in await totals(engines)) < 12:
        await asyncio.sleep(0.02)
    turns = await asyncio.gather(*map(first_turn, range(20)))
    await others
    homes = {replica for status, replica in turns if status == 200}
    assert {status for status, _ in turns} <= {200, 429}
    assert len(homes) == 1
    listed = [item["replica"] for item in (await http.get("/v1/sessions")).json()["data"] if item["id"] == name]
    assert listed == list(homes)


def key_that_leads_to(home: str) -> str:
    """A routing key of nothing that is anywhere."""
    running = known_replicas(APPLICATION, ENGINES).running
    return next(key for key in map(str, range(1000)) if by_rank(key, running)[0] == home)


async def test_turns_of_a_name_that_processes_send_to_two_replicas_have_one_home(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    """What loads a process sees may lead it to any replica; here wrong keys do. First together, then while the first
    turn runs, then to a session that rests."""
    client = HandleEngineClient(engines, placement_timeout=20.0)
    await client.sessions("public")  # from now on this process follows the set of replicas
    names = sorted(known_replicas(APPLICATION, ENGINES).running)

    async def turn(session: str, home: str, tokens: int = 4) -> str:
        asked = TurnRequest("r", "public", session, (1, 2, 3), SamplingParams(), tokens, ignore_eos=True)
        accepted, *_ = [delta async for delta in client.stream_turn(asked, routing_key=key_that_leads_to(home))]
        assert isinstance(accepted, TurnAccepted)
        return accepted.replica

    for number in range(6):
        session = f"one-name-{number}"
        together = await asyncio.gather(*(turn(session, name, tokens=100) for name in names for _ in range(2)))
        assert len(set(together)) == 1
        held = asyncio.create_task(turn(session, together[0], tokens=200))
        assert {await turn(session, name) for name in names} == set(together)
        assert await held == together[0]
        assert {await turn(session, name) for name in names} == set(together)
    listed = [item["id"] for item in (await http.get("/v1/sessions")).json()["data"]]
    assert len(listed) == len(set(listed))
    (_, here), (_, there) = await engines.broadcast("remembered").results_async(timeout_s=30)
    assert not here & there


async def test_a_client_that_leaves_in_mid_stream_frees_its_turn(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    body = {"model": "smollm2", "messages": [user("Count to one thousand.")], "max_tokens": 2000, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        while '"content":"' not in await anext(lines):
            pass

    def idle(states: list[dict[str, Any]]) -> bool:
        return all(state["running"] == state["waiting"] == 0 for state in states)

    for _ in range(600):
        if idle(before := await totals(engines)):
            break
        await asyncio.sleep(0.05)
    assert idle(before)
    await asyncio.sleep(0.5)
    after = await totals(engines)
    assert [state["committed_steps"] for state in after] == [state["committed_steps"] for state in before]
    assert [state["blocks_free"] for state in after] == [state["blocks_free"] for state in before]


async def test_sessions_are_listed_with_their_replica_and_can_be_dropped(http: httpx.AsyncClient) -> None:
    first = await ask(http, [user("Hello.")], "listed")
    listed = {item["id"]: item for item in (await http.get("/v1/sessions")).json()["data"]}
    assert listed["listed"]["replica"] == first.replica
    assert listed["listed"]["cached_tokens"] > 0
    assert (await http.delete("/v1/sessions/listed")).status_code == 200
    assert "listed" not in {item["id"] for item in (await http.get("/v1/sessions")).json()["data"]}
    assert (await http.delete("/v1/sessions/listed")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_of_a_session_that_is_deleted_says_so_and_is_not_asked_for_again(
    http: httpx.AsyncClient, stream: bool
) -> None:
    session = f"deleted-{stream}"
    body = {"messages": [user("Hello.")], "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers={"x-session-id": session}))
    while not any(item["id"] == session for item in (await http.get("/v1/sessions")).json()["data"]):
        assert not asking.done()
        await asyncio.sleep(0.02)
    assert (await http.delete(f"/v1/sessions/{session}")).status_code == 200
    answer = await asking
    assert answer.status_code == (200 if stream else 410)
    *_, last = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert json.loads(last)["error"]["code"] == "session_deleted"
    assert session not in {item["id"] for item in (await http.get("/v1/sessions")).json()["data"]}
