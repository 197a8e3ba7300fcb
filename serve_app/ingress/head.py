"""HEAD is GET without its body: those who watch a server ask so."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # A copy: the server goes by its own scope when it writes the answer.
        get_scope = {**scope, "method": "GET"}
        try:
            await self._app(get_scope, receive, send_without_body)
        finally:
            if "route" in get_scope:
                scope["route"] = get_scope["route"]  # for the log
