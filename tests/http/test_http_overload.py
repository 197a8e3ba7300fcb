"""A full engine behind the front door: who is refused, with what, and what the others hear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.text.prompts import PromptBuilder
from tests.http.http_harness import CHAT, COMPLETIONS, MODEL, RESPONSES, app_over, error_of
from tests.support.local_engine import LocalEngine
from tests.unit.actor.stepped import Stage, staged


class Door:
    def __init__(self, stage: Stage, http: httpx.AsyncClient) -> None:
        self.stage, self.http = stage, http

    def post(self, path: str, **body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.http.post(path, json={"model": MODEL, **body}))

    def complete(self, first: int, **body: Any) -> asyncio.Task[httpx.Response]:
        return self.post(COMPLETIONS, prompt=[first, 70, 90], max_tokens=3000, temperature=0, **body)

    async def until(self, **wanted: int) -> None:
        while wanted.items() - (await self.stage.settle()).items():
            pass


@pytest.fixture
async def door(prompts: PromptBuilder) -> AsyncIterator[Door]:
    async with staged(vocab=prompts.tokenizer.vocab_size, max_batch_size=2, max_queued_turns=1) as stage:
        with app_over(LocalEngine(stage.actor), prompts) as app:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
                yield Door(stage, http)


async def test_beyond_the_queue_it_is_429_and_afterwards_it_is_as_if_nothing_had_been(door: Door) -> None:
    running = [door.complete(first) for first in (100, 101)]
    await door.until(running=2)
    waiting = door.complete(102, stream=True)
    await door.until(running=2, waiting_turns=1)
    say = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in ((COMPLETIONS, {"prompt": [103, 5]}), (CHAT, say), (RESPONSES, {"input": "Hi"})):
        for stream in (False, True):
            refused = await door.stage.during(door.post(path, stream=stream, **body))
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            error = error_of(refused)
            assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "queue_full", None)
            assert "1 turns are waiting" in error["message"]
    assert not waiting.done(), "the one that waits has no status yet"
    await door.stage.end(100, 101, 102)
    answers = [await door.stage.during(answer) for answer in (*running, waiting)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[2].text.endswith("data: [DONE]\n\n")
    after = door.complete(104)
    await door.until(running=1, waiting_turns=0)
    await door.stage.end(104)
    assert (await door.stage.during(after)).status_code == 200


async def test_a_client_that_leaves_while_it_waits_gives_its_place_to_the_next(door: Door) -> None:
    running = [door.complete(first) for first in (100, 101)]
    await door.until(running=2)
    left = door.complete(102, stream=True)
    await door.until(waiting_turns=1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await door.until(waiting_turns=0)
    waiting = door.complete(103)
    await door.until(waiting_turns=1)
    await door.stage.end(100, 101, 103)
    answers = [await door.stage.during(answer) for answer in (*running, waiting)]
    assert [answer.status_code for answer in answers] == [200] * 3


async def test_prompts_of_one_request_wait_for_each_other_and_are_refused_together(door: Door) -> None:
    door.stage.decoder.over.update(range(100, 110))
    three = await door.stage.during(door.post(COMPLETIONS, prompt=[[100, 7], [101, 7], [102, 7]]))
    assert three.status_code == 200 and len(three.json()["choices"]) == 3
    four = await door.stage.during(door.post(COMPLETIONS, prompt=[[100 + i, 7] for i in range(9)]))
    assert four.status_code == 429 and error_of(four)["code"] == "queue_full"
    await door.until(running=0, waiting_turns=0)
