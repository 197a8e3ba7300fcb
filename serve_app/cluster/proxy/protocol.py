"""HTTP/1.1 of a server that strangers reach: uvicorn's protocol, with bounds on what is not yet a request.

* The line and the headers of a request have a most of bytes and a time; a body may not pause for ever; there is a most
  of connections. What is refused here is an error in the envelope, too, and the connection is closed.
* A client may end its sending (shutdown of one direction) and still wait for its answer: see half_close.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serve_app.cluster.proxy.exchange import EVENTS, RETRY_SECONDS
from serve_app.cluster.proxy.half_close import Departure, can_be_noticed
from serve_app.cluster.proxy.limits import BODY_PAUSE_SECONDS, HEAD_SECONDS, ProxyLimits
from serve_app.ingress.errors import ApiError, retry_later

_LINGER_SECONDS = 2.0
# HTTP lets any number of these stand before an answer, and a client passes over them.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk with an event stream's comment."""


class BoundedProtocol(HttpToolsProtocol):
    """`limits` are set before the first connection; uvicorn makes the instances."""

    limits: ClassVar[ProxyLimits] = ProxyLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_left = self.limits.header_bytes
        self._refusal: ApiError | None = None
        self._refused = False
        self._waiting: asyncio.TimerHandle | None = None
        self._departure: Departure | None = None

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(retry_later(503, "This server has all the connections it takes.", "busy", RETRY_SECONDS))
        else:
            self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        if self._departure is not None:
            self._departure.stop()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the other direction open."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._in_head_of_another():
            return None
        if self.scheme == "https" or cycle.scope["http_version"] == "1.0" or not can_be_noticed():
            return None
        self._departure = Departure(self.transport, self.loop, self._sign())
        return True

    def _in_head_of_another(self) -> bool:
        return self._in_head and self._head_left < self.limits.header_bytes

    def _sign(self) -> bytes:
        """Bytes that may be sent now and mean nothing: a client that has left answers them with a reset."""
        if self.pipeline:  # an earlier answer is on its way, and not whole
            return b""
        cycle = self.cycle
        if not cycle.response_started:
            return _CONTINUE
        return _COMMENT if cycle.chunked_encoding and cycle.scope.get(EVENTS) else b""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._departure is not None and self.cycle.response_complete and not self.transport.is_closing():
            self.transport.close()

    # What arrives

    def data_received(self, data: bytes) -> None:
        while data and not self._refused and not self.transport.is_closing():
            now, data = (data[: self._head_left], data[self._head_left :]) if self._in_head else (data, b"")
            if self._in_head:
                self._head_left -= len(now)
                if self._waiting is None:
                    self._wait(HEAD_SECONDS)
            else:
                self._wait(BODY_PAUSE_SECONDS)
            super().data_received(now)
            if self._in_head and self._head_left <= 0:
                self._refuse(_head_too_large(self.limits.header_bytes))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._in_head, self._head_left = True, self.limits.header_bytes

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.header_bytes:  # one that came whole in a piece with the body before it
            self._refusal = _head_too_large(self.limits.header_bytes)
            raise ValueError("the head of this request is too large")
        self._in_head = False
        self._wait(BODY_PAUSE_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._wait(None)
        self._in_head, self._head_left = True, self.limits.header_bytes
        super().on_message_complete()

    # Waiting for a client

    def _wait(self, seconds: float | None) -> None:
        """For what comes next. None: for nothing."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None if seconds is None else self.loop.call_later(seconds, self._waited)

    def _waited(self) -> None:
        self._waiting = None
        if self.flow.read_paused:  # it is we who do not read
            self._wait(BODY_PAUSE_SECONDS)
        elif self._in_head and self._head_left < self.limits.header_bytes:
            self._refuse(ApiError(408, "The headers of this request did not come in time.", code="request_timeout"))
        else:
            self.transport.abort()

    # Refusing

    def send_400_response(self, msg: str) -> None:
        """uvicorn's parser can't go on."""
        self._refuse(self._refusal or ApiError(400, f"This is not HTTP/1.1: {msg}", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Says why, and closes. What still arrives is thrown away for a moment: a connection that is closed with
        something unread is reset, and the client may never see the answer."""
        self._wait(None)
        self._refused = True
        self.connections.discard(self)  # it takes nobody's place while it closes
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an earlier request's answer is not whole, and nothing may stand in it
            return
        body = json.dumps(error.envelope()).encode()
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()


def _head_too_large(limit: int) -> ApiError:
    message = f"The headers of this request are larger than {limit} bytes."
    return ApiError(431, message, code="headers_too_large")
