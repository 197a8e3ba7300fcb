"""What one proxy process takes at most. It knows no application's settings: its environment says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Names to Serve what it calls in its proxy; read by every process of a Ray from the environment of its start."""
CALLBACK = "serve_app.cluster.proxy.callback.front"
PREFIX = "MOORAGE_PROXY_"
HEAD_SECONDS = 30.0
"""A request's line and headers must be complete so soon after the first byte, or after the connection was made."""
BODY_PAUSE_SECONDS = 60.0
"""A body that has begun may pause for so long."""

OTHER_REQUESTS = 128
"""Beside the turns of an ingress process: lists, token counts, and those that are about to be told that it is full."""


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Each is a whole number above 0, in the variable that is PREFIX and the field's name in capitals."""

    header_bytes: int = 64 * 1024
    """A request's line and headers together."""

    body_bytes: int = 64 * 2**20
    """A request's body. The proxy holds what the ingress has not yet taken of it."""

    connections: int = 4096
    requests: int = 512 + OTHER_REQUESTS
    """Requests that are being answered, those to /health and /ready not counted."""

    @classmethod
    def for_application(cls, ingress_replicas: int, max_turns: int, max_body_bytes: int) -> ProxyLimits:
        """Such that the ingress's own limits are reached first: it knows the request's key and says more."""
        defaults = cls()
        return cls(
            body_bytes=max(defaults.body_bytes, max_body_bytes),
            requests=ingress_replicas * (max_turns + OTHER_REQUESTS),
        )

    def environment(self) -> dict[str, str]:
        """From which `from_environment` makes the same."""
        return {variable(field.name): str(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ProxyLimits:
        """Raises ValueError, which names the variable."""
        values = {field.name: environment.get(variable(field.name)) for field in fields(cls)}
        return cls(**{name: _positive(name, text) for name, text in values.items() if text is not None})


def variable(field: str) -> str:
    """The environment variable of a field of ProxyLimits."""
    return PREFIX + field.upper()


def _positive(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable(name)} must be a whole number above 0, not {text!r}")
    return int(text)
