"""Several prompts in one request to /v1/completions: each is answered as if it had been sent alone."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from engine_actor.messages import RefusalCode, TurnRefused
from tests.http.http_harness import COMPLETIONS, MODEL, Server, StartServer, error_of, events, open_request, wait_until

PROMPTS: list[Any] = ["One", [16175, 2114], "Three 中"]


@pytest.fixture
def speaking(server: Server) -> Server:
    """Says the text that belongs to the prompt, so that an answer in a wrong place is seen."""
    encode = server.prompts.tokenizer.encode
    texts = {
        tuple(prompt) if isinstance(prompt, list) else tuple(encode(prompt, special_tokens=True)): text
        for prompt, text in zip(PROMPTS, ["first 😀", "second", "third answer"], strict=True)
    }
    server.engine.reply_to = lambda ids: encode(texts[ids], special_tokens=False)
    return server


def texts_of(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def streamed(chunks: list[Any], count: int) -> list[str]:
    texts = [""] * count
    for choice in (choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    return texts


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 1}, {"n": 2}, {"echo": True}, {"logprobs": 1}, {"stop": "answer"}]
)
def test_answers_come_in_the_order_of_prompts_streamed_or_not(speaking: Server, fields: dict[str, Any]) -> None:
    alone = [speaking.complete(prompt, **fields).json() for prompt in PROMPTS]
    expected = [text for answer in alone for text in texts_of(answer)]
    together = speaking.complete(PROMPTS, **fields).json()
    assert texts_of(together) == expected
    for key in ("finish_reason", "logprobs"):
        assert [c[key] for c in together["choices"]] == [c[key] for answer in alone for c in answer["choices"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)
    counted: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(speaking.complete(PROMPTS, **fields, **counted))
    assert streamed(chunks, len(expected)) == expected
    assert chunks[-2]["usage"] == together["usage"] and chunks[-1] == "[DONE]"
    assert sum(bool(c["finish_reason"]) for chunk in chunks[:-1] for c in chunk["choices"]) == len(expected)


def test_a_stream_has_all_answers_mixed(speaking: Server) -> None:
    chunks = events(speaking.complete(PROMPTS, stream=True))
    ends = [chunk["choices"][0]["index"] for chunk in chunks[:-1] if chunk["choices"][0]["finish_reason"]]
    first = [[chunk["choices"][0]["index"] for chunk in chunks[:-1]].index(i) for i in range(3)]
    assert sorted(ends) == [0, 1, 2]
    assert max(first) < len(chunks) - 4  # all have begun before the first ends


def test_prompts_have_their_own_seeds_and_homes_unless_one_is_given(server: Server) -> None:
    assert server.complete(["same", "same", "other"]).status_code == 200
    requests, homes = server.engine.requests, server.engine.routing_keys
    assert len({request.sampling.seed for request in requests}) == 3
    assert len(set(homes)) == 2
    server.engine.reset()
    assert server.complete(["a", "b"], seed=5, user="Ann").status_code == 200
    assert {request.sampling.seed for request in server.engine.requests} == {5}
    assert len(set(server.engine.routing_keys)) == 1


@pytest.mark.parametrize("headers", [{"x-session-id": "s"}, None])
def test_a_session_takes_one_prompt_alone(server: Server, headers: dict[str, str] | None) -> None:
    named = {} if headers else {"session_id": "s"}
    refused = server.complete(["a", "b"], headers=headers, **named)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "prompt")
    assert "session" in error_of(refused)["message"] and server.engine.requests == []
    assert server.complete(["a"], headers=headers, **named).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_no_replica_takes_refuses_all(server: Server, stream: bool) -> None:
    engine, ids = server.engine, server.prompts.tokenizer.encode("second", special_tokens=True)
    for code, status, param in [
        (RefusalCode.CONTEXT_LENGTH, 400, "prompt.1"), (RefusalCode.QUEUE_FULL, 429, None),
        (RefusalCode.UNAVAILABLE, 503, None),
    ]:  # fmt: skip
        engine.refusal_of = lambda asked, code=code: TurnRefused(code, "no", 600, 512) if asked == tuple(ids) else None
        refused = server.complete(["first", "second", "third"], stream=stream)
        assert (refused.status_code, error_of(refused)["param"]) == (status, param)
        assert (engine.running, engine.tokens_sent) == (0, 0)
    engine.refusal_of = None
    assert server.complete(["first", "second"]).status_code == 200


def test_an_answer_that_fails_ends_all(speaking: Server) -> None:
    speaking.engine.failed = "it broke"
    response = speaking.complete(PROMPTS)
    assert (response.status_code, error_of(response)["code"]) == (500, "engine_failed")
    assert "it broke" in events(speaking.complete(PROMPTS, stream=True))[-1]["error"]["message"]
    assert speaking.engine.running == 0


@pytest.mark.parametrize("error", [RuntimeError("scripted"), asyncio.CancelledError()])
@pytest.mark.parametrize("moment", [0, 2])
def test_whatever_an_engine_raises_ends_all(server: Server, moment: int, error: BaseException) -> None:
    server.engine.error, server.engine.fail_at = error, moment
    assert server.complete(["a", "b", "c"]).status_code == 500
    assert (server.engine.running, server.engine.closed) == (0, 3)
    server.engine.fail_at = None
    assert server.complete(["a", "b"]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", [0, 1, 3], ids=["before acceptance", "before the first token", "after two tokens"])
def test_a_client_that_leaves_closes_all_turns(server: Server, stream: bool, moment: int) -> None:
    engine = server.engine
    engine.hold_at = moment
    connection = open_request(server, COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": stream})
    wait_until(lambda: engine.running == 3)
    connection.close()
    wait_until(lambda: engine.closed == 3)
    assert engine.running == 0
    engine.hold_at = None
    assert server.complete(["a", "b"]).status_code == 200


def test_every_prompt_takes_a_place(start_server: StartServer) -> None:
    server = start_server(max_turns=3)
    server.engine.hold_at = 1
    connection = open_request(server, COMPLETIONS, {"prompt": ["a", "b"]})
    wait_until(lambda: server.engine.running == 2)
    busy = server.complete(["c", "d"])
    assert (busy.status_code, error_of(busy)["code"]) == (429, "server_busy")
    wait_until(lambda: server.engine.running == 2)
    too_many = server.complete(["a"] * 4)  # would not fit at any time, so it is not told to come again
    assert (too_many.status_code, error_of(too_many)["param"]) == (400, "prompt")
    connection.close()
    wait_until(lambda: server.engine.running == 0)
    server.engine.hold_at = None
    assert server.complete(["c", "d", "e"]).status_code == 200


def test_the_limit_is_a_setting(start_server: StartServer) -> None:
    server = start_server(max_prompts=2)
    assert server.complete(["a", "b"]).status_code == 200
    assert error_of(server.complete(["a", "b", "c"]))["message"] == "prompt: at most 2 prompts are allowed, not 3"


async def test_the_openai_clients(speaking: Server) -> None:
    prompts: Any = ["One", "Three 中"]
    expected = ["first 😀", "third answer"]
    with openai.OpenAI(base_url=speaking.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model=MODEL, prompt=prompts)
        assert [choice.text for choice in answer.choices] == expected
    async with openai.AsyncOpenAI(base_url=speaking.url + "/v1", api_key="none", max_retries=0) as client:
        texts = ["", ""]
        async for chunk in await client.completions.create(model=MODEL, prompt=prompts, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == expected
