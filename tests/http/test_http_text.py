"""Streamed and whole answers have one text, whatever tokens, chunks and stop strings do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.http.http_harness import Server, events, streamed_text

MIXED = "Emoji 😀👩‍👩‍👧 中文字 é̂ Ω, then plain."


def whole_text(server: Server, **fields: Any) -> tuple[str, str]:
    choice = server.chat(**fields).json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def stream_text(server: Server, **fields: Any) -> tuple[str, str]:
    response = server.chat(stream=True, **fields)
    return streamed_text(response), events(response)[-2]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("chunks", [[1], [2], [3, 1], [100]])
def test_text_is_the_same_streamed_and_whole(server: Server, chunks: list[int]) -> None:
    server.say(MIXED)
    server.engine.chunks = chunks
    assert stream_text(server) == whole_text(server) == (MIXED, "stop")
    assert streamed_text(server.complete(stream=True)) == server.complete().json()["choices"][0]["text"] == MIXED


@pytest.mark.parametrize("limit", range(1, 13))
def test_a_cut_answer_never_shows_half_a_character(server: Server, limit: int) -> None:
    server.say("😀中👩‍👩‍👧é")
    text, reason = whole_text(server, max_tokens=limit)
    assert stream_text(server, max_tokens=limit) == (text, reason)
    assert "😀中👩‍👩‍👧é".startswith(text) and "\ufffd" not in text
    assert reason == ("length" if limit < len(server.engine.reply) else "stop")


def test_every_event_is_whole_characters(server: Server) -> None:
    server.say(MIXED)
    assert "\ufffd" not in server.chat(stream=True).text


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_have_one_text(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    server.engine.reply = [rng.randrange(49152) for _ in range(40)] + [rng.randrange(300) for _ in range(40)]
    server.engine.chunks = [rng.randint(1, 6) for _ in range(5)]
    assert stream_text(server) == whole_text(server)


@pytest.mark.parametrize("chunks", [[1], [2, 3], [100]])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("capital", "Paris is the "),
        ("s the cap", "Paris i"),
        (".", "Paris is the capital 😀 of France"),
        ("P", ""),
        ("Paris is the capital 😀 of France.", ""),
        ("😀", "Paris is the capital "),
        (["xyz", "of", "Fra"], "Paris is the capital 😀 "),
        (["is the", "s the c"], "Paris "),
    ],
)
def test_a_stop_string_cuts_the_text_and_ends_the_turn(
    server: Server, stop: str | list[str], text: str, chunks: list[int]
) -> None:
    server.say("Paris is the capital 😀 of France. And so on, for long." + " more" * 50)
    server.engine.chunks = chunks
    for ask in (whole_text, stream_text):
        server.engine.tokens_sent = 0
        assert ask(server, stop=stop) == (text, "stop")
        assert server.engine.running == 0
        assert server.engine.tokens_sent < len(server.engine.reply) or chunks == [100]


def test_a_stop_string_that_is_not_completed_is_shown(server: Server) -> None:
    server.say("The END")
    for stop in ("END!", "NDx", ["THE", "END "]):
        assert whole_text(server, stop=stop) == stream_text(server, stop=stop) == ("The END", "stop")


def test_no_event_shows_a_part_of_a_stop_string(server: Server) -> None:
    server.say("one two three four")
    chunks = events(server.chat(stream=True, stop="two three"))
    pieces = [c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]]
    assert "".join(pieces) == "one "


def test_usage_counts_tokens_to_the_one_that_completed_the_stop(server: Server) -> None:
    server.say("one two three four")
    expected = len(server.prompts.tokenizer.encode("one two", special_tokens=False))
    for chunks in ([1], [100]):
        server.engine.chunks = chunks
        assert server.chat(stop="two").json()["usage"]["completion_tokens"] == expected
        usage = events(server.chat(stop="two", stream=True, stream_options={"include_usage": True}))[-2]["usage"]
        assert usage["completion_tokens"] == expected
