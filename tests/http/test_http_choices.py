"""Several answers to one prompt, and the prompt before an answer."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.http.http_harness import MODEL, Server, error_of, events
from tests.http.scripted_engine import CACHED

TEXTS = ["One 😀 two.", "A longer answer, 中文字 too, that goes on for some more tokens.", ""]


def replies(server: Server) -> list[list[int]]:
    return [server.prompts.tokenizer.encode(text, special_tokens=False) for text in TEXTS]


@pytest.fixture
def three(server: Server) -> Server:
    server.engine.replies = replies(server)
    return server


def whole(response: httpx.Response) -> list[tuple[str, str]]:
    """(text, finish_reason) of each choice."""
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [(c["text"] if "text" in c else c["message"]["content"], c["finish_reason"]) for c in choices]


def streamed(response: httpx.Response, count: int) -> list[tuple[str, str]]:
    texts, reasons = [""] * count, [""] * count
    for event in events(response)[:-1]:
        for choice in event["choices"]:
            index = choice["index"]
            assert not reasons[index], "nothing comes after the end of a choice"
            texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reasons[index] = choice["finish_reason"] or ""
    return list(zip(texts, reasons, strict=True))


@pytest.mark.parametrize("chunks", [[1], [2, 3], [100]])
@pytest.mark.parametrize("send", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, list(zip(TEXTS, ["stop"] * 3, strict=True))),
        ({"max_tokens": 3}, None),
        ({"stop": ["two", "字 t"]}, [("One 😀 ", "stop"), ("A longer answer, 中文", "stop"), ("", "stop")]),
        ({"stop": "One", "max_tokens": 4}, None),
    ],
)
def test_every_choice_has_its_own_text_and_end(
    three: Server, send: str, fields: dict[str, Any], expected: list[tuple[str, str]] | None, chunks: list[int]
) -> None:
    three.engine.chunks = chunks
    request = getattr(three, send)
    answers = whole(request(n=3, **fields))
    assert streamed(request(n=3, stream=True, **fields), 3) == answers
    assert [r.choices for r in three.engine.requests] == [3, 3]
    assert three.engine.running == 0
    if expected is not None:
        assert answers == expected
    for i, answer in enumerate(answers):  # as if it had been the only one
        three.engine.reply, three.engine.replies = replies(three)[i], None
        assert whole(request(**fields)) == [answer]


def test_every_chat_choice_begins_with_its_role(three: Server) -> None:
    chunks = events(three.chat(n=3, stream=True))
    first = [chunk["choices"][0] for chunk in chunks[:3]]
    assert [(c["index"], c["delta"]) for c in first] == [(i, {"role": "assistant", "content": ""}) for i in range(3)]


def test_usage_counts_the_prompt_once_and_all_answers(three: Server) -> None:
    usage = three.chat(n=3).json()["usage"]
    assert usage["completion_tokens"] == sum(len(reply) for reply in three.engine.replies or [])
    assert usage["prompt_tokens"] == len(three.engine.requests[-1].prompt_ids)
    last = events(three.chat(n=3, stream=True, stream_options={"include_usage": True}))[-2]
    assert last["choices"] == [] and last["usage"] == usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_cached_part_of_the_prompt_is_what_the_first_choice_found(three: Server, last: int, stream: bool) -> None:
    """Whichever choice ends last. The others share the prompt that the first one computed."""
    replies = three.engine.replies or []
    three.engine.replies = [reply * (3 if choice == last else 1) for choice, reply in enumerate([replies[1]] * 3)]
    if stream:
        usage = events(three.chat(n=3, stream=True, stream_options={"include_usage": True}))[-2]["usage"]
    else:
        usage = three.chat(n=3).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": CACHED}


def test_tokens_after_a_stop_string_are_not_counted(three: Server) -> None:
    # The engine goes on with the choice; the client has been told its end.
    stopped = len(three.prompts.tokenizer.encode("A longer answer", special_tokens=False))
    one, _, nothing = three.engine.replies or []
    usage = three.chat(n=3, stop=" answer").json()["usage"]
    assert usage["completion_tokens"] == len(one) + stopped + len(nothing)


def test_a_turn_ends_when_all_its_choices_have(three: Server) -> None:
    three.engine.replies = [reply * 50 for reply in (three.engine.replies or [])[:2]]
    assert [reason for _, reason in whole(three.chat(n=2, stop=["two", "longer"]))] == ["stop", "stop"]
    assert three.engine.tokens_sent < 30
    assert (three.engine.running, three.engine.closed) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_fails_the_answer(three: Server, stream: bool) -> None:
    three.engine.failed = "it broke"
    response = three.chat(n=3, stream=stream)
    if stream:
        assert "it broke" in events(response)[-1]["error"]["message"]
    else:
        assert (response.status_code, error_of(response)["code"]) == (500, "engine_failed")
    assert three.engine.running == 0


def test_a_choice_that_fails_after_its_stop_string_is_whole(three: Server) -> None:
    three.engine.failed = "it broke"
    assert whole(three.chat(n=2, stop=["One", "A"])) == [("", "stop"), ("", "stop")]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["Once upon 中", [16175, 2114, 1]])
def test_echo_puts_the_prompt_first(server: Server, prompt: Any, n: int) -> None:
    shown = prompt if isinstance(prompt, str) else server.prompts.tokenizer.decode(prompt, control_tokens=True)
    for stop in (None, "there"):
        text = shown + ("Hello there!" if stop is None else "Hello ")
        fields: dict[str, Any] = {"echo": True, "n": n, "stop": stop}
        assert whole(server.complete(prompt, **fields)) == [(text, "stop")] * n
        assert streamed(server.complete(prompt, stream=True, **fields), n) == [(text, "stop")] * n


def test_a_stop_string_in_an_echoed_prompt_ends_nothing(server: Server) -> None:
    assert whole(server.complete("Once", echo=True, stop="Once")) == [("OnceHello there!", "stop")]


async def test_the_openai_clients(three: Server) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    fields: Any = {"model": MODEL, "n": 3, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    with openai.OpenAI(base_url=three.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(messages=messages, logit_bias={"5": -100}, **fields)
        assert [choice.message.content for choice in answer.choices] == TEXTS
        with client.chat.completions.stream(messages=messages, **fields) as stream:
            assert [choice.message.content or "" for choice in stream.get_final_completion().choices] == TEXTS
        echoed = client.completions.create(prompt="Once ", echo=True, best_of=3, **fields)
        assert [choice.text for choice in echoed.choices] == ["Once " + text for text in TEXTS]
    async with openai.AsyncOpenAI(base_url=three.url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(messages=messages, **fields)
        assert [choice.message.content for choice in answer.choices] == TEXTS
        texts = [""] * 3
        async for chunk in await client.completions.create(prompt="Once", stream=True, **fields):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == TEXTS
