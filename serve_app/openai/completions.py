"""POST /v1/completions: a text, or token ids, to go on from; or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.ingress.body import json_object
from serve_app.ingress.errors import bad_value, context_length_exceeded
from serve_app.openai.desk import Desk
from serve_app.openai.document import json_body
from serve_app.openai.formats import CompletionFormat
from serve_app.openai.limits import check_completing, check_generation, check_lengths, check_token_ids
from serve_app.openai.prepared import Circumstances, Prepared, RequestPrompt, identity_of, prepared
from serve_app.openai.protocol import CompletionRequest, PlainPrompt, prompt_param
from serve_app.openai.requests import checked_model, respond
from serve_app.openai.services import Services
from serve_app.openai.strict import parse
from serve_app.openai.unserved import refuse_unserved_completion
from serve_app.text.errors import PromptTooLong
from serve_app.text.prompts import Prompt, PromptBuilder
from serve_app.text.token_bytes import TokenBytes

# How much of a prompt is its opening: enough to tell conversations apart, and less than what one turn adds.
_OPENING_CHARACTERS, _OPENING_TOKENS = 256, 64


def completions_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions", openapi_extra=json_body(CompletionRequest, "completion", services.desk, streams=True)
    )
    async def completions(request: Request) -> Response:
        return await respond(request, services, _parse, _prepare)

    return router


def _parse(desk: Desk, data: bytes) -> CompletionRequest:
    content = json_object(data, uncounted=frozenset({"prompt"}))
    refuse_unserved_completion(content)
    check_lengths(content, desk.settings)
    body = parse(CompletionRequest, content)
    checked_model(body.model, desk.settings)
    check_generation(body, desk.settings, desk.vocab_size)
    check_completing(body, desk.settings)
    return body


def _prepare(desk: Desk, body: CompletionRequest, circumstances: Circumstances) -> Prepared:
    model = checked_model(body.model, desk.settings)
    names = [prompt_param(i, len(body.prompt)) for i in range(len(body.prompt))]
    turns = []
    for plain, name in zip(body.prompt, names, strict=True):
        part = RequestPrompt(_prompt(desk, plain, name, circumstances.limit), name, _opening(plain))
        identity = identity_of(desk, body, circumstances, [model, *part.opening])
        if len(names) > 1 and identity.session_id is not None:
            raise bad_value("prompt", "only one prompt can go on from a session, so send one, or name no session")
        turns.append((part, identity))
    texts = [_echo(desk.prompts, prompt) if body.echo else "" for prompt in body.prompt]
    echoes = [text for text in texts for _ in range(body.choices)]
    writes = partial(_format, model, body.include_usage, body.logprobs is not None, echoes)
    return prepared(desk, body, circumstances, turns, writes)


def _format(
    model: str, include_usage: bool, logprobs: bool, echoes: Sequence[str], spelling: TokenBytes
) -> CompletionFormat:
    return CompletionFormat(model, include_usage, spelling if logprobs else None, echoes)


def _prompt(desk: Desk, plain: PlainPrompt, param: str, limit: int | None) -> Prompt:
    if isinstance(plain, str):
        try:
            return desk.prompts.text(plain, limit=limit)
        except PromptTooLong as error:
            raise context_length_exceeded(error.at_least, error.limit, param, at_least=True) from error
    check_token_ids(plain, desk.vocab_size, param)
    return Prompt(plain)


def _echo(prompts: PromptBuilder, prompt: PlainPrompt) -> str:
    return prompt if isinstance(prompt, str) else prompts.tokenizer.decode(prompt, control_tokens=True)


def _opening(prompt: PlainPrompt) -> list[object]:
    return [prompt[:_OPENING_CHARACTERS]] if isinstance(prompt, str) else [list(prompt[:_OPENING_TOKENS])]
