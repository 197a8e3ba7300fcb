"""POST /v1/completions: a text, or token ids, to go on from; or several of them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_app.openai.document import json_body
from serve_app.openai.formats import CompletionFormat
from serve_app.openai.limits import check_token_ids
from serve_app.openai.protocol import CompletionRequest, PlainPrompt, prompt_param
from serve_app.openai.requests import Asked, respond
from serve_app.openai.services import Services
from serve_app.openai.strict import parse
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

    def ids_of(prompt: PlainPrompt, param: str) -> Prompt:
        if isinstance(prompt, str):
            return prompts.text(prompt)
        check_token_ids(prompt, prompts.tokenizer.vocab_size, param)
        return Prompt(prompt)

    def build(body: CompletionRequest) -> list[Asked]:
        names = [prompt_param(i, len(body.prompt)) for i in range(len(body.prompt))]
        return [
            Asked(ids_of(prompt, name), name, _opening(prompt)) for prompt, name in zip(body.prompt, names, strict=True)
        ]

    def form(body: CompletionRequest, model: str) -> CompletionFormat:
        spelling = None if body.logprobs is None else prompts.tokenizer.token_bytes
        texts = [_echo(prompts, prompt) if body.echo else "" for prompt in body.prompt]
        echoes = [text for text in texts for _ in range(body.choices)]
        return CompletionFormat(model, body.include_usage, spelling, echoes)

    @router.post("/v1/completions", openapi_extra=json_body(CompletionRequest, streams=True))
    async def completions(request: Request) -> Response:
        return await respond(request, services, check=check, build=build, form=form)

    return router


def _echo(prompts: PromptBuilder, prompt: PlainPrompt) -> str:
    return prompt if isinstance(prompt, str) else prompts.tokenizer.decode(prompt, control_tokens=True)


def _opening(prompt: PlainPrompt) -> list[object]:
    return [prompt[:_OPENING_CHARACTERS]] if isinstance(prompt, str) else [list(prompt[:_OPENING_TOKENS])]
