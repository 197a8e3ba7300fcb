"""GET /v1/sessions, GET and DELETE /v1/sessions/{id}, POST /v1/sessions/{id}/fork: the conversations that are resident
for this key."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from engine_actor.messages import DeleteOutcome, ForkOutcome, SessionInfo
from serve_app.ingress.body import json_object, read_body
from serve_app.ingress.errors import ApiError, retry_later
from serve_app.ingress.request_log import record_of
from serve_app.openai.document import json_body
from serve_app.openai.identity import cache_scope_of, checked_session_id
from serve_app.openai.services import Services
from serve_app.openai.strict import Strict, Text, parse

_MOST_FORK_BYTES = 64 * 1024  # the longest name of a session, with every character escaped
_RETRY_SECONDS = 1.0


class ForkRequest(Strict):
    """`session_id`: the name of the new session."""

    session_id: Text


class SessionItem(BaseModel):
    """A resident conversation."""

    id: str
    object: Literal["session"] = "session"
    replica: str
    tokens: int
    cached_tokens: int
    blocks: int
    running: bool
    idle_seconds: float


class SessionList(BaseModel):
    """`incomplete`: some replicas have not answered in time, and what they hold is not in the list."""

    object: Literal["list"] = "list"
    data: list[SessionItem]
    incomplete: bool
    unanswered_replicas: int


class DeletedSession(BaseModel):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


class ForkedSession(BaseModel):
    id: str
    object: Literal["session.forked"] = "session.forked"
    forked_from: str


def sessions_router(services: Services) -> APIRouter:
    router = APIRouter()

    # A session whose turns carry a salt is found with the same one.
    def cache_scope(request: Request, cache_salt: str | None) -> str:
        return cache_scope_of(record_of(request.scope).tenant, cache_salt)

    @router.get("/v1/sessions")
    async def sessions(request: Request, cache_salt: str | None = None) -> SessionList:
        resident = await services.client.sessions(cache_scope(request, cache_salt))
        shown = [_shown(info) for info in resident.sessions]
        return SessionList(data=shown, incomplete=resident.unanswered > 0, unanswered_replicas=resident.unanswered)

    # A session's id may hold slashes.
    @router.get("/v1/sessions/{session_id:path}")
    async def session(request: Request, session_id: str, cache_salt: str | None = None) -> SessionItem:
        checked = checked_session_id(session_id, "session_id", services.settings)
        resident = await services.client.sessions(cache_scope(request, cache_salt))
        info = next((info for info in resident.sessions if info.session_id == checked), None)
        if info is None:
            raise _unanswered() if resident.unanswered else _not_found()
        return _shown(info)

    @router.delete("/v1/sessions/{session_id:path}")
    async def delete(request: Request, session_id: str, cache_salt: str | None = None) -> DeletedSession:
        checked = checked_session_id(session_id, "session_id", services.settings)
        match await services.client.delete_session(cache_scope(request, cache_salt), checked):
            case DeleteOutcome.UNKNOWN:
                raise _not_found()
            case DeleteOutcome.UNANSWERED:
                raise _unanswered()
        return DeletedSession(id=checked)

    @router.post("/v1/sessions/{session_id:path}/fork", openapi_extra=json_body(ForkRequest, "fork", services.desk))
    async def fork(request: Request, session_id: str, cache_salt: str | None = None) -> ForkedSession:
        content = json_object(await read_body(request, min(services.settings.max_body_bytes, _MOST_FORK_BYTES)))
        source = checked_session_id(session_id, "session_id", services.settings)
        new = checked_session_id(parse(ForkRequest, content).session_id, "session_id", services.settings)
        match await services.client.fork_session(cache_scope(request, cache_salt), source, new):
            case ForkOutcome.UNKNOWN:
                raise _not_found()
            case ForkOutcome.UNANSWERED:
                raise _unanswered()
            case ForkOutcome.RUNNING:
                message = "A turn of this session runs or waits; it can be forked when that has ended."
                raise ApiError(409, message, param="session_id", code="session_running")
            case ForkOutcome.EXISTS:
                message = "A session of the new name exists already."
                raise ApiError(409, message, param="session_id", code="session_exists")
        return ForkedSession(id=new, forked_from=source)

    return router


def _not_found() -> ApiError:
    return ApiError(404, "No such session is resident.", param="session_id", code="session_not_found")


def _unanswered() -> ApiError:
    message = "Not all replicas have answered, and one of those may hold the session."
    return retry_later(503, message, "unavailable", _RETRY_SECONDS)


def _shown(info: SessionInfo) -> SessionItem:
    return SessionItem(
        id=info.session_id,
        replica=info.replica,
        tokens=info.tokens,
        cached_tokens=info.cached_tokens,
        blocks=info.blocks,
        running=info.running,
        idle_seconds=round(info.idle_seconds, 3),
    )
