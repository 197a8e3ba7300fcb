"""POST /v1/responses, and the responses that are kept: GET, DELETE, cancel."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.ingress.body import read_body
from serve_app.ingress.errors import ApiError, bad_value, not_supported, unknown_url
from serve_app.ingress.request_log import record_of
from serve_app.openai.answer import TurnResponse
from serve_app.openai.document import json_body
from serve_app.openai.prepared import Circumstances
from serve_app.openai.requests import circumstances_of, read
from serve_app.openai.responses.kept import kept_events
from serve_app.openai.responses.protocol import ResponsesRequest
from serve_app.openai.responses.reading import Kept, KeptNeeded, PreparedResponse, parse_response, prepare_response
from serve_app.openai.responses.store import FoundItems, History
from serve_app.openai.services import Services
from serve_app.openai.turns import answer_events


def responses_router(services: Services) -> APIRouter:
    router = APIRouter()
    settings = services.settings

    @router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest, "responses", services.desk, streams=True))
    async def create(request: Request) -> Response:
        record = record_of(request.scope)
        services.slots.check(record.tenant)
        data = await read_body(request, settings.max_body_bytes)
        circumstances = await circumstances_of(request, services)
        ready = await read(request, services, len(data), parse_response, data, prepare_response, circumstances, None)
        if isinstance(ready, KeptNeeded):
            kept, size = await _kept(services, ready, circumstances, len(data))
            ready = await read(request, services, size, parse_response, data, prepare_response, circumstances, kept)
            assert isinstance(ready, PreparedResponse)
        record.session = ready.session
        services.note_left_out(ready.left_out)
        form, (turn,) = ready.writes(services.spelling), ready.turns
        if ready.keeping is None:
            events = answer_events(services, turn)
        else:
            events = kept_events(services, turn, form, ready.keeping)
        return TurnResponse(events, form, stream=ready.stream)

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        for name in ("stream", "include", "starting_after"):
            if request.query_params.get(name, "false") != "false":
                raise not_supported(name)
        shown = await services.store.get(record_of(request.scope).tenant, response_id)
        if shown is None:
            raise await _not_found(services, request, response_id)
        return Response(shown.encode(), media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, object]:
        if not await services.store.delete(record_of(request.scope).tenant, response_id):
            raise await _not_found(services, request, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    # Only GET and DELETE know an id there, so what is posted is another endpoint of the API, which this server lacks.
    @router.post("/v1/responses/{name}", include_in_schema=False)
    async def unknown(request: Request, name: str) -> Response:
        raise unknown_url(f"POST {request.url.path}")

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        tenant = record_of(request.scope).tenant
        shown = await services.store.cancel(tenant, response_id)
        if shown is not None:
            return Response(shown.encode(), media_type="application/json")
        if await services.store.get(tenant, response_id) is None:
            raise await _not_found(services, request, response_id)
        raise ApiError(
            400, "This response is complete: only one in progress can be cancelled.", code="response_not_in_progress"
        )

    return router


async def _kept(services: Services, needed: KeptNeeded, circumstances: Circumstances, size: int) -> tuple[Kept, int]:
    """What a body of `size` bytes refers to, and the size of it all."""
    history, items = None, FoundItems()
    if needed.previous_response_id is not None:
        history = await _history(services, needed.previous_response_id, circumstances)
        size += history.bytes
    if needed.item_ids:
        items = await _items(services, needed, circumstances)
        size += items.bytes
    return Kept(history, items), size


async def _items(services: Services, needed: KeptNeeded, circumstances: Circumstances) -> FoundItems:
    most = services.settings.max_body_bytes
    items = await services.store.items(circumstances.tenant, needed.item_ids, most)
    if items.missing is not None:
        param = f"input.{needed.places[needed.item_ids.index(items.missing)]}.id"
        why = await _why_absent(services, circumstances.tenant, items.missing, "Its response")
        message = f"{param}: no such item is kept. {why}; send the item itself."
        raise ApiError(404, message, param=param, code="item_not_found")
    if items.bytes > most:
        message = f"the items that it refers to have {items.bytes} bytes, and at most {most} can be gone on from"
        raise bad_value("input", message, "context_length_exceeded")
    return items


async def _history(services: Services, response_id: str, circumstances: Circumstances) -> History:
    most = services.settings.max_body_bytes
    history = await services.store.history(circumstances.tenant, response_id, most)
    if history is None:
        why = await _why_absent(services, circumstances.tenant, response_id)
        message = f"previous_response_id: no such response is kept, or one that came before it is gone. {why}."
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    if history.bytes > most:
        message = f"its conversation has {history.bytes} bytes, and at most {most} can be gone on from"
        raise bad_value("previous_response_id", message, "context_length_exceeded")
    return history


async def _why_absent(services: Services, tenant: str, some_id: str, what: str = "It") -> str:
    """Of a response, or the response of an item: what is known."""
    if await services.store.lost(tenant, some_id):
        return (
            f"{what} was made before the store of responses last started, and what was stored until then was lost with "
            "its process"
        )
    return f"{what} was never stored, was deleted, made place for newer ones, or rested for too long"


async def _not_found(services: Services, request: Request, response_id: str) -> ApiError:
    why = await _why_absent(services, record_of(request.scope).tenant, response_id)
    message = f"No response with the id '{response_id[:128]}' is kept. {why}."
    return ApiError(404, message, param="response_id", code="response_not_found")
