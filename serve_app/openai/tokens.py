"""POST /tokenize and /detokenize: what a text or a conversation is to the model, and back."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from serve_app.ingress.body import json_object, read_body
from serve_app.ingress.errors import bad_value
from serve_app.openai.chat import chat_prompt
from serve_app.openai.desk import Desk
from serve_app.openai.document import json_body
from serve_app.openai.limits import check_lengths, check_token_ids
from serve_app.openai.protocol import ChatMessage
from serve_app.openai.requests import checked_model, read_here_or_aside
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
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    model: Text | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


def tokens_router(services: Services) -> APIRouter:
    router = APIRouter()
    most_bytes = services.settings.max_body_bytes

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, "tokenize", services.desk))
    async def tokenize(request: Request) -> Response:
        data, limit = await read_body(request, most_bytes), await services.context_limit()
        return _json(await read_here_or_aside(request, services, len(data), _tokenize, data, limit))

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest, "detokenize", services.desk))
    async def detokenize(request: Request) -> Response:
        data = await read_body(request, most_bytes)
        return _json(await read_here_or_aside(request, services, len(data), _detokenize, data))

    return router


def _tokenize(desk: Desk, data: bytes, limit: int | None) -> bytes:
    content = json_object(data)
    refuse_unserved_tokenize(content)
    check_lengths(content, desk.settings)
    body = parse(TokenizeRequest, content)
    checked_model(body.model, desk.settings)
    if (body.prompt is None) == (body.messages is None):
        raise bad_value("prompt", "is needed, or messages in its place, and not both")
    if body.messages is not None and body.add_special_tokens:
        raise bad_value("add_special_tokens", "the chat template writes its own; leave it out or false")
    if body.messages is not None:
        messages = [message.as_message() for message in body.messages]
        ids = list(chat_prompt(desk.prompts, messages, "messages", None).ids)
    else:
        assert body.prompt is not None
        ids = desk.prompts.tokenizer.encode(body.prompt, special_tokens=body.add_special_tokens is not False)
    return _encoded({"count": len(ids), "max_model_len": limit, "tokens": ids})


def _detokenize(desk: Desk, data: bytes) -> bytes:
    body = parse(DetokenizeRequest, json_object(data, uncounted=frozenset({"tokens"})))
    checked_model(body.model, desk.settings)
    check_token_ids(body.tokens, desk.vocab_size, "tokens")
    tokenizer, most = desk.prompts.tokenizer, desk.settings.max_body_bytes
    size = sum(len(tokenizer.token_bytes[token]) for token in body.tokens)
    if size > most:
        raise bad_value("tokens", f"may stand for at most {most} bytes of text, not {size}")
    return _encoded({"prompt": tokenizer.decode(body.tokens, control_tokens=True)})


def _encoded(content: dict[str, object]) -> bytes:
    """A million ids take as long to write as to find, so they are written where they were found."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
