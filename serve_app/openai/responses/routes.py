"""POST /v1/responses, and the responses that are kept: GET, DELETE, cancel."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.ingress.body import read_json_object
from serve_app.ingress.errors import ApiError, bad_value, not_supported
from serve_app.ingress.request_log import record_of
from serve_app.openai.answer import TurnResponse
from serve_app.openai.chat import chat_prompt, conversation_opening
from serve_app.openai.document import json_body
from serve_app.openai.limits import check_generation
from serve_app.openai.requests import Asked, check_grammar_of, checked_model, identity_of, off_loop_if_large
from serve_app.openai.responses.conversation import as_message, check_calls, messages_of
from serve_app.openai.responses.format import ResponseFormat
from serve_app.openai.responses.kept import Keeping, kept_events
from serve_app.openai.responses.protocol import ResponsesRequest
from serve_app.openai.responses.store import History, KeptMessage
from serve_app.openai.services import Services
from serve_app.openai.strict import parse
from serve_app.openai.turns import answer_events, make_turn, sampling_of
from serve_app.openai.unserved import refuse_unserved_responses

_NO_HISTORY = History("", ())


def responses_router(services: Services) -> APIRouter:
    router = APIRouter()
    settings = services.settings

    @router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest, streams=True))
    async def create(request: Request) -> Response:
        record = record_of(request.scope)
        services.slots.check(record.owner)
        content, size = await read_json_object(request, settings.max_body_bytes)
        refuse_unserved_responses(content)
        body = parse(ResponsesRequest, content)
        model = checked_model(body.model, settings)
        check_generation(body, settings, services.prompts.tokenizer.vocab_size)
        await check_grammar_of(body, settings)
        history = await _history(services, body, record.owner)
        check_calls(history.messages, body.input)
        own = messages_of(body.input)
        # Instructions are those of this turn alone: they stand first, and earlier ones are not carried over.
        first = () if body.instructions is None else (KeptMessage("system", body.instructions),)
        said = (*first, *history.messages, *own)
        if len(said) > settings.max_messages:
            most, had = settings.max_messages, len(said)
            raise bad_value("input", f"at most {most} messages are allowed, earlier ones included, not {had}")

        def build() -> Asked:
            messages = [as_message(kept) for kept in said]
            tools = [function.described() for function in body.functions]
            prompt = chat_prompt(services.prompts, messages, "input", tools)
            return Asked(prompt, "input", conversation_opening(messages))

        asked = await off_loop_if_large(size + sum(kept.bytes for kept in history.messages), build)
        sampling = sampling_of(body, settings)
        form = ResponseFormat(body, model, sampling.temperature, sampling.top_p)
        # The first of a chain names the session of all.
        chain = history.session_id or (form.id if body.stored else None)
        identity = identity_of(request, body, record, settings, [model, *asked.opening], chain)
        turn = make_turn(
            body,
            asked.prompt,
            identity,
            sampling,
            request_id=record.request_id,
            tenant=record.owner,
            prompt_param=asked.param,
            settings=settings,
            limit=await services.context_limit(),
        )
        if body.stored:
            assert identity.session_id is not None
            events = kept_events(services, turn, form, Keeping(record.owner, identity.session_id, own))
        else:
            events = answer_events(services, turn)
        return TurnResponse(events, form, stream=bool(body.stream))

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        for name in ("stream", "include", "starting_after"):
            if request.query_params.get(name, "false") != "false":
                raise not_supported(name)
        shown = await services.store.get(record_of(request.scope).owner, response_id)
        if shown is None:
            raise _not_found(response_id)
        return Response(shown.encode(), media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, object]:
        if not await services.store.delete(record_of(request.scope).owner, response_id):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        owner = record_of(request.scope).owner
        shown = await services.store.cancel(owner, response_id)
        if shown is not None:
            return Response(shown.encode(), media_type="application/json")
        if await services.store.get(owner, response_id) is None:
            raise _not_found(response_id)
        raise ApiError(
            400, "This response is complete: only one in progress can be cancelled.", code="response_not_in_progress"
        )

    return router


async def _history(services: Services, body: ResponsesRequest, owner: str) -> History:
    if body.previous_response_id is None:
        return _NO_HISTORY
    history = await services.store.history(owner, body.previous_response_id)
    if history is None:
        message = (
            "previous_response_id: no such response is kept, or one that came before it is gone. It was never stored, "
            "was deleted, or made place for newer ones."
        )
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return history


def _not_found(response_id: str) -> ApiError:
    message = f"No response with the id '{response_id[:128]}' is kept."
    return ApiError(404, message, param="response_id", code="response_not_found")
