"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.ingress.body import json_object
from serve_app.ingress.errors import ApiError, context_length_exceeded
from serve_app.openai.desk import Desk
from serve_app.openai.document import json_body
from serve_app.openai.formats import ChatFormat
from serve_app.openai.limits import check_completing, check_generation, check_lengths
from serve_app.openai.prepared import Circumstances, Prepared, RequestPrompt, identity_of, prepared
from serve_app.openai.protocol import ChatRequest
from serve_app.openai.requests import checked_model, respond
from serve_app.openai.services import Services
from serve_app.openai.strict import parse
from serve_app.openai.unserved import refuse_unserved_chat
from serve_app.text.chat_template import Message
from serve_app.text.errors import ChatTemplateError, PromptTooLong
from serve_app.text.prompts import Prompt, PromptBuilder
from serve_app.text.token_bytes import TokenBytes


def chat_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest, "chat", services.desk, streams=True))
    async def chat_completions(request: Request) -> Response:
        return await respond(request, services, _parse, _prepare)

    return router


def _parse(desk: Desk, data: bytes) -> ChatRequest:
    content = json_object(data)
    refuse_unserved_chat(content, thinks=desk.prompts.thinks)
    check_lengths(content, desk.settings)
    body = parse(ChatRequest, content)
    checked_model(body.model, desk.settings)
    check_generation(body, desk.settings, desk.vocab_size)
    check_completing(body, desk.settings)
    return body


def _prepare(desk: Desk, body: ChatRequest, circumstances: Circumstances) -> Prepared:
    model = checked_model(body.model, desk.settings)
    messages = [message.as_message() for message in body.messages]
    tools = [function.described() for function in body.functions]
    prompt = chat_prompt(desk.prompts, messages, "messages", circumstances.limit, tools)
    part = RequestPrompt(prompt, "messages", conversation_opening(messages))
    identity = identity_of(desk, body, circumstances, [model, *part.opening])
    writes = partial(_format, model, body.choices, body.include_usage, bool(body.logprobs))
    return prepared(desk, body, circumstances, [(part, identity)], writes)


def _format(model: str, choices: int, include_usage: bool, logprobs: bool, spelling: TokenBytes) -> ChatFormat:
    return ChatFormat(model, choices, include_usage, spelling if logprobs else None)


def chat_prompt(
    prompts: PromptBuilder,
    messages: Sequence[Message],
    param: str,
    limit: int | None,
    tools: Sequence[Mapping[str, object]] = (),
    *,
    length_param: str | None = None,
) -> Prompt:
    """Raises ApiError that blames `param` where the template refuses the messages, or they are longer than `limit`
    tokens by far, for which `length_param` can be the field to blame."""
    try:
        return prompts.chat(messages, tools, limit=limit)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param=param, code="chat_template_error") from error
    except PromptTooLong as error:
        raise context_length_exceeded(error.at_least, error.limit, length_param or param, at_least=True) from error


def conversation_opening(messages: Sequence[Message]) -> list[object]:
    """The messages up to the user's first one: they stay the same as a conversation grows."""
    opening: list[object] = []
    for message in messages:
        opening.append([message["role"], message["content"]])
        if message["role"] == "user":
            break
    return opening
