"""The way into Serve's proxy: what every request passes before Serve looks at it."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.cluster.proxy.exchange import RETRY_SECONDS, Exchange, not_running
from serve_app.cluster.proxy.headers import read_headers
from serve_app.cluster.proxy.limits import ProxyLimits
from serve_app.ingress.auth import OPEN_PATHS
from serve_app.ingress.errors import ApiError, retry_later, unknown_url

SERVES_HEALTH = "/-/healthz"
_SERVES_ROUTES = "/-/routes"


class Front:
    """The outermost application of the process: Serve's proxy, or with HAProxy the ingress itself, is inside."""

    def __init__(self, app: ASGIApp, limits: ProxyLimits) -> None:
        self._app = app
        self._limits = limits
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        incoming = read_headers(scope["headers"])
        # A copy: the server goes by its own scope when it writes the answer.
        inner = {**scope, "headers": incoming.headers}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] == "websocket" or path == SERVES_HEALTH:
            await self._app(inner, receive, send)
            return
        exchange = Exchange(scope, receive, send, incoming.request_id, self._limits.body_bytes)
        counted = path not in OPEN_PATHS
        if isinstance(incoming.timeout, ApiError):
            await exchange.refuse(incoming.timeout)
        elif path == _SERVES_ROUTES:
            await exchange.refuse(unknown_url(f"{scope['method']} {path}"))
        elif not _is_served(self._app, path):
            await exchange.refuse(not_running())
        elif counted and self._open >= self._limits.requests:
            message = f"This server is answering {self._limits.requests} requests, which is all it takes at a time."
            await exchange.refuse(retry_later(429, message, "server_busy", RETRY_SECONDS))
        else:
            self._open += counted
            try:
                await exchange.run(self._app, inner, incoming.timeout)
            finally:
                self._open -= counted


def _is_served(app: ASGIApp, path: str) -> bool:
    """Serve makes requests wait for an application whose first ingress process is still starting, for as long as that
    takes. Its router is what knows; an ingress that HAProxy asks has none, and is running."""
    inner: Any = app
    while (router := getattr(inner, "proxy_router", None)) is None:
        inner = getattr(inner, "_app", None)
        if inner is None:
            return True
    matched = router.match_route(path)
    return matched is not None and matched[1].running_replicas_populated()
