"""The envelope on every status, and what is answered when engines refuse, fail or vanish."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Any

import pytest

from engine_actor.messages import Failure, RefusalCode, TurnRefused
from tests.http.http_harness import CHAT, Server, error_of, events, named_events, streamed_text, wait_until


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("PUT", "/v1/sessions/abc", 405, "method_not_allowed"),
        ("GET", "/v1/sessions/abc", 404, "session_not_found"),
        ("GET", "/v1/responses", 405, "method_not_allowed"),
        ("POST", "/v1/responses/input_tokens", 404, "unknown_url"),
        ("POST", "/v1/responses/compact", 404, "unknown_url"),
        ("PUT", "/v1/responses/resp_1", 405, "method_not_allowed"),
        ("GET", "/v1/responses/resp_1", 404, "response_not_found"),
        ("DELETE", "/v1/responses/resp_1", 404, "response_not_found"),
        ("POST", "/v1/responses/resp_1/cancel", 404, "response_not_found"),
        ("GET", "/v1/responses/resp_1/cancel", 405, "method_not_allowed"),
        ("GET", "/v1/responses/%ff%00", 404, "response_not_found"),
        ("GET", "/v1/responses/" + "x" * 10_000, 404, "response_not_found"),
        ("GET", "/tokenize", 405, "method_not_allowed"),
        ("DELETE", "/v1/sessions/abc", 404, "session_not_found"),
        ("GET", "/%0d%0aX-Evil:%201", 404, "unknown_url"),
        ("GET", "/%ff%fe", 404, "unknown_url"),
        ("GET", "/" + "x" * 20_000, 404, "unknown_url"),
    ],
)
def test_routing_errors_have_the_envelope(server: Server, method: str, path: str, status: int, code: str) -> None:
    response = server.client.request(method, path)
    assert response.status_code == status
    error = error_of(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert response.headers["x-request-id"]
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (TurnRefused(RefusalCode.QUEUE_FULL, "full", retry_after=2.2), 429, "queue_full", "3"),
        (TurnRefused(RefusalCode.SESSION_BUSY, "busy"), 429, "session_busy", "1"),
        (TurnRefused(RefusalCode.UNAVAILABLE, "draining", retry_after=0.1), 503, "unavailable", "1"),
        (TurnRefused(RefusalCode.INVALID, "top_k must be less"), 400, None, None),
        (
            TurnRefused(RefusalCode.CONTEXT_LENGTH, "", prompt_tokens=900, limit=800),
            400,
            "context_length_exceeded",
            None,
        ),
    ],
)
def test_a_refused_turn_is_a_plain_error_streamed_or_not(
    server: Server, stream: bool, refusal: TurnRefused, status: int, code: str | None, retry_after: str | None
) -> None:
    server.engine.refusal = refusal
    response = server.chat(stream=stream)
    assert response.status_code == status
    error = error_of(response)
    assert error["code"] == code
    assert response.headers.get("retry-after") == retry_after
    if refusal.code is RefusalCode.CONTEXT_LENGTH:
        assert "900 tokens" in error["message"] and "800 tokens" in error["message"]
    else:
        assert error["message"] == refusal.message
    assert (server.engine.running, server.engine.closed) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_before_the_answer_is_a_500_that_tells_nothing(server: Server, stream: bool) -> None:
    server.engine.fail_at = 0
    response = server.chat(stream=stream)
    assert response.status_code == 500
    error = error_of(response)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "scripted" not in response.text
    assert response.headers["x-request-id"]
    server.engine.fail_at = None
    assert server.chat().status_code == 200


def test_an_engine_that_fails_is_a_500_for_a_whole_answer(server: Server) -> None:
    server.engine.failed = "out of memory"
    response = server.chat()
    assert response.status_code == 500
    assert error_of(response)["code"] == "engine_failed"
    assert "out of memory" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("failure", "status", "type"),
    [
        (Failure.SESSION_DELETED, 410, "invalid_request_error"),
        (Failure.GRAMMAR, 400, "invalid_request_error"),
        (Failure.CONTEXT_LENGTH, 400, "invalid_request_error"),
        (Failure.UNAVAILABLE, 503, "server_error"),
        (Failure.ENGINE, 500, "server_error"),
    ],
)
def test_the_end_of_an_answer_says_who_has_to_act(server: Server, failure: Failure, status: int, type: str) -> None:
    server.engine.failed, server.engine.failure = "as scripted", failure
    response = server.chat()
    assert (response.status_code, error_of(response)["type"]) == (status, type)
    assert error_of(response)["code"] == failure.value
    assert ("retry-after" in response.headers) == (status == 503)
    assert (response.headers.get("x-should-retry") == "false") == (status == 500)
    assert events(server.chat(stream=True))[-1] == response.json()
    last = named_events(server.respond("Hi", stream=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == (failure.value if status < 500 else "server_error")


@pytest.mark.parametrize("how", ["failed", "vanished", "raised"])
@pytest.mark.parametrize("send", ["chat", "complete"])
def test_a_failure_after_the_200_is_an_error_event_and_the_end(server: Server, how: str, send: str) -> None:
    if how == "failed":
        server.engine.failed = "the engine stopped"
    elif how == "vanished":
        server.engine.vanish = True
    else:
        server.engine.fail_at = 3
    response = getattr(server, send)(stream=True)
    assert response.status_code == 200
    *chunks, last = events(response)
    assert list(last) == ["error"] and last["error"]["type"] == "server_error"
    assert "[DONE]" not in chunks
    assert "scripted" not in response.text
    assert streamed_text(response).startswith("Hello there")
    assert server.engine.running == 0


@pytest.mark.parametrize("header", ["x-request-id", "x-correlation-id", "x-trace-id", "request-id", "X-Request-ID"])
def test_a_request_id_is_echoed(server: Server, header: str) -> None:
    response = server.chat(headers={header: "trace 42/a"})
    assert response.headers["x-request-id"] == "trace 42/a"
    assert server.engine.requests[-1].request_id == "trace 42/a"


def test_the_first_of_several_request_ids_wins(server: Server) -> None:
    response = server.client.get("/health", headers={"request-id": "b", "x-request-id": "a"})
    assert response.headers["x-request-id"] == "a"


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"x" * 30_000, b"caf\xe9", b"a\x09b"])
def test_an_unusable_request_id_is_replaced(server: Server, value: bytes) -> None:
    response = server.client.get("/health", headers=[(b"x-request-id", value)])
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req-")
    assert len(response.headers["x-request-id"]) == 36


def raw(server: Server, request: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        answer = b""
        with suppress(OSError):  # the server may close before it has read all
            connection.sendall(request)
        with suppress(OSError):
            while chunk := connection.recv(65536):
                answer += chunk
        return answer


@pytest.mark.parametrize(
    "header",
    [b"x-request-id: a\rb", b"x-request-id: a\x00b", b"x-session-id: a\r\n b", b"x-request-id: " + b"x" * 2**20],
    ids=["carriage return", "null byte", "folded", "a megabyte"],
)
def test_broken_headers_never_get_a_500_nor_split_the_answer(server: Server, header: bytes) -> None:
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n\r\n")
    assert not answer.startswith(b"HTTP/1.1 5")
    head = answer.partition(b"\r\n\r\n")[0]
    assert head.lower().count(b"x-request-id:") <= 1
    assert server.chat().status_code == 200


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def access_log() -> Any:
    handler, logger = Lines(), logging.getLogger("moorage.access")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_access_log_says_what_happened_but_not_what_was_said(server: Server, access_log: list[str]) -> None:
    server.say("a secret answer")
    server.chat("a secret prompt", headers={"x-session-id": "secret-session", "x-request-id": "r1"})
    # The line of another test's last request may still come.
    wait_until(lambda: [line for line in access_log if " r1 " in line])
    (line,) = [line for line in access_log if " r1 " in line]
    access_log.clear()
    prompt = len(server.engine.requests[0].prompt_ids)
    assert line.startswith(f"POST {CHAT} 200 r1 session=")
    assert f"replica=replica-1 prompt={prompt} cached=3 completion=3 " in line
    assert "secret" not in line
    server.client.delete("/v1/sessions/secret-session")
    server.client.get("/secret%0apath")
    wait_until(lambda: len(access_log) == 2)
    assert not any("secret" in line or "\n" in line for line in access_log)
    assert access_log[0].startswith("DELETE /v1/sessions/{session_id:path} 404 ")
    assert access_log[1].startswith("GET - 404 ")
