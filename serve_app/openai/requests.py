"""What the two generating routes do alike, from body to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.ingress.body import read_json_object
from serve_app.ingress.errors import bad_value, model_not_found
from serve_app.ingress.request_log import CLIENT_GONE, record_of
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.answer import TurnResponse
from serve_app.openai.formats import ChatFormat, CompletionFormat
from serve_app.openai.identity import identify
from serve_app.openai.protocol import GenerationRequest, require_stream_for_options
from serve_app.openai.services import Services
from serve_app.openai.turns import make_turn
from serve_app.text.prompts import Prompt

# Larger bodies are rendered and tokenized in a thread, so that they can't hold up everyone's streams.
_INLINE_BYTES = 16 * 1024

B = TypeVar("B", bound=GenerationRequest)


async def respond(
    request: Request,
    services: Services,
    *,
    check: Callable[[dict[str, object]], B],
    build: Callable[[B], Prompt],
    opening: Callable[[B], Sequence[object]],
    form: type[ChatFormat] | type[CompletionFormat],
    prompt_param: str,
) -> Response:
    """`check` refuses or parses the body, `build` makes the prompt, `opening` is what a conversation starts
    with."""
    settings = services.settings
    try:
        content, size = await read_json_object(request, settings.max_body_bytes)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    body = check(content)
    model = _checked_model(body, settings)
    _check_stops(body, settings)
    require_stream_for_options(body)
    record = record_of(request.scope)
    identity = identify(request.headers, body.session_id, body.user, [model, *opening(body)], record.owner, settings)
    if identity.session_id is not None:
        record.session = identity.routing_key[:12]
    prompt = await asyncio.to_thread(build, body) if size > _INLINE_BYTES else build(body)
    turn = make_turn(
        body,
        prompt,
        identity,
        request_id=record.request_id,
        owner=record.owner,
        prompt_param=prompt_param,
        settings=settings,
    )
    return TurnResponse(services, turn, form(model, body.include_usage), stream=bool(body.stream))


def _checked_model(body: GenerationRequest, settings: IngressSettings) -> str:
    model = settings.default_model if body.model is None else body.model
    if model not in settings.model_ids:
        raise model_not_found(model)
    return model


def _check_stops(body: GenerationRequest, settings: IngressSettings) -> None:
    if len(body.stop) > settings.max_stop_strings:
        raise bad_value("stop", f"at most {settings.max_stop_strings} stop strings are allowed")
    if any(len(stop) > settings.max_stop_length for stop in body.stop):
        raise bad_value("stop", f"a stop string may have at most {settings.max_stop_length} characters")
