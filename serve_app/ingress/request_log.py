"""One record for each request: its id, its tenant, and a line in the log when it is over. Never what was
said."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.ingress.errors import CLIENT_GONE, internal_error

REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
MAX_REQUEST_ID = 128

log = logging.getLogger("moorage.access")
_LINE = (
    "%(method)s %(endpoint)s %(status)d %(request_id)s session=%(session)s replica=%(served_by)s "
    "prompt=%(prompt_tokens)s cached=%(cached_tokens)s completion=%(completion_tokens)s %(milliseconds)s ms"
)


@dataclass(slots=True)
class AccessRecord:
    """Filled as the request goes through. `session` is a hash."""

    request_id: str
    tenant: str = "public"
    status: int = 0
    session: str | None = None
    replica: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    started: float = field(default_factory=time.perf_counter)

    def count(self, cached_tokens: int, completion_tokens: int) -> None:
        """At the end of an answer; what shared prefixes have spared is not known before."""
        self.cached_tokens = cached_tokens
        self.completion_tokens = completion_tokens


def record_of(scope: Scope) -> AccessRecord:
    record = scope["state"]["record"]
    assert isinstance(record, AccessRecord)
    return record


def request_id(headers: Headers) -> str:
    """The client's own id where it is one printable line of bounded length, else a new one."""
    for name in REQUEST_ID_HEADERS:
        value = headers.get(name, "").strip()
        if 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable():
            return value
    return f"req-{uuid.uuid4().hex}"


class RequestLogMiddleware:
    """Outermost: gives each request its record, echoes its id, logs it, and answers 500 for what nobody
    caught."""

    def __init__(self, app: ASGIApp, *, answers_request_id: bool) -> None:
        self._app = app
        self._answers_request_id = answers_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = AccessRecord(request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["record"] = record
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = record.status or message["status"]
                if self._answers_request_id:
                    MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logging.getLogger("moorage.http").exception(
                "request %s failed", record.request_id, extra={"request_id": record.request_id}
            )
            if started:
                raise  # the server must break the connection: the answer is not whole
            await internal_error().response()(scope, receive, send_with_id)
        finally:
            _write(scope, record)


def _write(scope: Scope, record: AccessRecord) -> None:
    """One line, and the same as fields, for logs in JSON."""
    fields = {
        "request_id": record.request_id,
        "method": scope["method"],
        # The template of the route, not the path: a path can hold a session's id.
        "endpoint": getattr(scope.get("route"), "path", None),
        "status": record.status or CLIENT_GONE,
        "session": record.session,
        "served_by": record.replica,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "milliseconds": round((time.perf_counter() - record.started) * 1000, 1),
    }
    shown = {name: "-" if value is None else value for name, value in fields.items()}
    log.info(_LINE, shown, extra={name: value for name, value in fields.items() if value is not None})
