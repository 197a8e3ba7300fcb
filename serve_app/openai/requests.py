"""What the generating routes do alike, from body to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from serve_app.ingress.body import read_json_object
from serve_app.ingress.errors import bad_value, model_not_found
from serve_app.ingress.request_log import RequestRecord, record_of
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.answer import TurnResponse
from serve_app.openai.formats import AnswerFormat
from serve_app.openai.identity import TurnIdentity, engine_owner, identify
from serve_app.openai.limits import check_completing, check_generation
from serve_app.openai.merge import merged_events
from serve_app.openai.protocol import CompletingRequest, GenerationRequest
from serve_app.openai.services import Services
from serve_app.openai.structured import check_guidance
from serve_app.openai.turns import Turn, answer_events, make_turn, sampling_of
from serve_app.text.prompts import Prompt

# Larger bodies are rendered and tokenized in a thread, so that they can't hold up everyone's streams.
_INLINE_BYTES = 16 * 1024
_GRAMMAR_CHECKS = ThreadPoolExecutor(1, "grammar-checks")

B = TypeVar("B", bound=CompletingRequest)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a request. `param` is the field to blame, `opening` what a conversation starts with."""

    prompt: Prompt
    param: str
    opening: Sequence[object]


async def respond(
    request: Request,
    services: Services,
    *,
    check: Callable[[dict[str, object]], B],
    build: Callable[[B], list[Asked]],
    form: Callable[[B, str], AnswerFormat],
) -> Response:
    """`check` refuses or parses the body, `build` makes its prompts, `form` writes the answer, given the model's name
    too. Each prompt is a turn of its own."""
    settings = services.settings
    record = record_of(request.scope)
    services.slots.check(record.owner)
    content, size = await read_json_object(request, settings.max_body_bytes)
    body = check(content)
    model = checked_model(body.model, settings)
    check_generation(body, settings, services.prompts.tokenizer.vocab_size)
    check_completing(body, settings)
    await check_grammar_of(body, settings)
    asked = await off_loop_if_large(size, lambda: build(body))
    limit = await services.context_limit()

    def turn_of(one: Asked) -> Turn:
        identity = identity_of(request, body, record, settings, [model, *one.opening])
        if len(asked) > 1 and identity.session_id is not None:
            raise bad_value("prompt", "only one prompt can go on from a session, so send one, or name no session")
        return make_turn(
            body,
            one.prompt,
            identity,
            sampling_of(body, settings),
            request_id=record.request_id,
            tenant=record.owner,
            prompt_param=one.param,
            settings=settings,
            limit=limit,
        )

    answers = [answer_events(services, turn) for turn in map(turn_of, asked)]
    events = answers[0] if len(answers) == 1 else merged_events(answers, body.choices)
    return TurnResponse(events, form(body, model), stream=bool(body.stream))


async def check_grammar_of(body: GenerationRequest, settings: IngressSettings) -> None:
    """Reading a grammar can take longer than a step of everyone's streams, and many of them longer than large prompts
    should wait for a thread."""
    grammars = body.grammars
    if not grammars:
        return
    for name, value in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if value:
            raise bad_value(name, "the answer's grammar says when it may end, so leave this out")
    loop, most_bytes = asyncio.get_running_loop(), settings.max_grammar_bytes
    for param, grammar in grammars:
        await loop.run_in_executor(_GRAMMAR_CHECKS, check_guidance, param, grammar, most_bytes)


async def off_loop_if_large(size: int, work: Callable[[], T]) -> T:
    """`size`: bytes of text that the work goes through."""
    return await asyncio.to_thread(work) if size > _INLINE_BYTES else work()


def identity_of(
    request: Request,
    body: GenerationRequest,
    record: RequestRecord,
    settings: IngressSettings,
    opening: Sequence[object],
    chain: str | None = None,
) -> TurnIdentity:
    """See `identify`. The record gets the session's hash."""
    owner = engine_owner(record.owner, body.cache_salt)
    identity = identify(request.headers, body.session_id, body.user, opening, owner, settings, chain)
    if identity.session_id is not None:
        record.session = identity.routing_key[:12]
    return identity


def checked_model(named: str | None, settings: IngressSettings) -> str:
    model = settings.default_model if named is None else named
    if model not in settings.model_ids:
        raise model_not_found(model)
    return model
