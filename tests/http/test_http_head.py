"""HEAD: what monitors ask."""

from __future__ import annotations

import socket

import pytest

from tests.http.http_harness import CHAT, Server


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/sessions", "/openapi.json", "/nothing", CHAT])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    asked, got = server.client.head(path), server.client.get(path)
    assert asked.status_code == got.status_code
    assert asked.content == b""
    assert asked.headers["content-length"] == str(len(got.content))
    assert asked.headers["content-type"] == got.headers["content-type"]


def test_nothing_comes_after_the_head(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")
