"""A request's headers as Serve and the ingress get them, and what they ask of the proxy itself.

Serve decodes some headers as UTF-8 and answers 500 where they are not, echoes `x-request-id` whatever it is, and lets
a client choose a time limit and whether it is noticed when the client leaves. So headers are UTF-8 from here on, the id
is one that can stand in a log, and what steers Serve is taken out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlette.datastructures import Headers

from serve_app.ingress.errors import ApiError, bad_value
from serve_app.ingress.header_text import header_text
from serve_app.ingress.request_log import request_id

RawHeaders = list[tuple[bytes, bytes]]

TIMEOUT_HEADER = "x-request-timeout-seconds"
_REQUEST_ID_HEADER = b"x-request-id"
# By which a client would steer Serve's router, or turn off that Serve notices when it leaves.
_SERVE_ONLY = frozenset({b"serve-multiplexed-model-id", b"x-request-disconnect-disabled"})
_LONGEST_TIMEOUT = 1e9


@dataclass(frozen=True, slots=True)
class IncomingHeaders:
    """`headers`: for Serve and the ingress. `timeout`: seconds from now, or what is wrong with it."""

    headers: RawHeaders
    request_id: str
    timeout: float | ApiError | None


def read_headers(raw: RawHeaders) -> IncomingHeaders:
    """Names are in lower case, as ASGI has them."""
    headers: RawHeaders = []
    timeout: float | ApiError | None = None
    for name, value in raw:
        plain = name.replace(b"_", b"-")
        if plain == TIMEOUT_HEADER.encode():
            timeout = _seconds(header_text(value))
        elif plain not in _SERVE_ONLY and name != _REQUEST_ID_HEADER:
            headers.append((name, value if value.isascii() else header_text(value).encode()))
    identity = request_id(Headers(raw=raw))
    headers.append((_REQUEST_ID_HEADER, identity.encode()))
    return IncomingHeaders(headers, identity, timeout)


def _seconds(text: str) -> float | ApiError:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 < seconds <= _LONGEST_TIMEOUT:
        return seconds
    return bad_value(TIMEOUT_HEADER, f"must be a number of seconds above 0, not {text[:40]!r}")
