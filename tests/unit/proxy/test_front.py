"""What passes Serve's proxy, with an application in the place of Serve that does what Serve does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.http_util import convert_object_to_asgi_messages
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Message, Receive, Scope, Send

from serve_app.cluster.proxy.front import Front
from serve_app.cluster.proxy.limits import CALLBACK, ProxyLimits, variable
from serve_app.ingress.header_text import header_text

App = Callable[[Scope, Receive, Send], Awaitable[None]]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"2")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


@dataclass
class Answer:
    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        content = json.loads(self.body)
        assert list(content) == ["error"]
        error: dict[str, Any] = content["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def whole(self) -> bool:
        return not self.messages[-1].get("more_body", False)


async def ask(
    front: Front,
    path: str = "/v1/completions",
    headers: list[tuple[bytes, bytes]] | None = None,
    body: list[bytes] | None = None,
    method: str = "POST",
) -> Answer:
    """The answer to a client that stays."""
    answer = Answer()
    parts = body or [b""]
    arriving = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]

    async def receive() -> Message:
        if arriving:
            return arriving.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        answer.messages.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": headers or []}
    await front(scope, receive, send)
    return answer


def ok(seen: list[Scope] | None = None) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if seen is not None:
            seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        await send({"type": "http.response.body", "body": b"{}"})

    return app


def says(status: int) -> App:
    """As Serve answers by itself."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in convert_object_to_asgi_messages("Serve's own words", status_code=status):
            await send(message)

    return app


async def until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def front(app: App, **limits: int) -> Front:
    return Front(app, ProxyLimits(**limits))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("é".encode(), "é"), (b"\xe9", "é"), (b"plain", "plain"), ("日本 \x80".encode(), "日本 \x80"),
        (b"caf\xe9 \xc3\xa9", "café Ã©"), (b"\x80\x9f", "\x80\x9f"), (b"", ""),
    ],
)  # fmt: skip
def test_the_bytes_of_a_header_are_utf8_or_else_latin1(raw: bytes, text: str) -> None:
    assert header_text(raw) == text
    assert header_text(text.encode()) == text  # what the proxy hands on means the same to the ingress


async def test_headers_are_handed_on_in_utf8_and_none_of_those_that_steer_serve() -> None:
    seen: list[Scope] = []
    given = [
        (b"x-session-id", b"caf\xe9"),
        (b"x-other", "é".encode()),
        (b"serve_multiplexed_model_id", b"caf\xe9"),
        (b"serve-multiplexed-model-id", b"m"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"x-request-timeout-seconds", b"30"),
        (b"x-request-id", b"mine"),
    ]
    assert (await ask(front(ok(seen)), headers=given)).status == 200
    expected = [(b"x-session-id", "café".encode()), (b"x-other", "é".encode()), (b"x-request-id", b"mine")]
    assert seen[0]["headers"] == expected


@pytest.mark.parametrize("given", [b"x" * 129, b"x" * 200_000, b"caf\xe9", "é".encode(), b"a\tb", b""])
async def test_a_request_id_that_no_log_should_hold_is_replaced(given: bytes) -> None:
    seen: list[Scope] = []
    await ask(front(ok(seen)), headers=[(b"x-request-id", given), (b"x-request-id", given)])
    [made] = [value for name, value in seen[0]["headers"] if name == b"x-request-id"]
    assert made.startswith(b"req-")
    assert len(made) == 36
    refused = await ask(front(says(404)), headers=[(b"x-request-id", given)])
    assert refused.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("status", "meant", "code"),
    [
        (404, 503, "unavailable"), (503, 503, "unavailable"), (408, 504, "deadline_exceeded"),
        (429, 429, "server_busy"), (500, 500, "internal_error"),
    ],
)  # fmt: skip
async def test_what_serve_says_itself_is_said_in_the_envelope(status: int, meant: int, code: str) -> None:
    answer = await ask(front(says(status)), headers=[(b"x-request-id", b"mine")])
    assert (answer.status, answer.error["code"]) == (meant, code)
    assert answer.headers["x-request-id"] == "mine"
    assert ("retry-after" in answer.headers) == (meant in (429, 503))


async def test_an_applications_own_answers_stay_as_they_are() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"mine!"})

    answer = await ask(front(app))
    assert (answer.status, answer.body) == (404, b"mine!")


async def test_an_ingress_that_dies_before_its_answer_is_503_and_one_that_fails_500() -> None:
    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        return None

    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError

    assert ((answer := await ask(front(dies))).status, answer.error["code"]) == (503, "unavailable")
    assert ((answer := await ask(front(fails))).status, answer.error["code"]) == (500, "internal_error")


async def test_a_stream_that_is_cut_ends_with_an_error_of_its_kind() -> None:
    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        part = b'event: a\ndata: {"sequence_number":6}\n\nevent: b\ndata: {"sequence_number":7}\n\n'
        await send({"type": "http.response.body", "body": part, "more_body": True})

    answer = await ask(front(dies), path="/v1/chat/completions")
    assert answer.whole
    last = json.loads(answer.body.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last["error"]["code"] == "unavailable"

    answer = await ask(front(dies), path="/v1/responses")
    name, data = answer.body.split(b"\n\n")[-2].split(b"\n")
    said = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error"
    assert (said["type"], said["code"], said["sequence_number"]) == ("error", "unavailable", 8)


async def test_an_answer_that_is_cut_and_is_no_stream_is_left_broken() -> None:
    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": JSON})

    assert len((await ask(front(dies))).messages) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_has_the_time_that_it_asks_for_and_its_work_ends_with_it(streams: bool) -> None:
    left = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if streams:
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            await send({"type": "http.response.body", "body": b": \n\n", "more_body": True})
        await until_left(receive)
        left.set()
        if streams:  # what comes too late
            await send({"type": "http.response.body", "body": b"late", "more_body": True})

    answer = await ask(front(slow), headers=[(b"x-request-timeout-seconds", b"0.01")])
    assert left.is_set()
    assert answer.whole
    if streams:
        assert json.loads(answer.body.split(b"data: ")[1])["error"]["code"] == "deadline_exceeded"
        assert b"late" not in answer.body
    else:
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("given", [b"", b"0", b"-1", b"nan", b"inf", b"soon", b"caf\xe9", b"1e10"])
async def test_a_time_limit_that_is_none_is_named(given: bytes) -> None:
    answer = await ask(front(ok()), headers=[(b"x-request-timeout-seconds", given)])
    assert (answer.status, answer.error["param"]) == (400, "x-request-timeout-seconds")


async def test_a_body_beyond_what_the_proxy_holds_is_413_and_its_work_ends() -> None:
    left = asyncio.Event()

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        await until_left(receive)
        left.set()

    answer = await ask(front(reads, body_bytes=10), body=[b"x" * 6] * 3)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert left.is_set()
    assert (await ask(front(ok(), body_bytes=10), body=[b"x" * 10])).status == 200


async def test_beyond_the_requests_it_takes_it_says_so_at_once_but_for_those_who_watch() -> None:
    release = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/health":
            await release.wait()
        await ok()(scope, receive, send)

    door = front(waits, requests=2)
    running = [asyncio.create_task(ask(door)) for _ in range(2)]
    await asyncio.sleep(0)
    refused = await ask(door)
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "server_busy", "1")
    assert (await ask(door, "/health", method="GET")).status == 200
    release.set()
    assert [(await one).status for one in running] == [200, 200]
    assert (await ask(door)).status == 200


async def test_a_request_waits_for_no_application_that_has_not_begun_to_run() -> None:
    class Handle:
        running = False

        def running_replicas_populated(self) -> bool:
            return self.running

    class Router:
        matched: tuple[str, Handle, bool] | None = None

        def match_route(self, path: str) -> tuple[str, Handle, bool] | None:
            return self.matched

    class Proxy:
        proxy_router = Router()

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await ok()(scope, receive, send)

    class Inner:  # as Serve's own middleware holds what is inside it
        def __init__(self, app: App) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, send)

    proxy, handle = Proxy(), Handle()
    door = front(Inner(proxy))
    assert (await ask(door, "/health", method="GET")).status == 503
    proxy.proxy_router.matched = ("/", handle, False)
    assert (await ask(door)).status == 503
    handle.running = True
    assert (await ask(door)).status == 200


async def test_serves_own_paths() -> None:
    assert (await ask(front(ok()), "/-/routes", method="GET")).error["code"] == "unknown_url"
    assert (await ask(front(says(503)), "/-/healthz", method="GET")).body == b"Serve's own words"


def test_limits_come_from_the_environment_by_their_names() -> None:
    assert ProxyLimits.from_environment({}) == ProxyLimits()
    limits = ProxyLimits.for_application(ingress_replicas=3, max_turns=10, max_body_bytes=2**30)
    assert (limits.requests, limits.body_bytes) == (3 * 138, 2**30)
    assert ProxyLimits.from_environment(limits.environment()) == limits
    for bad in ("", "0", "-1", "1.5", "many", "１"):
        with pytest.raises(ValueError, match="MOORAGE_PROXY_REQUESTS must be a whole number"):
            ProxyLimits.from_environment({variable("requests"): bad})


def test_the_guide_names_every_limit_and_its_default() -> None:
    guide = (Path(__file__).parents[3] / "serve_app" / "docs" / "operations.md").read_text("utf-8")
    for limit in dataclasses.fields(ProxyLimits):
        assert f"| `{variable(limit.name)}` | {limit.default}" in guide


def test_serve_finds_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn.config

    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    [middleware] = call_function_from_import_path(CALLBACK)
    assert middleware.cls is Front
    config = uvicorn.Config(ok(), http="auto")
    config.load()
    assert config.http_protocol_class.__name__ == "BoundedProtocol"
