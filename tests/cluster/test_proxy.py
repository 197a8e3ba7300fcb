"""What Serve's proxy does before our code sees a request: real bytes to a real proxy, from before the application runs
until its ingress has died."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.cluster.app import assemble
from serve_app.commands.local_ray import APPLICATION
from serve_app.config import AppArgs
from tests.cluster.scripted import Deploy, ScriptedEngine

KEY = "key-of-the-proxys-tests"
MAX_TURNS = 8
COMPLETION = {"prompt": "a", "max_tokens": 2}
PAIR = tuple[asyncio.StreamReader, asyncio.StreamWriter]


SERVED, COME_BACK = (200, None, False), (503, "unavailable", True)


class Watch:
    """Asks again and again while something happens to the application. `seen`: (status, code of the error, whether a
    time to come back was told), or the error where there was no such answer."""

    def __init__(self, address: str) -> None:
        self._address, self._stop = address, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=asked, daemon=True) for asked in self._asked()]
        self.seen: set[object] = set()

    def _asked(self) -> list[tuple[str, str, str | None]]:
        return [("GET", "/health", None), ("POST", "/v1/completions", json.dumps(COMPLETION))]

    def _ask(self, method: str, path: str, body: str | None) -> None:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        while not self._stop.wait(0.02):
            connection = http.client.HTTPConnection(self._address, timeout=60)
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                content = json.loads(response.read())
                code = None if response.status == 200 else content["error"]["code"]
                self.seen.add((response.status, code, "retry-after" in response.headers))
            except Exception as error:
                self.seen.add(repr(error))
            finally:
                connection.close()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture(scope="module")
def address(base_url: str) -> str:
    return urlsplit(base_url).netloc


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    return {"replicas": 1, "max_turns": MAX_TURNS, "api_keys": (KEY,), "graceful_shutdown_timeout_seconds": 2.0}


@pytest.fixture(scope="module")
def start(address: str, deploy: Deploy, fields: dict[str, Any]) -> Iterator[tuple[DeploymentHandle, Watch]]:
    """The application, and what was answered while one was removed and this one started."""
    with Watch(address) as watch:
        engines = deploy(ScriptedEngine, **fields)
    yield engines, watch


@pytest.fixture
def engines(start: tuple[DeploymentHandle, Watch]) -> DeploymentHandle:
    return start[0]


def request(
    method: str = "POST",
    path: str = "/v1/completions",
    body: dict[str, Any] | None = COMPLETION,
    headers: dict[str, bytes] | None = None,
    key: str | None = KEY,
) -> bytes:
    content = b"" if method != "POST" else json.dumps(body).encode()
    known = {"host": b"localhost", "content-type": b"application/json", "content-length": str(len(content)).encode()}
    if key is not None:
        known["authorization"] = f"Bearer {key}".encode()
    lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in (known | (headers or {})).items())
    return f"{method} {path} HTTP/1.1\r\n".encode() + lines + b"\r\n" + content


async def connect(address: str) -> PAIR:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def read_answer(reader: asyncio.StreamReader, *, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Of an answer with its length, or of a stream until its last chunk."""
    lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().split("\r\n")
    status = int(lines[0].split()[1])
    if status == 100:
        return await read_answer(reader)
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    if head_only:
        return status, headers, b""
    if "content-length" in headers:
        return status, headers, await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), 60)
    body = b""
    while size := int(await asyncio.wait_for(reader.readline(), 60), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return status, headers, body


async def ask(address: str, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await connect(address)
    writer.write(raw)
    try:
        return await read_answer(reader, head_only=raw.startswith(b"HEAD"))
    finally:
        writer.close()


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """Status and code, after checking that it is the envelope."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["code"]


def process_of(name: str) -> psutil.Process:
    [found] = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and name in " ".join(process.cmdline())
    ]
    return found


async def open_turns(engines: DeploymentHandle) -> list[str]:
    [state] = await engines.broadcast("state").results_async(timeout_s=20)
    opened: list[str] = state["open"]
    return opened


async def until_open(engines: DeploymentHandle, wanted: set[str]) -> None:
    async with asyncio.timeout(30):
        while set(await open_turns(engines)) != wanted:
            await asyncio.sleep(0.01)


def test_from_the_first_moment_on_nothing_but_503_with_a_time_is_said_without_an_application(
    start: tuple[DeploymentHandle, Watch],
) -> None:
    assert start[1].seen == {COME_BACK, SERVED}


async def test_a_sessions_name_is_the_same_in_any_bytes_and_in_the_body(
    address: str, engines: DeploymentHandle
) -> None:
    for headers, body in (
        ({"x-session-id": "café À".encode()}, COMPLETION),
        ({"x-session-id": "café À".encode("latin-1")}, COMPLETION),
        ({}, COMPLETION | {"session_id": "café À"}),
    ):
        assert (await ask(address, request(body=body, headers=headers)))[0] == 200
    _, _, listed = await ask(address, request("GET", "/v1/sessions"))
    assert [item["id"] for item in json.loads(listed)["data"]] == ["café À"]


@pytest.mark.parametrize("name", [b"\x80\x9f", b"a\x7f", b"", "a\u2028b".encode(), b"y" * 257])
async def test_what_is_no_sessions_name_is_400(address: str, engines: DeploymentHandle, name: bytes) -> None:
    answer = await ask(address, request(headers={"x-session-id": name}))
    assert error_of(answer)[0] == 400


@pytest.mark.parametrize(
    "header", ["x-request-id", "serve_multiplexed_model_id", "serve-multiplexed-model-id", "x-any", "traceparent"]
)
@pytest.mark.parametrize("value", [b"caf\xe9", "é".encode(), b"\xff\xfe", b"x" * 60_000])
async def test_no_header_is_too_strange_to_be_answered(
    address: str, engines: DeploymentHandle, header: str, value: bytes
) -> None:
    status, headers, _ = await ask(address, request(headers={header: value}))
    assert status == 200
    assert len(headers["x-request-id"]) <= 128


async def test_the_head_of_a_request_is_bounded_and_costs_the_proxy_nothing(
    address: str, engines: DeploymentHandle
) -> None:
    proxy = process_of("ProxyActor")
    before = proxy.memory_info().rss
    for raw in (request(headers={"x-a": b"y" * 70_000}), request(headers={f"x-{i}": b"y" * 90 for i in range(800)})):
        assert error_of(await ask(address, raw)) == (431, "headers_too_large")
    reader, writer = await connect(address)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ")
    try:
        while not reader.at_eof():  # a header without end
            writer.write(b"y" * 2**16)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()
    assert proxy.memory_info().rss < before + 32 * 2**20
    assert (await ask(address, request("GET", "/health")))[0] == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("script", ["slow", "silent", "queued"])
async def test_a_time_limit_ends_the_turn_and_says_so(
    address: str, engines: DeploymentHandle, script: str, stream: bool
) -> None:
    headers = {"x-request-id": f"{script}-limited".encode(), "x-request-timeout-seconds": b"0.7"}
    answer = await ask(address, request(body=COMPLETION | {"stream": stream}, headers=headers))
    await until_open(engines, set())
    if stream and script != "queued":
        assert answer[0] == 200
        last = json.loads(answer[2].split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["code"] == "deadline_exceeded"
    else:
        assert error_of(answer) == (504, "deadline_exceeded")


async def test_a_time_limit_that_is_none_is_400(address: str, engines: DeploymentHandle) -> None:
    assert error_of(await ask(address, request(headers={"x-request-timeout-seconds": b"caf\xe9"})))[0] == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_ends_its_sending_gets_its_answer(
    address: str, engines: DeploymentHandle, stream: bool
) -> None:
    reader, writer = await connect(address)
    body = COMPLETION | {"stream": stream, "max_tokens": 20}
    writer.write(request(body=body, headers={"x-request-id": b"steady-half-closed"}))
    writer.write_eof()
    status, _, answer = await read_answer(reader)
    assert status == 200
    assert b'"finish_reason":"length"' in answer
    writer.close()


async def test_a_client_that_leaves_is_noticed_though_it_is_sent_nothing(
    address: str, engines: DeploymentHandle
) -> None:
    for stream in (False, True):
        _, writer = await connect(address)
        writer.write(request(body=COMPLETION | {"stream": stream}, headers={"x-request-id": b"silent-left"}))
        await until_open(engines, {"silent-left"})
        writer.close()
        await until_open(engines, set())


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/openapi.json", "/no-such-path"])
async def test_head_is_get_without_a_body(address: str, engines: DeploymentHandle, path: str) -> None:
    status, headers, _ = await ask(address, request("GET", path))
    reader, writer = await connect(address)
    writer.write(request("HEAD", path) + request("GET", "/health"))
    head_status, head_headers, _ = await read_answer(reader, head_only=True)
    assert head_status == status
    assert head_headers["content-length"] == headers["content-length"]
    assert (await read_answer(reader))[0] == 200  # it begins where the other's head ends
    writer.close()


async def test_without_a_key_only_those_who_watch_are_answered(address: str, engines: DeploymentHandle) -> None:
    for path in ("/health", "/ready", "/-/healthz"):
        for method in ("GET", "HEAD"):
            assert (await ask(address, request(method, path, key=None)))[0] == 200
    assert error_of(await ask(address, request("GET", "/-/routes", key=None))) == (404, "unknown_url")
    assert (await ask(address, request("GET", "/v1/models", key=None)))[0] == 401


async def test_a_burst_is_refused_and_the_ingress_that_works_lives(address: str, engines: DeploymentHandle) -> None:
    ingress = process_of("moorage:Ingress")
    raw = request(body=COMPLETION | {"max_tokens": 20}, headers={"x-request-id": b"steady"})
    answers = await asyncio.gather(*(ask(address, raw) for _ in range(300)))
    refused = [error_of(answer) for answer in answers if answer[0] != 200]
    assert set(refused) == {(429, "server_busy")}
    assert len(answers) - len(refused) >= MAX_TURNS
    assert all("retry-after" in headers for status, headers, _ in answers if status == 429)
    assert process_of("moorage:Ingress") == ingress
    assert (await ask(address, request()))[0] == 200


def test_while_the_ingress_is_replaced_requests_are_answered_or_told_to_come_back(
    address: str, engines: DeploymentHandle, fields: dict[str, Any], smollm2_path: str
) -> None:
    before = process_of("moorage:Ingress").pid
    args = {"model": str(smollm2_path), "served_model_name": "smollm2", **fields, "max_stop_strings": 5}
    with Watch(address) as watch:
        serve.run(assemble(AppArgs.model_validate(args), ScriptedEngine), name=APPLICATION)
    assert process_of("moorage:Ingress").pid != before
    assert SERVED in watch.seen
    assert watch.seen <= {SERVED, COME_BACK}


async def test_answers_that_an_ingress_was_giving_when_it_died_end_with_an_error(
    address: str, engines: DeploymentHandle
) -> None:
    """The last one in this module: it costs the ingress."""
    reader, writer = await connect(address)
    writer.write(request(body=COMPLETION | {"stream": True}, headers={"x-request-id": b"slow-stream"}))
    await reader.readuntil(b"data: ")
    whole = asyncio.create_task(ask(address, request(headers={"x-request-id": b"silent-whole"})))
    await until_open(engines, {"slow-stream", "silent-whole"})
    os.kill(process_of("moorage:Ingress").pid, signal.SIGKILL)
    assert error_of(await whole) == (503, "unavailable")
    rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 60)
    last = json.loads(rest.rstrip(b"0\r\n").split(b"data: ")[-1])
    assert last["error"]["code"] == "unavailable"
    writer.close()
