"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.ingress.errors import ApiError
from serve_app.openai.document import json_body
from serve_app.openai.formats import ChatFormat
from serve_app.openai.limits import too_many
from serve_app.openai.protocol import ChatRequest
from serve_app.openai.requests import Asked, respond
from serve_app.openai.services import Services
from serve_app.openai.strict import parse
from serve_app.openai.unserved import refuse_unserved_chat
from serve_app.text.chat_template import Message
from serve_app.text.errors import ChatTemplateError
from serve_app.text.prompts import Prompt, PromptBuilder


def chat_router(services: Services) -> APIRouter:
    router = APIRouter()
    settings = services.settings

    def check(content: dict[str, object]) -> ChatRequest:
        refuse_unserved_chat(content)
        messages = content.get("messages")
        if isinstance(messages, list) and len(messages) > settings.max_messages:
            raise too_many("messages", len(messages), settings.max_messages, "messages")
        return parse(ChatRequest, content)

    def build(body: ChatRequest) -> list[Asked]:
        messages = [message.as_message() for message in body.messages]
        tools = [function.described() for function in body.functions]
        prompt = chat_prompt(services.prompts, messages, "messages", tools)
        return [Asked(prompt, "messages", conversation_opening(messages))]

    def form(body: ChatRequest, model: str) -> ChatFormat:
        spelling = services.prompts.tokenizer.token_bytes if body.logprobs else None
        return ChatFormat(model, body.choices, body.include_usage, spelling)

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest, streams=True))
    async def chat_completions(request: Request) -> Response:
        return await respond(request, services, check=check, build=build, form=form)

    return router


def chat_prompt(
    prompts: PromptBuilder, messages: Sequence[Message], param: str, tools: Sequence[Mapping[str, object]] = ()
) -> Prompt:
    """Raises ApiError that blames `param` where the template refuses the messages."""
    try:
        return prompts.chat(messages, tools)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param=param, code="chat_template_error") from error


def conversation_opening(messages: Sequence[Message]) -> list[object]:
    """The messages up to the user's first one: they stay the same as a conversation grows."""
    opening: list[object] = []
    for message in messages:
        opening.append([message["role"], message["content"]])
        if message["role"] == "user":
            break
    return opening
