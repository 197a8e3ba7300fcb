"""A conversation held in three ways is one and the same to the engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from engine_actor.messages import TurnRequest
from tests.http.http_harness import CHAT, Server

TURNS = [(f"Question {turn}: why? 😀", f"Answer {turn}.\n Because é!") for turn in range(6)]
SYSTEM = "You are brief."


def by_history(server: Server) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for question, answer in TURNS:
        server.say(answer)
        messages.append({"role": "user", "content": question})
        content = server.post(CHAT, {"messages": messages, "seed": 1}).json()
        messages.append(content["choices"][0]["message"])


def by_header(server: Server) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for question, answer in TURNS:
        server.say(answer)
        messages.append({"role": "user", "content": question})
        response = server.post(CHAT, {"messages": messages, "seed": 1}, headers={"x-session-id": "talk"})
        messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})


def by_id(server: Server) -> None:
    previous = None
    for question, answer in TURNS:
        server.say(answer)
        response = server.respond(question, previous_response_id=previous, instructions=SYSTEM, seed=1)
        previous = response.json()["id"]


def held(server: Server, way: Any) -> list[TurnRequest]:
    server.engine.requests.clear()
    way(server)
    return list(server.engine.requests)


def test_three_ways_give_equal_prompts_and_spans(server: Server) -> None:
    history, header, chain = (held(server, way) for way in (by_history, by_header, by_id))
    assert len(history) == len(TURNS)
    for one, two, three in zip(history, header, chain, strict=True):
        assert one.prompt_ids == two.prompt_ids == three.prompt_ids
        assert one.spans == two.spans == three.spans
        assert one.sampling == two.sampling == three.sampling
        assert one.max_generated_tokens == two.max_generated_tokens == three.max_generated_tokens
    assert [len(request.spans) for request in chain] == list(range(len(TURNS)))
    assert {request.session_id for request in history} == {None}
    assert {request.session_id for request in header} == {"talk"}
    assert len({request.session_id for request in chain}) == 1 and chain[0].session_id is not None


def test_each_turn_begins_with_the_whole_turn_before_it(server: Server) -> None:
    """So what is resident is reused, and what is sent grows by one turn each time."""
    tokenizer = server.prompts.tokenizer
    requests = held(server, by_id)
    for (_, answer), (before, after) in zip(TURNS, pairwise(requests), strict=False):
        resident = before.prompt_ids + tuple(tokenizer.encode(answer, special_tokens=False))
        assert after.prompt_ids[: len(resident)] == resident
    added = [len(b.prompt_ids) - len(a.prompt_ids) for a, b in pairwise(requests)]
    assert max(added) - min(added) <= 2
