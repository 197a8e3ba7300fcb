"""Whose conversation a request belongs to, and where its home may be.

A session is named by the header, else by the body, else by the response that the request goes on from. A request
without one is anonymous: it gets no resident state, only a hint about which replica may hold a prefix of it. Both are
bound to the cache_scope: the tenant, apart for each salt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers

from engine_actor.messages import session_key
from serve_app.ingress.errors import bad_value
from serve_app.ingress.header_text import header_text
from serve_app.ingress.settings import IngressSettings

_MAX_HINT_HEADER = 1024


@dataclass(frozen=True, slots=True)
class TurnIdentity:
    """`routing_key` is a hash: it finds the home, and tells neither the session's name nor its cache_scope."""

    session_id: str | None
    routing_key: str


def cache_scope_of(tenant: str, salt: str | None) -> str:
    """Whom the engines know: neither prefixes nor sessions are shared between two of these."""
    return f"{tenant}/{hashlib.sha256(salt.encode()).hexdigest()[:32]}" if salt else tenant


def identify(
    headers: Headers,
    body_session_id: str | None,
    user: str | None,
    opening: Sequence[object],
    cache_scope: str,
    settings: IngressSettings,
    chain: str | None = None,
) -> TurnIdentity:
    """`opening`: what two requests of one conversation have in common from its start, as JSON values. `chain`: the
    session of the response that this one goes on from.

    Raises ApiError for a session name that is not printable, empty or too long.
    """
    named = named_header(headers, settings.session_header)
    if named is not None:
        session_id = checked_session_id(named, settings.session_header, settings)
    elif body_session_id is not None:
        session_id = checked_session_id(body_session_id, "session_id", settings)
    elif chain is not None:
        session_id = chain
    else:
        return TurnIdentity(None, _hint(headers, user, opening, cache_scope))
    return TurnIdentity(session_id, session_key(cache_scope, session_id))


def checked_session_id(value: str, param: str, settings: IngressSettings) -> str:
    if not 0 < len(value) <= settings.max_session_id_length:
        raise bad_value(param, f"a session's id must have 1 to {settings.max_session_id_length} characters")
    if not value.isprintable():
        raise bad_value(param, "a session's id must be printable, on one line")
    return value


def named_header(headers: Headers, name: str) -> str | None:
    """The header of this name, whatever its case and with `-` or `_`."""
    spelling = name.lower().replace("_", "-").encode("latin-1")
    values = (value for key, value in headers.raw if key.lower().replace(b"_", b"-") == spelling)
    return next(map(header_text, values), None)


def _hint(headers: Headers, user: str | None, opening: Sequence[object], cache_scope: str) -> str:
    correlation = headers.get("x-correlation-id", "")
    if 0 < len(correlation) <= _MAX_HINT_HEADER:
        kind, value = "correlation", correlation
    elif user:
        kind, value = "user", user
    else:
        kind, value = "opening", json.dumps(opening)
    return hashlib.sha256(json.dumps(["hint", cache_scope, kind, value]).encode()).hexdigest()
