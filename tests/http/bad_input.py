"""Values that no field takes, and what a refusal looks like."""

from __future__ import annotations

import json
from typing import Any

from tests.http.http_harness import Server, error_of

NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**400


def values(*of_any_type: Any) -> tuple[Any, ...]:
    """Values that share no type, for one field."""
    return of_any_type


def dump(content: Any) -> bytes:
    """As a client in Python would send it: NaN and Infinity bare, lone surrogates escaped."""
    return json.dumps(content).encode()


def assert_refused(server: Server, path: str, content: Any, param: str | None) -> None:
    response = server.client.post(path, content=dump(content))
    assert response.status_code == 400, response.text[:300]
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param is None or param in error["message"]
    assert "should" not in error["message"]  # the words of a library
    assert len(response.content) < 4000
    assert server.engine.requests == []
    assert server.chat().status_code == 200


def label(value: Any) -> str:
    return repr(value)[:40].encode("ascii", "backslashreplace").decode()
