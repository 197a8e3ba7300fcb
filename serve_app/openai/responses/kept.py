"""The events of a response that the server keeps: it can be cancelled while it runs and is stored before its client
hears that it is complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import cast

from serve_app.interruption import Cancellation
from serve_app.openai.choices import Piece, joined
from serve_app.openai.responses.conversation import answer_of
from serve_app.openai.responses.format import ResponseFormat, as_json, kept_items
from serve_app.openai.responses.output import IN_PROGRESS
from serve_app.openai.responses.store import KeptMessage, ResponseStore, StoredResponse
from serve_app.openai.services import Services
from serve_app.openai.turn_request import PreparedTurn
from serve_app.openai.turns import CANCELLED, AnswerEvent, Finished, answer_events

log = logging.getLogger("moorage.http")


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is known of a stored response before it has an answer."""

    tenant: str
    session_id: str
    messages: tuple[KeptMessage, ...]


async def kept_events(
    services: Services, turn: PreparedTurn, form: ResponseFormat, keeping: Keeping
) -> AsyncGenerator[AnswerEvent, None]:
    """As `answer_events`; Finished comes only when the store has the response, so it can be gone on from at once."""
    record = StoredResponse(
        id=form.id,
        tenant=keeping.tenant,
        previous=form.body.previous_response_id,
        session_id=keeping.session_id,
        messages=keeping.messages,
        answer=answer_of(Piece(0, "")),
        shown=as_json(form.unfinished(IN_PROGRESS)),
    )
    cancellation = Cancellation()
    pieces: list[Piece] = []
    async with aclosing(answer_events(services, turn, cancellation)) as events:
        accepted = await anext(events)
        cancelled = as_json(form.unfinished(CANCELLED))
        async with _held(services.store, record, cancelled, cancellation):
            yield accepted
            async for event in events:
                if isinstance(event, Piece):
                    pieces.append(event)
                elif isinstance(event, Finished):
                    answers = joined(pieces, 1)
                    whole = form.whole(answers, event)
                    shown = as_json(whole)
                    stored = replace(record, answer=answer_of(answers[0]), shown=shown, items=kept_items(shown, whole))
                    await services.store.put(stored)
                yield event


@asynccontextmanager
async def _held(
    store: ResponseStore, record: StoredResponse, cancelled: str, cancellation: Cancellation
) -> AsyncIterator[None]:
    """Within the block others find the response in progress and can ask for its end."""
    held = cast(AsyncGenerator[bool, None], store.hold(record, cancelled))
    async with aclosing(held):
        await anext(held)
        watching = asyncio.create_task(_watch(held, cancellation))
        try:
            yield
        finally:
            watching.cancel()
            # `held` can be closed only when nobody waits for it.
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(held: AsyncGenerator[bool, None], cancellation: Cancellation) -> None:
    try:
        if await anext(held, False):
            cancellation.request()
    except Exception:
        # The store's process is gone. The answer goes on; it only can't be cancelled any more.
        log.warning("a response in progress can't be cancelled any more", exc_info=True)
