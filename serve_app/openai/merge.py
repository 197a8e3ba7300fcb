"""Several turns whose answers leave as one: the events of all of them, mixed as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from engine_actor.messages import TurnAccepted
from serve_app.openai.choices import Piece
from serve_app.openai.turns import AnswerEvent, ChoiceEnd, Finished, TokenUsage


async def merged_events(
    answers: Sequence[AsyncGenerator[AnswerEvent, None]], choices: int
) -> AsyncGenerator[AnswerEvent, None]:
    """As `answer_events`, for all of them: choice c of answer i becomes choice i * `choices` + c. One TurnAccepted says
    that all were accepted, one Finished that all have ended. The first error ends every turn and is raised."""
    # About one place for each: what a slow reader has not taken is not piled up here.
    arrived: asyncio.Queue[tuple[int, AnswerEvent | BaseException]] = asyncio.Queue(len(answers))
    all_accepted = asyncio.Event()

    async def pump(index: int, answer: AsyncGenerator[AnswerEvent, None]) -> None:
        try:
            async with aclosing(answer):
                await arrived.put((index, await anext(answer)))
                await all_accepted.wait()
                async for event in answer:
                    await arrived.put((index, event))
        except BaseException as error:
            # What ends this pump must end the answer: nobody waits for one that is gone.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            await arrived.put((index, error))

    async def next_event() -> tuple[int, AnswerEvent]:
        index, event = await arrived.get()
        if isinstance(event, BaseException):
            raise event
        return index, event

    pumps = [asyncio.create_task(pump(i, answer)) for i, answer in enumerate(answers)]
    try:
        yield _accepted([(await next_event())[1] for _ in pumps])
        all_accepted.set()
        finished: dict[int, Finished] = {}
        while len(finished) < len(pumps):
            index, event = await next_event()
            if isinstance(event, Finished):
                finished[index] = event
            elif isinstance(event, Piece | ChoiceEnd):
                yield replace(event, choice=index * choices + event.choice)
        yield _finished([finished[index] for index in range(len(pumps))])
    finally:
        for task in pumps:
            task.cancel()
        # Also when this task itself is cancelled: every turn is closed before we are gone.
        await asyncio.gather(*pumps, return_exceptions=True)


def _accepted(events: Sequence[AnswerEvent]) -> TurnAccepted:
    """The replicas of all turns, each once."""
    accepted = [event for event in events if isinstance(event, TurnAccepted)]
    assert len(accepted) == len(events), "an answer begins with TurnAccepted"
    return TurnAccepted(
        ", ".join(dict.fromkeys(event.replica for event in accepted)),
        sum(event.prompt_tokens for event in accepted),
        sum(event.cached_tokens for event in accepted),
    )


def _finished(events: Sequence[Finished]) -> Finished:
    usages = [event.usage for event in events]
    return Finished(
        tuple(reason for event in events for reason in event.reasons),
        TokenUsage(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        ),
    )
