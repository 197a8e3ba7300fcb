"""POST /v1/completions: a text, or token ids, to go on from."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.openai.document import json_body
from serve_app.openai.formats import CompletionFormat
from serve_app.openai.limits import check_token_ids
from serve_app.openai.protocol import CompletionRequest, parse
from serve_app.openai.requests import respond
from serve_app.openai.services import Services
from serve_app.openai.unserved import refuse_unserved_completion
from serve_app.text.prompts import Prompt, PromptBuilder

# How much of a prompt is its opening: enough to tell conversations apart, and less than what one turn adds.
_OPENING_CHARACTERS, _OPENING_TOKENS = 256, 64


def completions_router(services: Services) -> APIRouter:
    router = APIRouter()
    prompts = services.prompts

    def check(content: dict[str, object]) -> CompletionRequest:
        refuse_unserved_completion(content)
        return parse(CompletionRequest, content)

    def build(body: CompletionRequest) -> Prompt:
        if isinstance(body.prompt, str):
            return prompts.text(body.prompt)
        check_token_ids(body.prompt, prompts.tokenizer.vocab_size, "prompt")
        return Prompt(body.prompt)

    def form(body: CompletionRequest, model: str) -> CompletionFormat:
        spelling = None if body.logprobs is None else prompts.tokenizer.token_bytes
        return CompletionFormat(model, body.choices, body.include_usage, spelling, _echo(prompts, body))

    @router.post("/v1/completions", openapi_extra=json_body(CompletionRequest, streams=True))
    async def completions(request: Request) -> Response:
        return await respond(
            request,
            services,
            check=check,
            build=build,
            opening=_opening,
            form=form,
            prompt_param="prompt",
        )

    return router


def _echo(prompts: PromptBuilder, body: CompletionRequest) -> str:
    if not body.echo:
        return ""
    if isinstance(body.prompt, str):
        return body.prompt
    return prompts.tokenizer.decode(body.prompt, control_tokens=True)


def _opening(body: CompletionRequest) -> list[object]:
    if isinstance(body.prompt, str):
        return [body.prompt[:_OPENING_CHARACTERS]]
    return [list(body.prompt[:_OPENING_TOKENS])]
