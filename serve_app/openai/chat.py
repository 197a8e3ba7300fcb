"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.ingress.errors import ApiError, bad_value
from serve_app.openai.formats import ChatFormat
from serve_app.openai.protocol import ChatRequest, parse
from serve_app.openai.requests import respond
from serve_app.openai.services import Services
from serve_app.openai.unserved import refuse_unserved_chat
from serve_app.text.chat_template import Message
from serve_app.text.errors import ChatTemplateError
from serve_app.text.prompts import Prompt


def chat_router(services: Services) -> APIRouter:
    router = APIRouter()
    settings, prompts = services.settings, services.prompts

    def check(content: dict[str, object]) -> ChatRequest:
        refuse_unserved_chat(content)
        messages = content.get("messages")
        if isinstance(messages, list) and len(messages) > settings.max_messages:
            raise bad_value("messages", f"at most {settings.max_messages} messages are allowed")
        return parse(ChatRequest, content)

    def build(body: ChatRequest) -> Prompt:
        try:
            return prompts.chat(_messages(body))
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template_error") from error

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await respond(
            request,
            services,
            check=check,
            build=build,
            opening=_opening,
            form=ChatFormat,
            prompt_param="messages",
        )

    return router


def _messages(body: ChatRequest) -> list[Message]:
    """Templates know `system`; `developer` is its newer name."""
    return [Message(role="system" if m.role == "developer" else m.role, content=m.content) for m in body.messages]


def _opening(body: ChatRequest) -> list[object]:
    """The messages up to the user's first one: they stay the same as a conversation grows."""
    opening: list[object] = []
    for message in body.messages:
        opening.append([message.role, message.content])
        if message.role == "user":
            break
    return opening
