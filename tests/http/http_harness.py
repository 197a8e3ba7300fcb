"""A real server over a scripted engine, and how tests talk to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from serve_app.api import create_app
from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.desk import Desk, side_desk
from serve_app.openai.responses.memory_store import MemoryResponseStore
from serve_app.openai.responses.store import StoreLimits
from serve_app.text.prompts import PromptBuilder
from tests.http.scripted_engine import ScriptedEngine

MODEL = "smollm2"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"


@contextmanager
def app_over(
    engine: EngineClient,
    prompts: PromptBuilder,
    model_path: Path | None = None,
    limits: StoreLimits | None = None,
    **settings: Any,
) -> Iterator[FastAPI]:
    """The app, with a side process for `model_path` that starts when a large body comes. Without a path none may."""
    chosen = IngressSettings(**{"model_ids": (MODEL,)} | settings)
    with closing(side_desk(chosen, model_path or Path("no model"))) as side:
        yield create_app(Desk(chosen, prompts), side, engine, MemoryResponseStore(limits or StoreLimits()))


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """A real server in a thread of its own, on a free port of loopback; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_keep_alive=30))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Returns as soon as the condition holds; the time only bounds how long a failing test hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


@dataclass
class Server:
    """A served app with its scripted engine, and the client calls that tests make most."""

    url: str
    engine: ScriptedEngine
    prompts: PromptBuilder
    client: httpx.Client

    def say(self, text: str) -> None:
        self.engine.reply = self.prompts.tokenizer.encode(text, special_tokens=False)

    def post(self, path: str, content: dict[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(path, json=content, **options)

    def chat(self, text: str = "Hi", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        content = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return self.post(CHAT, content, headers=headers)

    def complete(self, prompt: Any = "Once", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.post(COMPLETIONS, {"model": MODEL, "prompt": prompt, **fields}, headers=headers)

    def respond(self, given: Any = "Hi", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.post(RESPONSES, {"model": MODEL, "input": given, **fields}, headers=headers)


def connected(url: str) -> httpx.Client:
    """A client whose bodies are JSON, however a test writes them."""
    return httpx.Client(base_url=url, timeout=30, headers={"content-type": "application/json"})


StartServer = Callable[..., Server]


def open_request(
    server: Server,
    path: str,
    content: dict[str, Any],
    cut: int | None = None,
    headers: dict[str, str] | None = None,
) -> socket.socket:
    """Sends a request and leaves the answer unread. `cut`: only so many bytes of the body."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(content).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head + body[:cut])
    return connection


def events(response: httpx.Response) -> list[Any]:
    """The events of a streamed answer, parsed, after checking the framing byte for byte. [DONE] is left as text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    body = response.content.decode()
    assert body.endswith("\n\n")
    parsed: list[Any] = []
    for block in body[:-2].split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block, block
        parsed.append(block[6:] if block == "data: [DONE]" else json.loads(block[6:]))
    return parsed


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed response, parsed, after checking that each is named as its type says."""
    assert response.headers["content-type"].startswith("text/event-stream")
    body = response.content.decode()
    assert body.endswith("\n\n")
    parsed: list[dict[str, Any]] = []
    for block in body[:-2].split("\n\n"):
        name, data = block.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def streamed_text(response: httpx.Response) -> str:
    text = ""
    for event in events(response):
        if event != "[DONE]" and event.get("choices"):
            choice = event["choices"][0]
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, after checking that it is the envelope and nothing else."""
    content = response.json()
    assert list(content) == ["error"], content
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error
