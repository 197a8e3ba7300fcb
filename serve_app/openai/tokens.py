"""POST /tokenize and /detokenize: what a text or a conversation is to the model, and back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from serve_app.ingress.body import read_json_object
from serve_app.ingress.errors import bad_value
from serve_app.openai.chat import chat_prompt
from serve_app.openai.document import json_body
from serve_app.openai.limits import check_token_ids, too_many
from serve_app.openai.protocol import ChatMessage
from serve_app.openai.requests import checked_model, off_loop_if_large
from serve_app.openai.services import Services
from serve_app.openai.strict import Strict, Text, parse
from serve_app.openai.unserved import refuse_unserved_tokenize


class TokenizeRequest(Strict):
    """A prompt, or messages: one of the two.

    add_special_tokens  those that the model expects around a plain text; a chat template writes its own, so for
                        messages only false is served
    """

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    model: Text | None = None
    tokens: list[int]


def tokens_router(services: Services) -> APIRouter:
    router = APIRouter()
    settings, prompts = services.settings, services.prompts

    def ids_of(body: TokenizeRequest) -> tuple[int, ...]:
        if body.messages is not None:
            return chat_prompt(prompts, [message.as_message() for message in body.messages], "messages").ids
        assert body.prompt is not None
        return tuple(prompts.tokenizer.encode(body.prompt, special_tokens=body.add_special_tokens is not False))

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, object]:
        content, size = await read_json_object(request, settings.max_body_bytes)
        refuse_unserved_tokenize(content)
        body = parse(TokenizeRequest, content)
        checked_model(body.model, settings)
        if (body.prompt is None) == (body.messages is None):
            raise bad_value("prompt", "is needed, or messages in its place, and not both")
        if body.messages is not None and body.add_special_tokens:
            raise bad_value("add_special_tokens", "the chat template writes its own; leave it out or false")
        if body.messages is not None and len(body.messages) > settings.max_messages:
            raise too_many("messages", len(body.messages), settings.max_messages, "messages")
        ids = await off_loop_if_large(size, lambda: ids_of(body))
        return {"count": len(ids), "max_model_len": await services.context_limit(), "tokens": ids}

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, object]:
        content, size = await read_json_object(request, settings.max_body_bytes)
        body = parse(DetokenizeRequest, content)
        checked_model(body.model, settings)
        check_token_ids(body.tokens, prompts.tokenizer.vocab_size, "tokens")
        return {
            "prompt": await off_loop_if_large(size, lambda: prompts.tokenizer.decode(body.tokens, control_tokens=True))
        }

    return router
