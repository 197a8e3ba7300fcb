"""One request and its answer, between the client and Serve's proxy.

Serve answers some requests itself, in plain text: no application at this path, a time limit, an ingress that has died.
It cuts streams without a word. Here such an answer becomes one of ours, and such a stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.ingress.errors import SERVER_ERROR, ApiError, internal_error, retry_later, too_large
from serve_app.openai.sse import event

logger = logging.getLogger("ray.serve")

EVENTS = "moorage.events"
"""Key of the scope: what the client is being sent is a stream of events, and comments may stand between them."""

RETRY_SECONDS = 1.0
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')


def not_running() -> ApiError:
    message = "No application is running here now: it is starting or stopping."
    return retry_later(503, message, "unavailable", RETRY_SECONDS)


def too_slow() -> ApiError:
    message = "The answer was not complete within the time that the request or this server allows for it."
    return ApiError(504, message, type=SERVER_ERROR, code="deadline_exceeded")


def _lost() -> ApiError:
    message = "The process that was answering this request has ended."
    return retry_later(503, message, "unavailable", RETRY_SECONDS)


class Exchange:
    """`run` once. Its `receive` and `send` are those of the application inside."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, body_bytes: int) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._request_id = request_id
        self._body_left = body_bytes
        self._body_bytes = body_bytes
        self._cut: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._serves_own: int | None = None
        self._started = self._complete = self._events = False
        self._last = b""

    async def refuse(self, error: ApiError) -> None:
        """Answers without the application, and without reading the body."""
        response = error.response()
        response.headers["x-request-id"] = self._request_id
        await response(self._scope, self._receive, self._send)

    async def run(self, app: ASGIApp, inner: Scope, seconds: float | None) -> None:
        """`inner`: the scope that the application gets. `seconds`: until the answer must be complete."""
        limit = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._end, too_slow())
        try:
            await app(inner, self.receive, self.send)
        except Exception:
            logger.exception("request %s failed in Serve's proxy", self._request_id)
            self._end(internal_error())
        finally:
            if limit is not None:
                limit.cancel()
        await self._finish()

    async def receive(self) -> Message:
        """What the client sends; its departure as soon as the answer is cut off, so that the work for it ends."""
        arriving = asyncio.create_task(_next(self._receive))
        try:
            await asyncio.wait((arriving, self._cut), return_when=asyncio.FIRST_COMPLETED)
            if self._cut.done():
                return {"type": "http.disconnect"}
            message = arriving.result()
        finally:
            arriving.cancel()
        self._body_left -= len(message.get("body", b""))
        if self._body_left < 0:
            self._end(too_large(self._body_bytes))
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if _is_serves_own(message):
                self._serves_own = message["status"]
            elif not self._cut.done():
                self._started = True
                self._events = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
                if self._events:
                    self._scope[EVENTS] = True
        if self._serves_own is not None or self._cut.done():
            return
        if message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)
            if self._events and not (body := message.get("body", b"")).startswith(b":"):  # a comment has no number
                self._last = body
        await self._send(message)

    def _end(self, error: ApiError) -> None:
        if not self._complete and not self._cut.done():
            self._cut.set_result(error)

    async def _finish(self) -> None:
        """The application is done. A client that has left gets nothing: the server drops what is sent to it."""
        if self._complete:
            return
        error = self._cut.result() if self._cut.done() else _meaning(self._serves_own)
        if not self._started:
            await self.refuse(error)
        elif self._events:
            await self._send({"type": "http.response.body", "body": self._error_event(error), "more_body": False})
        # Else the server breaks the connection: the answer is not whole.

    def _error_event(self, error: ApiError) -> bytes:
        """The events of a response have numbers, and a form of their own for errors."""
        if not self._scope["path"].endswith("/responses"):
            return event(error.envelope())
        numbers = _SEQUENCE_NUMBER.findall(self._last)
        number = int(numbers[-1]) + 1 if numbers else 0
        content: dict[str, object] = {"code": error.code, "message": error.message, "param": error.param}
        return event({"type": "error", **content, "sequence_number": number})


async def _next(receive: Receive) -> Message:
    return await receive()


def _is_serves_own(message: Message) -> bool:
    """Serve's own errors are plain text whose length is not told; an application's server tells it."""
    headers = Headers(raw=message["headers"])
    plain = headers.get("content-type", "").startswith("text/plain")
    return message["status"] >= 400 and plain and "content-length" not in headers


def _meaning(status: int | None) -> ApiError:
    """Of what Serve answered itself; None: the application ended without an answer."""
    match status:
        case 404 | 503:
            return not_running()
        case 408:
            return too_slow()
        case 429:
            return retry_later(429, "Serve's queue is full.", "server_busy", RETRY_SECONDS)
        case None:
            return _lost()
        case _:
            return internal_error()
