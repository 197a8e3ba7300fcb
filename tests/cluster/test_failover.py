"""Answers of the demo model whose replica is stopped, broken or killed: they are what they would have been.

In this order, since each test costs a replica of three but the first three, of which the last gives its replica back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.serve.handle import DeploymentHandle

from serve_app.cluster.app import FRONT_DOOR
from serve_app.cluster.channel.leases import LEASE_SECONDS
from serve_app.commands.local_ray import APPLICATION
from serve_app.config import AppArgs
from tests.cluster.scripted import Deploy, MortalEngine

STREAMS = 8
TOKENS = 48
LONG = 300
GUIDED = (2, 3, 6)
SUBJECTS = ("a cat", "the sea", "bread", "rain", "a train", "winter", "tea", "a tree")


@pytest.fixture(scope="module")
def engines(deploy: Deploy) -> DeploymentHandle:
    return deploy(MortalEngine, replicas=3, kv_memory="64MiB", threads=1, graceful_shutdown_timeout_seconds=5.0)


@pytest.fixture
async def http(base_url: str, engines: DeploymentHandle) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, timeout=240) as client:
        yield client


class Stream:
    """A streamed answer, greedy or drawn with a seed and penalties, some by a grammar. `session` names its
    conversation."""

    def __init__(self, number: int, session: str | None = None) -> None:
        self.body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Write about {SUBJECTS[number % 8]}."}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if number % 2:
            self.body |= {"temperature": 0.9, "seed": number, "presence_penalty": 0.5, "frequency_penalty": 0.3}
        else:
            self.body |= {"temperature": 0}
        if number in GUIDED:
            self.body |= {"ignore_eos": False, "structured_outputs": {"regex": "([a-z]{2,9} ){60}"}}
        self.headers = {"x-session-id": session} if session else {"x-correlation-id": f"stream-{number}"}
        self.replica = ""
        self.text = ""
        self.chunks = 0
        self.usage: dict[str, Any] = {}
        self.done = False

    async def read(self, http: httpx.AsyncClient) -> None:
        path = "/v1/chat/completions"
        async with http.stream("POST", path, json=self.body, headers=self.headers) as response:
            assert response.status_code == 200
            self.replica = response.headers["x-moorage-replica"]
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.chunks += 1


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """Texts of answers that nothing disturbed, by number."""
    return {}


async def run(http: httpx.AsyncClient, session: str | None = None) -> list[Stream]:
    streams = [Stream(i, f"{session}-{i}" if session else None) for i in range(STREAMS)]
    await asyncio.gather(*(stream.read(http) for stream in streams))
    return streams


async def disturb(
    http: httpx.AsyncClient,
    expected: dict[int, str],
    harm: Callable[[str], Awaitable[None]],
    session: str | None = None,
) -> str:
    """Harms the replica with most streams when all have begun, and compares what they say. Returns its id."""
    if not expected:
        expected.update({i: stream.text for i, stream in enumerate(await run(http))})
    streams = [Stream(i, f"{session}-{i}" if session else None) for i in range(STREAMS)]
    reading = asyncio.gather(*(stream.read(http) for stream in streams))
    while not all(stream.chunks > 2 for stream in streams):
        assert not reading.done()
        await asyncio.sleep(0.01)
    victim, _ = Counter(stream.replica for stream in streams if not stream.done).most_common(1)[0]
    assert any(stream.replica == victim and stream.chunks < TOKENS - 8 for stream in streams), "too late to matter"
    await harm(victim)
    await reading
    for i, stream in enumerate(streams):
        assert i not in GUIDED or re.fullmatch("([a-z]{2,9} )+[a-z]{0,9}", stream.text)
        assert stream.text == expected[i], f"stream {i} of replica {stream.replica}; {victim} was harmed"
        assert stream.done and stream.usage["completion_tokens"] == TOKENS
    return victim


async def all_processes(engines: DeploymentHandle) -> dict[str, int]:
    """By replica."""
    return dict(await engines.broadcast("process").results_async(timeout_s=30))


async def process_of(engines: DeploymentHandle, replica: str) -> int:
    return (await all_processes(engines))[replica]


async def test_the_process_of_an_engine_has_the_environment_of_its_math_libraries(engines: DeploymentHandle) -> None:
    """They read it when they are loaded, so it must be there when the process starts."""
    wanted = AppArgs(model="smollm2", threads=1).engine_resources(1, 0.0)["runtime_env"]["env_vars"]
    for _, pid in await engines.broadcast("process").results_async(timeout_s=30):
        content = Path(f"/proc/{pid}/environ").read_text("utf-8")
        found = dict(line.split("=", 1) for line in content.split("\0") if "=" in line)
        assert found.items() >= wanted.items()


async def test_turns_whose_front_door_is_killed_end_and_their_sessions_are_answered_by_the_next(
    http: httpx.AsyncClient, engines: DeploymentHandle, expected: dict[int, str]
) -> None:
    """One that dies says nothing to the engines, which no client can reach past it."""
    expected.update({i: stream.text for i, stream in enumerate(await run(http))})
    streams = [Stream(i, f"unheard-{i}") for i in range(3)]
    for stream in streams:
        stream.body["max_tokens"] = 4000
    reading = asyncio.gather(*(stream.read(http) for stream in streams), return_exceptions=True)
    while not all(stream.chunks for stream in streams):
        assert not reading.done()
        await asyncio.sleep(0.01)
    [front_door] = [p for p in psutil.Process().children(recursive=True) if is_front_door(p)]
    front_door.kill()
    begun = time.monotonic()
    while sum([state["running"] for state in await engines.broadcast("stats").results_async(timeout_s=30)]):
        assert time.monotonic() < begun + 3 * LEASE_SECONDS, "turns are left"
        await asyncio.sleep(0.1)
    print(f"ended after {time.monotonic() - begun:.1f} s")
    for broken in await reading:
        assert isinstance(broken, httpx.TransportError | AssertionError)
    while (await http.get("/ready")).status_code != 200:
        await asyncio.sleep(0.1)
    print(f"another front door after {time.monotonic() - begun:.1f} s")
    again = [Stream(i, f"unheard-{i}") for i in range(3)]
    await asyncio.gather(*(stream.read(http) for stream in again))
    assert [stream.text for stream in again] == [expected[i] for i in range(3)]


def is_front_door(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return f"{APPLICATION}:{FRONT_DOOR}" in " ".join(process.cmdline())
    return False


async def test_streams_leave_a_replica_that_is_stopped_and_it_is_of_use_again_when_it_goes_on(
    http: httpx.AsyncClient, engines: DeploymentHandle, expected: dict[int, str]
) -> None:
    stopped: list[int] = []

    async def stop(replica: str) -> None:
        stopped.append(await process_of(engines, replica))
        os.kill(stopped[0], signal.SIGSTOP)

    try:
        await disturb(http, expected, stop, session="stopped")
        new = Stream(0)
        await new.read(http)
        assert new.text == expected[0]
    finally:
        with contextlib.suppress(ProcessLookupError):  # on a slow machine Serve may have replaced it by now
            os.kill(stopped[0], signal.SIGCONT)

    # What it had begun is cancelled there, and the answers' next turns are right wherever they go.
    for _ in range(600):
        states = await engines.broadcast("stats").results_async(timeout_s=30)
        if all(state["running"] == state["waiting"] == 0 for state in states):
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError(f"turns are left: {states}")
    for number in range(2):
        messages = [
            *Stream(number).body["messages"],
            {"role": "assistant", "content": expected[number]},
            {"role": "user", "content": "Go on."},
        ]
        following, alone = Stream(number, f"stopped-{number}"), Stream(number)
        for stream in (following, alone):
            stream.body |= {"messages": messages, "max_tokens": 8}
            await stream.read(http)
        assert following.text == alone.text


async def test_streams_leave_a_replica_whose_engine_broke(
    http: httpx.AsyncClient, engines: DeploymentHandle, expected: dict[int, str]
) -> None:
    async def harm(replica: str) -> None:
        await engines.broadcast("break_engine", replica).results_async(timeout_s=30)

    await disturb(http, expected, harm)


async def test_streams_leave_a_replica_that_is_killed(
    http: httpx.AsyncClient, engines: DeploymentHandle, expected: dict[int, str]
) -> None:
    async def kill(replica: str) -> None:
        os.kill(await process_of(engines, replica), signal.SIGKILL)

    await disturb(http, expected, kill)


async def test_streams_wait_for_others_when_every_replica_is_killed_one_after_the_other(
    http: httpx.AsyncClient, engines: DeploymentHandle
) -> None:
    """The last ones when the streams go on after the first loss: then there is none, and another is only starting."""

    def some() -> list[Stream]:
        streams = [Stream(i, f"{time.monotonic()}-{i}") for i in (0, 1)]
        for stream in streams:
            stream.body["max_tokens"] = LONG
        return streams

    undisturbed, streams = some(), some()
    await asyncio.gather(*(stream.read(http) for stream in undisturbed))
    reading = asyncio.gather(*(stream.read(http) for stream in streams))
    while not all(stream.chunks > 2 for stream in streams):
        assert not reading.done()
        await asyncio.sleep(0.01)
    first = await process_of(engines, streams[0].replica)
    others = set((await all_processes(engines)).values()) - {first}
    os.kill(first, signal.SIGKILL)
    before = [stream.chunks for stream in streams]
    while not all(stream.chunks > chunks + 8 for stream, chunks in zip(streams, before, strict=True)):
        assert not reading.done()
        await asyncio.sleep(0.01)
    assert not any(stream.done for stream in streams), "too late to matter"
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    await reading
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert all(stream.done and stream.usage["completion_tokens"] == LONG for stream in streams)
