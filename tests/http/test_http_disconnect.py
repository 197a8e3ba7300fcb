"""A client that leaves ends its turn at once, whatever the moment; and nothing is left of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.ingress.disconnect import ClientGone, until_disconnect
from serve_app.openai import keep_alive
from tests.http.http_harness import CHAT, COMPLETIONS, RESPONSES, Server, open_request, wait_until


def body(path: str, stream: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"stream": stream}
    if path == CHAT:
        return content | {"messages": [{"role": "user", "content": "Hi"}]}
    if path == RESPONSES:
        return content | {"input": "Hi"}
    return content | {"prompt": "Once"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", [0, 1, 3], ids=["before acceptance", "before the first token", "after two tokens"])
def test_a_client_that_leaves_closes_its_turn(server: Server, path: str, stream: bool, moment: int) -> None:
    engine = server.engine
    engine.hold_at = moment
    connection = open_request(server, path, body(path, stream))
    wait_until(lambda: engine.running == 1 and engine.tokens_sent == max(0, moment - 1))
    if stream and moment:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    connection.close()
    wait_until(lambda: engine.closed == 1)
    assert engine.running == 0
    assert engine.tokens_sent == max(0, moment - 1)  # the engine was never released: nothing more was made
    engine.hold_at = None
    assert server.chat().status_code == 200


def test_a_client_that_leaves_while_it_sends_starts_no_turn(server: Server) -> None:
    open_request(server, CHAT, body(CHAT, True), cut=10).close()
    assert server.chat().status_code == 200
    assert len(server.engine.requests) == 1


def test_many_clients_that_leave_leave_nothing(server: Server) -> None:
    engine = server.engine
    engine.hold_at = 2
    connections = [open_request(server, CHAT, body(CHAT, bool(i % 2))) for i in range(40)]
    wait_until(lambda: engine.running == 40)
    for connection in connections[::2]:
        connection.close()
    wait_until(lambda: engine.closed == 20)
    engine.release.set()
    for connection in connections[1::2]:
        answer = b""
        while b"[DONE]" not in answer:
            chunk = connection.recv(4096)
            assert chunk, answer
            answer += chunk
        connection.close()
    wait_until(lambda: engine.running == 0)
    assert engine.closed == 40


def test_a_turn_is_closed_when_its_answer_is_over(server: Server) -> None:
    for fields in ({}, {"stream": True}, {"stop": "there"}, {"stop": "there", "stream": True}, {"max_tokens": 1}):
        server.engine.closed = 0
        assert server.chat(**fields).status_code == 200
        assert (server.engine.running, server.engine.closed) == (0, 1)


async def never() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_work_has_ended_before_the_disconnect_is_reported() -> None:
    running, ended = asyncio.Event(), []

    async def work() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def leaves() -> dict[str, str]:
        await running.wait()
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await until_disconnect(leaves, work())
    assert ended == [True]


async def test_cancelling_the_request_cancels_its_work() -> None:
    """Ray Serve tells of a disconnect in this way."""
    running, ended = asyncio.Event(), []

    async def work() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(until_disconnect(never, work()))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_results_and_errors_of_the_work_come_through() -> None:
    async def fails() -> None:
        raise ValueError("mine")

    async def gives() -> int:
        return 5

    assert await until_disconnect(never, gives()) == 5
    with pytest.raises(ValueError, match="mine"):
        await until_disconnect(never, fails())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_stream_that_pauses_is_kept_alive_by_comments_and_goes_on(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_SECONDS", 0.02)
    engine = server.engine
    engine.hold_at = 3
    comments, lines = 0, []
    with server.client.stream("POST", path, json=body(path, True)) as response:
        for line in response.iter_lines():
            comments += line == ": keep-alive"
            if comments == 3:
                engine.release.set()
            if line and not line.startswith(":"):
                lines.append(line)
    assert comments >= 3
    engine.hold_at = None
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_SECONDS", 60.0)
    undisturbed = server.client.post(path, json=body(path, True)).text.splitlines()
    assert len(lines) == len([line for line in undisturbed if line])
