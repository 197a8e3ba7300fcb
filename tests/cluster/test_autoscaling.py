"""Fewer replicas when little is asked, and more when much is: no conversation is forgotten on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.cluster.app import ENGINES
from serve_app.commands.local_ray import APPLICATION
from tests.cluster.scripted import Deploy, MeasuredEngine

DEADLINE_SECONDS = 150
QUESTIONS = ("Name a colour.", "Why that one?", "Name another one.")


@pytest.fixture(scope="module")
def engines(deploy: Deploy) -> DeploymentHandle:
    return deploy(
        MeasuredEngine,
        replicas=2,
        min_replicas=1,
        max_replicas=2,
        target_pressure=0.5,  # two turns of four: a third one needs another replica
        max_batch_size=4,
        max_running_sequences=32,  # no turn waits behind the load: these tests are about what moves
        upscale_delay_seconds=0.5,
        downscale_delay_seconds=0.5,
        kv_memory="64MiB",
        threads=1,
        graceful_shutdown_timeout_seconds=30.0,
    )


@pytest.fixture
async def http(base_url: str, engines: DeploymentHandle) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_SECONDS) as client:
        yield client


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {DEADLINE_SECONDS} s") from None


async def number_is(wanted: int) -> bool:
    status = await asyncio.to_thread(serve.status)
    states = status.applications[APPLICATION].deployments[ENGINES].replica_states
    return dict(states) == {"RUNNING": wanted}


async def remembered(engines: DeploymentHandle) -> dict[str, set[str]]:
    """Names of dormant conversations by replica."""
    return dict(await engines.broadcast("remembered").results_async(timeout_s=30))


@asynccontextmanager
async def load(http: httpx.AsyncClient, clients: int) -> AsyncIterator[None]:
    """Clients that ask one question after the other, and leave in the middle of the last one."""

    async def keep_asking() -> None:
        body = {"prompt": "Rain", "max_tokens": 1500, "ignore_eos": True}
        while True:
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text

    asking = [asyncio.create_task(keep_asking()) for _ in range(clients)]
    try:
        yield
        assert not any(task.done() for task in asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


class Conversation:
    def __init__(self, http: httpx.AsyncClient, name: str, number: int) -> None:
        self._http = http
        self.name = name
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": f"You like the number {number}."}]
        self.replica = ""

    async def turn(self, question: str) -> str:
        self._messages.append({"role": "user", "content": question})
        body = {"messages": self._messages, "max_tokens": 12, "temperature": 0, "session_id": self.name}
        response = await self._http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        self.replica = response.headers["x-moorage-replica"]
        self._messages.append(response.json()["choices"][0]["message"])
        return str(self._messages[-1]["content"])


async def test_conversations_of_a_replica_that_is_not_needed_go_on_at_the_other_one(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    conversations: list[Conversation] = []
    async with load(http, clients=4):
        await until(lambda: number_is(2), "two replicas under load")
        while len(conversations) < 4 or len({c.replica for c in conversations}) < 2:
            number = len(conversations)
            conversations.append(Conversation(http, f"moved-{number}", number))
            for question in QUESTIONS[:2]:
                await conversations[-1].turn(question)
        homes = {c.replica for c in conversations}
        assert homes == set(await remembered(engines))

    await until(lambda: number_is(1), "one replica without load")
    [(survivor, names)] = (await remembered(engines)).items()
    assert survivor in homes
    assert names == {c.name for c in conversations}
    for number, conversation in enumerate(conversations):
        undisturbed = Conversation(http, f"stayed-{number}", number)
        for question in QUESTIONS[:2]:
            await undisturbed.turn(question)
        assert await conversation.turn(QUESTIONS[2]) == await undisturbed.turn(QUESTIONS[2])
        assert conversation.replica == undisturbed.replica == survivor

    async with load(http, clients=4):
        await until(lambda: number_is(2), "two replicas under load again")


async def test_a_session_whose_replica_is_stopped_is_shown_and_once_it_is_deleted_it_stays_so(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    """A turn of it runs there, so that the replica is not gone before. It ends with the session."""
    last: dict[str, str] = {}
    turns: dict[str, asyncio.Task[None]] = {}
    homes: dict[str, str] = {}

    async def run(name: str) -> None:
        body = {"prompt": f"{name} likes", "max_tokens": 1500, "ignore_eos": True, "stream": True, "session_id": name}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            homes[name] = response.headers["x-moorage-replica"]
            async for line in response.aiter_lines():
                last[name] = line or last.get(name, "")

    async def has_begun(count: int) -> bool:
        return len(homes) == count

    async with load(http, clients=4):
        await until(lambda: number_is(2), "two replicas under load")
        while len(set(homes.values())) < 2:
            name = f"deleted-{len(turns)}"
            turns[name] = asyncio.create_task(run(name))
            await until(lambda: has_begun(len(turns)), "its turn has begun")
        for name in list(turns)[1:-1]:  # one at each replica is little
            turns.pop(name).cancel()

    async def one_takes_turns() -> bool:
        return len(await remembered(engines)) == 1

    await until(one_takes_turns, "one replica is stopped")
    [survivor] = await remembered(engines)
    stopped = [name for name in turns if homes[name] != survivor]
    assert stopped and not any(turns[name].done() for name in stopped)
    for name in stopped:
        shown = (await http.get(f"/v1/sessions/{name}")).json()
        assert (shown["replica"], shown["running"]) == (homes[name], True)
    assert set(turns) <= {item["id"] for item in (await http.get("/v1/sessions")).json()["data"]}
    for name, turn in turns.items():
        assert (await http.delete(f"/v1/sessions/{name}")).status_code == 200
        await turn
        assert json.loads(last[name].removeprefix("data: "))["error"]["code"] == "session_deleted"
        assert (await http.get(f"/v1/sessions/{name}")).status_code == 404
    await until(lambda: number_is(1), "it is gone")
    assert not set(turns) & (await remembered(engines))[survivor]
