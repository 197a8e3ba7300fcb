"""API keys. With keys set, every path but /health and /ready wants one, and what a client may reach belongs to its
key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.ingress.errors import ApiError
from serve_app.ingress.request_log import record_of

PUBLIC_OWNER = "public"
OPEN_PATHS = frozenset({"/health", "/ready"})
"""For whoever watches the server. They tell nothing but that it runs."""


class ApiKeys:
    """Maps a presented key to its tenant. The time it takes says nothing about the keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, presented: str) -> str | None:
        """A name for the tenant that does not tell its key; None if no key matches."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        if not any(matches):
            return None
        return "key-" + hashlib.sha256(b"moorage tenant" + digest).hexdigest()[:32]


class AuthMiddleware:
    """Refuses a request without a valid key before anything looks at it."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, presented = Headers(scope=scope).get("authorization", "").partition(" ")
        tenant = self._keys.tenant(presented.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            await _refusal().response()(scope, receive, send)
            return
        record_of(scope).tenant = tenant
        await self._app(scope, receive, send)


def _refusal() -> ApiError:
    return ApiError(
        401,
        "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
