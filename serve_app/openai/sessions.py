"""GET /v1/sessions, GET and DELETE /v1/sessions/{id}, POST /v1/sessions/{id}/fork: the conversations that are resident
for this key."""

from __future__ import annotations

from fastapi import APIRouter, Request

from engine_actor.messages import ForkOutcome, SessionInfo
from serve_app.ingress.body import json_object, read_body
from serve_app.ingress.errors import ApiError
from serve_app.ingress.request_log import record_of
from serve_app.openai.document import json_body
from serve_app.openai.identity import cache_scope_of, checked_session_id
from serve_app.openai.services import Services
from serve_app.openai.strict import Strict, Text, parse

_MOST_FORK_BYTES = 64 * 1024  # the longest name of a session, with every character escaped


class ForkRequest(Strict):
    """`session_id`: the name of the new session."""

    session_id: Text


def sessions_router(services: Services) -> APIRouter:
    router = APIRouter()

    # A session whose turns carry a salt is found with the same one.
    def cache_scope(request: Request, cache_salt: str | None) -> str:
        return cache_scope_of(record_of(request.scope).tenant, cache_salt)

    @router.get("/v1/sessions")
    async def sessions(request: Request, cache_salt: str | None = None) -> dict[str, object]:
        found = await services.client.sessions(cache_scope(request, cache_salt))
        return {"object": "list", "data": [_shown(info) for info in found]}

    # A session's id may hold slashes.
    @router.get("/v1/sessions/{session_id:path}")
    async def session(request: Request, session_id: str, cache_salt: str | None = None) -> dict[str, object]:
        checked = checked_session_id(session_id, "session_id", services.settings)
        found = [
            info
            for info in await services.client.sessions(cache_scope(request, cache_salt))
            if info.session_id == checked
        ]
        if not found:
            raise _not_found()
        # After it has moved, what it left behind may stay for a while where it was.
        return _shown(min(found, key=lambda info: info.idle_seconds))

    @router.delete("/v1/sessions/{session_id:path}")
    async def delete(request: Request, session_id: str, cache_salt: str | None = None) -> dict[str, object]:
        checked = checked_session_id(session_id, "session_id", services.settings)
        if not await services.client.close_session(cache_scope(request, cache_salt), checked):
            raise _not_found()
        return {"id": checked, "object": "session.deleted", "deleted": True}

    @router.post("/v1/sessions/{session_id:path}/fork", openapi_extra=json_body(ForkRequest, "fork", services.desk))
    async def fork(request: Request, session_id: str, cache_salt: str | None = None) -> dict[str, object]:
        content = json_object(await read_body(request, min(services.settings.max_body_bytes, _MOST_FORK_BYTES)))
        source = checked_session_id(session_id, "session_id", services.settings)
        new = checked_session_id(parse(ForkRequest, content).session_id, "session_id", services.settings)
        match await services.client.fork_session(cache_scope(request, cache_salt), source, new):
            case ForkOutcome.UNKNOWN:
                raise _not_found()
            case ForkOutcome.RUNNING:
                message = "A turn of this session runs or waits; it can be forked when that has ended."
                raise ApiError(409, message, param="session_id", code="session_running")
            case ForkOutcome.EXISTS:
                message = "A session of the new name exists already."
                raise ApiError(409, message, param="session_id", code="session_exists")
        return {"id": new, "object": "session.forked", "forked_from": source}

    return router


def _not_found() -> ApiError:
    return ApiError(404, "No such session is resident.", param="session_id", code="session_not_found")


def _shown(info: SessionInfo) -> dict[str, object]:
    return {
        "id": info.session_id,
        "object": "session",
        "replica": info.replica,
        "tokens": info.tokens,
        "cached_tokens": info.cached_tokens,
        "blocks": info.blocks,
        "running": info.running,
        "idle_seconds": round(info.idle_seconds, 3),
    }
