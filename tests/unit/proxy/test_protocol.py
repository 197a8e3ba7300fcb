"""Raw bytes to a real server: what is not yet a request, and clients that end their sending."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from serve_app.cluster.proxy import protocol as protocol_module
from serve_app.cluster.proxy.front import Front
from serve_app.cluster.proxy.limits import ProxyLimits
from serve_app.cluster.proxy.protocol import BoundedProtocol

HEAD_BYTES = 2048
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
STREAM = b"POST /stream HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"


class App:
    """Answers when it is told to, with what it was sent; knows who has left."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.release = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body, more = body + message["body"], message["more_body"]
        streams = scope["path"] == "/stream"
        if streams:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.asked.set()
        leaving, released = asyncio.create_task(_left(receive)), asyncio.create_task(self.release.wait())
        await asyncio.wait((leaving, released), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.set()
        else:
            if not streams:
                headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 2\n\n" if streams else body})
        for task in (leaving, released):
            task.cancel()


async def _left(receive: Receive) -> Message:
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def serving(app: App, **limits: int) -> AsyncIterator[Open]:
    bounds = ProxyLimits(**limits)

    class Bounded(BoundedProtocol):
        pass

    Bounded.limits = bounds
    config = uvicorn.Config(Front(app, bounds), http=Bounded, port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield lambda: asyncio.open_connection("127.0.0.1", port)
    finally:
        app.release.set()
        server.should_exit = True
        await running


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and error of an answer after which the connection is closed."""
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head[9:12]), json.loads(body)["error"]


async def test_a_header_without_end_is_refused_at_the_bound() -> None:
    async with serving(App(), header_bytes=HEAD_BYTES) as connect:
        reader, writer = await connect()
        writer.write(GET + b"X: ")
        sent = 0
        while not reader.at_eof() and sent < 100:
            writer.write(b"y" * 100)
            sent += 1
            await asyncio.sleep(0.001)
            if reader._buffer:  # type: ignore[attr-defined]
                break
        assert sent * 100 < HEAD_BYTES + 1000
        status, error = await answer(reader)
        assert (status, error["code"]) == (431, "headers_too_large")
        writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET + b"X: " + b"y" * 10 * HEAD_BYTES + b"\r\n\r\n",
        GET + b"".join(b"X%d: y\r\n" % i for i in range(500)) + b"\r\n",
        b"GET /" + b"y" * 2 * HEAD_BYTES,
        POST + GET + b"X: " + b"y" * 2 * HEAD_BYTES + b"\r\n\r\n",  # comes with the body of one before it
    ],
    ids=["one long", "many", "path", "second"],
)
async def test_a_head_that_is_too_large_is_431(request_bytes: bytes) -> None:
    app = App()
    app.release.set()
    async with serving(app, header_bytes=HEAD_BYTES) as connect:
        reader, writer = await connect()
        if request_bytes.startswith(POST):
            writer.write(POST)
            assert (await reader.readuntil(b"body")).startswith(b"HTTP/1.1 200")
            request_bytes = request_bytes.removeprefix(POST)
        writer.write(request_bytes)
        status, error = await answer(reader)
        assert (status, error["code"]) == (431, "headers_too_large")
        writer.close()


async def test_heads_up_to_the_bound_and_bodies_beyond_it_are_served() -> None:
    app = App()
    app.release.set()
    async with serving(app, header_bytes=HEAD_BYTES) as connect:
        reader, writer = await connect()
        body = b"z" * 20 * HEAD_BYTES
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nX: " % len(body)
        whole = head + b"y" * (HEAD_BYTES - len(head) - 4) + b"\r\n\r\n" + body
        for cut in (HEAD_BYTES, HEAD_BYTES - 1, 1, len(whole)):
            writer.write(whole[:cut])
            await asyncio.sleep(0.01)
            writer.write(whole[cut:])
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(body)) == body
        writer.close()


async def test_what_is_no_http_is_400_in_the_envelope() -> None:
    async with serving(App()) as connect:
        for nonsense in (b"nonsense\r\n\r\n", GET + b"no colon\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"):
            reader, writer = await connect()
            writer.write(nonsense)
            status, error = await answer(reader)
            assert (status, error["code"]) == (400, "invalid_http")
            writer.close()


async def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(protocol_module, "BODY_PAUSE_SECONDS", 0.05)
    app = App()
    async with serving(app) as connect:
        reader, writer = await connect()
        writer.write(GET)
        status, error = await answer(reader)
        assert (status, error["code"]) == (408, "request_timeout")
        silent, silent_writer = await connect()
        assert await asyncio.wait_for(silent.read(), 10) == b""
        half, half_writer = await connect()
        half_writer.write(POST[:-1])
        assert await asyncio.wait_for(half.read(), 10) == b""
        await asyncio.wait_for(app.left.wait(), 10)
        for each in (writer, silent_writer, half_writer):
            each.close()


async def test_connections_beyond_the_bound_are_told_so() -> None:
    app = App()
    app.release.set()
    async with serving(app, connections=2) as connect:
        kept = [await connect() for _ in range(2)]
        kept[0][1].write(POST)
        await kept[0][0].readuntil(b"body")
        reader, writer = await connect()
        status, error = await answer(reader)
        assert (status, error["code"]) == (503, "busy")
        writer.close()
        kept[1][1].close()
        while True:  # until the server has noticed
            reader, writer = await connect()
            writer.write(POST)
            if (await reader.readline()).startswith(b"HTTP/1.1 200"):
                break
            writer.close()
        writer.close()
        kept[0][1].close()


@pytest.mark.parametrize("request_bytes", [POST, STREAM], ids=["whole", "stream"])
async def test_a_client_that_ends_its_sending_gets_its_answer(request_bytes: bytes) -> None:
    app = App()
    async with serving(app) as connect:
        reader, writer = await connect()
        writer.write(request_bytes)
        await app.asked.wait()
        writer.write_eof()
        # A sign is sent, by which a client that has left would be known: an interim answer, or a comment.
        await reader.readuntil(b":\n\n" if request_bytes is STREAM else b"HTTP/1.1 100 Continue\r\n\r\n")
        app.release.set()
        rest = await asyncio.wait_for(reader.read(), 10)
        if request_bytes is STREAM:
            assert b"data: 2\n\n\r\n0\r\n\r\n" in rest
        else:
            assert rest.startswith(b"HTTP/1.1 200")
            assert rest.endswith(b"\r\n\r\nbody")
        assert not app.left.is_set()
        writer.close()


@pytest.mark.parametrize("request_bytes", [POST, STREAM], ids=["whole", "stream"])
async def test_a_client_that_has_left_is_noticed_though_nothing_is_sent_to_it(request_bytes: bytes) -> None:
    app = App()
    async with serving(app) as connect:
        _, writer = await connect()
        writer.write(request_bytes)
        await app.asked.wait()
        writer.close()
        await asyncio.wait_for(app.left.wait(), 10)


async def test_a_client_that_leaves_after_it_has_ended_its_sending_is_noticed() -> None:
    app = App()
    async with serving(app) as connect:
        reader, writer = await connect()
        writer.write(POST)
        await app.asked.wait()
        writer.write_eof()
        await reader.readuntil(b"100 Continue\r\n\r\n")
        # As a process that is killed with something unread.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
        await asyncio.wait_for(app.left.wait(), 10)


async def test_a_request_that_is_not_whole_when_its_client_ends_is_none() -> None:
    app = App()
    async with serving(app) as connect:
        for part in (POST[:-1], GET, b""):
            reader, writer = await connect()
            writer.write(part)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert not app.asked.is_set()


async def test_requests_in_one_piece_are_all_answered_after_the_end_of_sending() -> None:
    app = App()
    app.release.set()
    async with serving(app) as connect:
        reader, writer = await connect()
        writer.write(POST * 3)
        writer.write_eof()
        assert (await asyncio.wait_for(reader.read(), 10)).count(b"body") == 3
        writer.close()
