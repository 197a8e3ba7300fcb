"""`moorage chat`: a conversation in the terminal, one session of the server."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
from rich.markup import escape

from serve_app.commands.console import console, fail, say

_CONNECT_SECONDS = 5.0


class ServerRefused(Exception):
    """The server's answer was an error; the message is the server's."""


class Chat:
    """Holds the history that is sent and the session that keeps it cached."""

    def __init__(
        self,
        url: str,
        model: str | None,
        session: str | None,
        system: str | None,
        temperature: float | None,
        max_tokens: int,
        api_key: str | None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`transport`: in the place of the network, for tests."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._session = session or _new_session()
        self._own_session = session is None  # what was here before is left as it is
        self._system = system
        self._options = {"temperature": temperature, "max_tokens": max_tokens}
        self._client = httpx.Client(
            base_url=self._url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            transport=transport,
        )
        self._history = self._opening()

    def run(self) -> int:
        """Reads and answers lines until /quit or the end of input. The exit code: 2 if `url` is none, 1 if nothing
        serves there."""
        if httpx.URL(self._url).scheme not in ("http", "https"):
            fail(f"--url {self._url} must begin with http:// or https://")
            return 2
        # A pipe has no one to prompt.
        prompt = "[bold]you>[/] " if sys.stdin.isatty() else ""
        with self._client:
            try:
                self._model = self._model or self._first_model()
            except (httpx.HTTPError, ServerRefused) as error:
                fail(
                    f"{self._url} does not serve: {error or type(error).__name__}; start `moorage serve`, or say --url"
                )
                return 1
            say(f"{self._model} at {self._url}, session {self._session}; /new begins another one, /quit leaves")
            while True:
                try:
                    line = console.input(prompt).strip()
                except (EOFError, KeyboardInterrupt):
                    if prompt:
                        console.print()
                    line = "/quit"
                if line == "/quit":
                    self._drop_session()
                    return 0
                if line == "/new":
                    self._begin_again()
                elif line.startswith("/"):
                    say("known: /new begins another conversation, /quit leaves")
                elif line:
                    self._turn(line)

    def _turn(self, line: str) -> None:
        """One question and its answer. What was answered before an interrupt stays in the history."""
        self._history.append({"role": "user", "content": line})
        answer: list[str] = []
        try:
            for piece in self._answer():
                console.print(piece, end="", markup=False, soft_wrap=True)
                answer.append(piece)
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/]", end="")
        except (httpx.HTTPError, ServerRefused) as error:
            if not answer:
                self._history.pop()
            fail(str(error) or type(error).__name__)
        console.print()
        if answer:
            self._history.append({"role": "assistant", "content": "".join(answer)})

    def _answer(self) -> Iterator[str]:
        """Pieces of the answer as they come; at the end, one line of figures."""
        body = {
            "model": self._model,
            "messages": self._history,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in self._options.items() if value is not None},
        }
        begun = time.monotonic()
        first: float | None = None
        usage: dict[str, Any] | None = None
        headers = {"x-session-id": self._session}
        with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.is_error:
                response.read()
                raise ServerRefused(_message(response))
            for line in _lines(response):
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ServerRefused(event["error"]["message"])
                usage = event.get("usage") or usage
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if piece:
                    first = first or time.monotonic()
                    yield piece
            replica = response.headers.get("x-moorage-replica", "?")
        if usage is not None:
            self._figures(usage, replica, begun, first or time.monotonic())

    def _figures(self, usage: dict[str, Any], replica: str, begun: float, first: float) -> None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        generated = usage["completion_tokens"]
        rate = f", {(generated - 1) / (time.monotonic() - first):.0f} tokens/s" if generated > 1 else ""
        text = (
            f"{usage['prompt_tokens']} prompt tokens, {cached} of them cached; first text after "
            f"{first - begun:.2f} s{rate}; replica {replica}"
        )
        console.print(f"\n[dim]{escape(text)}[/]", end="", soft_wrap=True)

    def _begin_again(self) -> None:
        self._drop_session()
        self._session, self._own_session = _new_session(), True
        self._history = self._opening()
        say(f"session {self._session}")

    def _drop_session(self) -> None:
        """The server would keep it for an hour otherwise."""
        if not self._own_session:
            return
        try:
            self._client.delete(f"/v1/sessions/{self._session}")
        except httpx.HTTPError as error:
            fail(str(error) or type(error).__name__)

    def _first_model(self) -> str:
        response = self._client.get("/v1/models")
        if response.is_error:
            raise ServerRefused(_message(response))
        return str(response.json()["data"][0]["id"])

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []


def _new_session() -> str:
    return f"chat-{uuid.uuid4().hex[:12]}"


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Without what ends them. The client library would also cut where Unicode has ends of lines, inside of texts."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
