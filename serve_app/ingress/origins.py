"""Which web pages may use the server.

Without keys it is open to all that reach its port, and a browser on this machine lets any page try. Two ways in are
closed: a page whose name was made to point at this machine (its requests name that host), and one that sends across
origins what needs no leave (its requests name their origin; that bodies must be JSON by their type is `body`'s part).
With keys, what a page does not know keeps it out.

Pages of origins that the operator lists are let in, with keys and without: browsers are told so.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.ingress.errors import ApiError
from serve_app.ingress.request_log import REQUEST_ID_HEADERS

ANY = "*"
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "POST")
_READABLE = (REQUEST_ID_HEADERS[0], "x-moorage-replica", "retry-after")


class OriginMiddleware:
    def __init__(
        self, app: ASGIApp, *, has_keys: bool, allowed_hosts: Collection[str], allowed_origins: Collection[str]
    ) -> None:
        self._app = app
        self._has_keys = has_keys
        self._hosts = frozenset(allowed_hosts)
        self._origins = frozenset(allowed_origins)
        self._across = CORSMiddleware(
            app, allow_origins=allowed_origins, allow_methods=_METHODS, allow_headers=[ANY], expose_headers=_READABLE
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origins = headers.getlist("origin")
        listed = bool(origins) and all(self._is_listed(origin) for origin in origins)
        refusal = None if self._has_keys else self._refusal(headers.getlist("host"), [] if listed else origins)
        # Starlette would refuse a method that it does not know in plain text.
        method = headers.get("access-control-request-method", _METHODS[0])
        if refusal is not None:
            await refusal.response()(scope, receive, send)
        elif listed and method in _METHODS:
            await self._across(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_listed(self, origin: str) -> bool:
        return ANY in self._origins or origin.lower() in self._origins

    def _refusal(self, hosts: list[str], origins: list[str]) -> ApiError | None:
        for host in hosts:  # a client that is no browser may send none
            name = _name_of(host)
            if not _is_loopback(name) and not self._hosts & {name, ANY}:
                return ApiError(
                    403,
                    f"The host '{name[:100]}' is not served: without API keys this server answers to localhost alone. "
                    "Add the name to allowed_hosts, or set API keys.",
                    type="permission_error",
                    code="host_not_allowed",
                )
        for origin in origins:
            if origin.partition("://")[2].lower() not in {host.lower() for host in hosts}:
                return ApiError(
                    403,
                    f"Pages of '{origin[:100]}' may not use this server. Add that origin to allowed_origins to let "
                    "them in.",
                    type="permission_error",
                    code="origin_not_allowed",
                )
        return None


def _name_of(host: str) -> str:
    """Without port, and without the brackets of an IPv6 address."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):  # which no one can register
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
