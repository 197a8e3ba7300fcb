"""What the generating routes do alike, from body to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from serve_app.ingress.body import read_body
from serve_app.ingress.disconnect import until_disconnect
from serve_app.ingress.errors import model_not_found
from serve_app.ingress.request_log import record_of
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.answer import TurnResponse
from serve_app.openai.desk import Desk
from serve_app.openai.grammars import answer_grammar, has_grammar
from serve_app.openai.merge import merged_events
from serve_app.openai.prepared import Circumstances, Prepared
from serve_app.openai.protocol import GenerationRequest
from serve_app.openai.services import Services
from serve_app.openai.turns import answer_events

# Larger bodies are read in the side process, so that they can't hold up everyone's streams. One of this size costs a
# few milliseconds, and the worst of them, whatever is in it, some thirty.
INLINE_BYTES = 16 * 1024
_GRAMMAR_CHECKS = ThreadPoolExecutor(1, "grammar-checks")

B = TypeVar("B", bound=GenerationRequest)
T = TypeVar("T")


async def respond(
    request: Request,
    services: Services,
    parse: Callable[[Desk, bytes], B],
    prepare: Callable[[Desk, B, Circumstances], Prepared],
) -> Response:
    """`parse` refuses the body or gives what it asks for, `prepare` makes turns of that: see `desk`."""
    record = record_of(request.scope)
    services.slots.check(record.tenant)
    data = await read_body(request, services.settings.max_body_bytes)
    ready = await read(request, services, len(data), parse, data, prepare, await circumstances_of(request, services))
    record.session = ready.session
    services.note_left_out(ready.left_out)
    answers = [answer_events(services, turn) for turn in ready.turns]
    events = answers[0] if len(answers) == 1 else merged_events(answers, ready.choices)
    return TurnResponse(events, ready.writes(services.spelling), stream=ready.stream)


async def circumstances_of(request: Request, services: Services) -> Circumstances:
    record = record_of(request.scope)
    return Circumstances(record.request_id, record.tenant, request.headers, await services.context_limit())


async def read(
    request: Request,
    services: Services,
    size: int,
    parse: Callable[[Desk, bytes], B],
    data: bytes,
    prepare: Callable[..., T],
    *extra: object,
) -> T:
    """`size`: bytes of all that is to be read. Raises ApiError; ClientGone for a client that has left meanwhile."""
    if size > INLINE_BYTES:
        return await read_here_or_aside(request, services, size, _read_whole, parse, data, prepare, *extra)
    body = parse(services.desk, data)
    if has_grammar(body):
        # Reading a grammar can take longer than a step of everyone's streams. Meanwhile other threads run.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(_GRAMMAR_CHECKS, answer_grammar, body, services.settings)
    return prepare(services.desk, body, *extra)


async def read_here_or_aside(
    request: Request, services: Services, size: int, job: Callable[..., T], *extra: object
) -> T:
    """`job` for a desk and `extra`: here or, if it reads more than INLINE_BYTES, in the side process. Raises ApiError;
    ClientGone for a client that has left meanwhile."""
    if size > INLINE_BYTES:
        return await until_disconnect(request.receive, services.side.run(job, *extra, size=size))
    return job(services.desk, *extra)


def _read_whole(
    desk: Desk, parse: Callable[[Desk, bytes], B], data: bytes, prepare: Callable[..., T], *extra: object
) -> T:
    body = parse(desk, data)
    answer_grammar(body, desk.settings)  # before the prompt, which takes longer
    return prepare(desk, body, *extra)


def checked_model(named: str | None, settings: IngressSettings) -> str:
    model = settings.default_model if named is None else named
    if model not in settings.model_ids:
        raise model_not_found(model)
    return model
