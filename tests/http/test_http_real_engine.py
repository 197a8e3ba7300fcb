"""Through HTTP to the demo model, in one process: prompts of every length that could be special, and conversations."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_actor.actor.actor import EngineActor
from engine_actor.decoding.load import LoadedDecoder
from engine_actor.decoding.torch_decoder import TorchDecoder
from serve_app.text.prompts import PromptBuilder
from serve_app.text.stream import AnswerText
from serve_app.text.tokenizer import Tokenizer
from tests.http.http_harness import CHAT, COMPLETIONS, RESPONSES, app_over, error_of
from tests.support.engine_view import sharing_weights
from tests.support.engines import actor_options
from tests.support.local_engine import LocalEngine
from tests.support.prose import PROSE

BLOCK = 16


def answer_text(tokenizer: Tokenizer, ids: Any) -> str:
    text = AnswerText(tokenizer)
    return text.push(ids) + text.finish()


@pytest.fixture(scope="module")
def weights(smollm2_path: Path) -> TorchDecoder:
    return TorchDecoder.load(smollm2_path, dtype="bfloat16", device="cpu")


class Door:
    """The app over one engine, and the two calls of these tests."""

    def __init__(self, http: httpx.AsyncClient, client: LocalEngine, ids: list[int]) -> None:
        self.http, self.client, self._ids = http, client, ids

    async def complete(self, length: int, **fields: Any) -> httpx.Response:
        """Three tokens after so many of the prose."""
        body = {"prompt": [self._ids[:length]], "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}
        return await self.http.post(COMPLETIONS, json=body)

    async def assert_nothing_is_left(self, sessions: int = 0) -> None:
        """But so many dormant sessions, which are then dropped."""
        actor = self.client.actor
        stats = await actor.stats()
        assert (stats["running"], stats["waiting"], stats["sessions"]) == (0, 0, sessions)
        for info in await actor.sessions():
            await actor.close_session(info.cache_scope, info.session_id)
        stats = await actor.stats()
        assert stats["requests"] == 0
        assert stats["blocks_free"] + stats["blocks_idle"] == stats["blocks_usable"]
        await actor.check_integrity()


@asynccontextmanager
async def opened(
    weights: TorchDecoder, prompts: PromptBuilder, weights_path: Path, tokens: int, **options: Any
) -> AsyncIterator[Door]:
    """`tokens`: places in the pool."""
    decoder = sharing_weights(weights)
    block_size = options.setdefault("block_size", BLOCK)
    actor = EngineActor(
        actor_options(
            "smollm2",
            kv_memory=float(tokens // block_size * decoder.manifest.paged.block_bytes(block_size)),
            max_batch_size=4,
            **options,
        ),
        "replica-1",
        partial(answer_text, prompts.tokenizer),
        lambda _options, _progress: LoadedDecoder(decoder, 2**40),
    )
    await actor.start()
    try:
        client = LocalEngine(actor)
        with app_over(client, prompts, weights_path) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
                ids = prompts.tokenizer.encode(PROSE * 20, special_tokens=False)
                yield Door(http, client, ids)
    finally:
        await actor.stop()


async def texts(door: Door, lengths: list[int]) -> list[str]:
    answers = await asyncio.gather(*map(door.complete, lengths))
    return [answer.json()["choices"][0]["text"] for answer in answers]


@pytest.mark.parametrize(
    ("places", "max_model_len", "limit"),
    [(128, 100, 100), (80, 400, 80)],
    ids=["a small context", "a pool that is smaller than the context"],
)
async def test_every_length_is_answered_or_refused_as_it_should_be(
    weights: TorchDecoder, prompts: PromptBuilder, smollm2_path: Path, places: int, max_model_len: int, limit: int
) -> None:
    fitting = [
        1,
        *(k * BLOCK + d for k in (1, limit // BLOCK - 1) for d in (-1, 0, 1)),
        limit - 3,
        limit - 2,
        limit - 1,
    ]
    async with opened(weights, prompts, smollm2_path, 256, block_size=256) as door:  # where no border is near
        expected = await texts(door, fitting)
    async with opened(weights, prompts, smollm2_path, places, max_model_len=max_model_len) as door:
        assert await texts(door, fitting[:-2]) == expected[:-2]  # computed
        assert await texts(door, fitting[:-2]) == expected[:-2]  # with what the first ones left
        for length, text in zip(fitting[-2:], expected[-2:], strict=True):
            answer = (await door.complete(length, max_tokens=10**6)).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (length, limit - length)
            assert text.startswith(answer["choices"][0]["text"])
        for length in sorted({limit, limit + 1, places, places + 1, max_model_len, max_model_len + 1, 5000}):
            # The door refuses where it knows the limit, else the engine does: with the same words.
            for door.client.says_limit, stream in itertools.product((True, False), (True, False)):
                refused = await door.complete(length, stream=stream)
                error = error_of(refused)
                assert (refused.status_code, error["code"], error["param"]) == (
                    400,
                    "context_length_exceeded",
                    "prompt",
                )
                assert f"{length} tokens" in error["message"] and f"{limit} tokens" in error["message"]
            assert await texts(door, [BLOCK]) == [expected[fitting.index(BLOCK)]]
        await door.assert_nothing_is_left()


async def test_an_answer_repeats_no_n_gram_where_the_request_forbids_it(
    weights: TorchDecoder, prompts: PromptBuilder, smollm2_path: Path
) -> None:
    async with opened(weights, prompts, smollm2_path, 256) as door:
        prompt = "one two three one two three one two three one two three"
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        repeats = {}
        for size in (0, 3):
            answer = await door.http.post(COMPLETIONS, json={**body, "no_repeat_ngram_size": size})
            words = (prompt + answer.json()["choices"][0]["text"]).split()
            triples = list(zip(words, words[1:], words[2:], strict=False))
            answered = range(len(prompt.split()) - 2, len(triples))
            repeats[size] = sum(triples[i] in triples[:i] for i in answered)
        assert repeats[0] > 5
        assert repeats[3] == 0
        await door.assert_nothing_is_left()


async def test_under_overload_each_answer_is_the_text_that_its_prompt_gets_alone(
    weights: TorchDecoder, prompts: PromptBuilder, smollm2_path: Path
) -> None:
    """Three times as many as run and wait; whoever is refused asks again."""
    lengths = [5 + 3 * i for i in range(18)]
    refusals = 0

    async def insist(door: Door, length: int) -> str:
        nonlocal refusals
        while (answer := await door.complete(length, max_tokens=8)).status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            refusals += 1
            await asyncio.sleep(0.02)
        return str(answer.json()["choices"][0]["text"])

    async with opened(weights, prompts, smollm2_path, 1024) as door:
        alone = [await insist(door, length) for length in lengths]
    assert not refusals
    async with opened(weights, prompts, smollm2_path, 1024, max_queued_turns=2) as door:
        assert await asyncio.gather(*(insist(door, length) for length in lengths)) == alone
        assert refusals
        await door.assert_nothing_is_left()
        assert (await insist(door, lengths[0])) == alone[0]


TURNS, ANSWER = 20, 4
QUESTIONS = [f"Part {turn}: {PROSE[turn * 97 : turn * 97 + 150]} What does it say?" for turn in range(TURNS)]


@dataclass
class Said:
    """One turn as its client saw it: the answer, and how many tokens its prompt had, prompt and answer together have,
    and were cached."""

    text: str
    prompt: int
    whole: int
    cached: int


async def by_history(door: Door, session: str | None) -> list[Said]:
    """The whole conversation in every request."""
    messages: list[dict[str, str]] = []
    said = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "cache_salt": f"history {session}"}
        answer = (await door.http.post(CHAT, json=body, headers={"x-session-id": session} if session else {})).json()
        usage = answer["usage"]
        text = answer["choices"][0]["message"]["content"]
        said.append(
            Said(
                text,
                usage["prompt_tokens"],
                usage["total_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
            )
        )
        messages.append({"role": "assistant", "content": text})
    return said


async def by_id(door: Door) -> list[Said]:
    """Only what is new, after the id of the response before."""
    previous = None
    said = []
    for question in QUESTIONS:
        body = {"input": question, "max_output_tokens": ANSWER, "temperature": 0, "previous_response_id": previous}
        answer = (await door.http.post(RESPONSES, json=body | {"cache_salt": "id"})).json()
        usage = answer["usage"]
        text = answer["output"][0]["content"][0]["text"]
        said.append(
            Said(text, usage["input_tokens"], usage["total_tokens"], usage["input_tokens_details"]["cached_tokens"])
        )
        previous = answer["id"]
    return said


async def test_a_long_conversation_is_the_same_in_three_ways_and_computed_once(
    weights: TorchDecoder, prompts: PromptBuilder, smollm2_path: Path
) -> None:
    """At the same time, with salts so that none finds what another one has computed."""
    async with opened(weights, prompts, smollm2_path, 6144) as door:
        ways = await asyncio.gather(by_history(door, None), by_history(door, "talk"), by_id(door))
        await door.assert_nothing_is_left(sessions=2)
    anonymous, session, chain = ways
    assert [said.text for said in anonymous] == [said.text for said in session] == [said.text for said in chain]
    for way in ways:
        added = [after.prompt - before.prompt for before, after in pairwise(way)]
        assert max(added) < 2 * min(added)  # a turn adds its own tokens, however long the history is
        history, cached = [said.whole for said in way[:-1]], [said.cached for said in way[1:]]
        # The last token of an answer has not gone through the model. Without a name full blocks alone are shared.
        lost = BLOCK if way is anonymous else 1
        assert all(before - lost <= now <= before for now, before in zip(cached, history, strict=True))
        assert sum(cached) >= 0.98 * sum(history)
