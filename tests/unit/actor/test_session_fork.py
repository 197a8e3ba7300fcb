"""A second session that begins as a resident one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from engine_actor.messages import ForkOutcome, HistorySpan, SessionHolding, session_key
from tests.support.doubles import SyntheticDecoder, solo
from tests.unit.actor.helpers import ask, start_actor, turn

PROMPT = list(range(10, 31))


def answer_of(prompt: list[int], count: int) -> list[int]:
    return solo(prompt, count, vocab=1000, eos=5000)


def decoder() -> SyntheticDecoder:
    return SyntheticDecoder(vocab=1000, eos=5000)


async def test_a_fork_reuses_all_that_is_resident_and_both_go_their_own_way() -> None:
    actor = await start_actor(decoder(), 200)
    first = await ask(actor, turn(PROMPT, 9, "a"))
    history = [*PROMPT, *first.tokens]
    assert await actor.fork_session("public", "a", "b") is ForkOutcome.FORKED
    assert {info.session_id for info in await actor.sessions("public")} == {"a", "b"}
    keys = [session_key("public", name) for name in ("a", "b")]
    assert actor.routing_stats()["sessions"] == dict.fromkeys(keys, len(history))
    for name, said in (("b", [77, 78]), ("a", [88]), ("b", [77, 79])):
        answer = await ask(actor, turn([*history, *said], 6, name))
        assert answer.tokens == answer_of([*history, *said], 6)
        assert answer.accepted is not None
        # Of a rewound tail that is shared, or of the fork's last position, less than a block is computed again.
        assert answer.accepted.cached_tokens >= len(history) - 4
        await actor.check_integrity()
    assert await actor.close_session("public", "a")
    again = await ask(actor, turn([*history, 77, 79], 6, "b"))
    assert again.tokens == answer_of([*history, 77, 79], 6)
    assert await actor.close_session("public", "b")
    await actor.check_integrity()
    stats = await actor.stats()
    assert stats["requests"] == stats["sessions"] == 0
    await actor.stop()


async def test_what_can_not_be_forked_is_said() -> None:
    long = decoder()
    actor = await start_actor(long, 1500, max_model_len=4000)
    assert await actor.fork_session("public", "a", "b") is ForkOutcome.UNKNOWN
    await ask(actor, turn(PROMPT, 3, "a"))
    await ask(actor, turn(PROMPT, 3, "b"))
    assert await actor.fork_session("public", "a", "b") is ForkOutcome.EXISTS
    assert await actor.fork_session("public", "a", "a") is ForkOutcome.EXISTS
    assert await actor.fork_session("other", "a", "c") is ForkOutcome.UNKNOWN
    known, unknown = await actor.session_holdings("public", ("a", "c"))
    assert known == SessionHolding(len(PROMPT) + 3, open=False) and unknown is None
    assert await actor.session_holdings("other", ("a",)) == [None]
    steps = len(long.steps)
    running = asyncio.create_task(ask(actor, turn(PROMPT, 3900, "a")))
    while len(long.steps) < steps + 3:
        await asyncio.sleep(0.001)
    [holding] = await actor.session_holdings("public", ("a",))
    assert holding is not None and holding.open
    assert await actor.fork_session("public", "a", "c") is ForkOutcome.RUNNING
    assert await actor.close_session("public", "a")
    await running
    assert {info.session_id for info in await actor.sessions()} == {"b"}
    await actor.stop()


async def test_a_fork_without_a_place_is_remembered_and_computed_when_it_is_used() -> None:
    actor = await start_actor(decoder(), 200, max_sessions=1)
    first = await ask(actor, turn(PROMPT, 9, "a"))
    history = [*PROMPT, *first.tokens, 77]
    assert await actor.fork_session("public", "a", "b") is ForkOutcome.FORKED
    assert len(await actor.sessions()) <= 1
    for name in ("b", "a"):
        assert (await ask(actor, turn(history, 6, name))).tokens == answer_of(history, 6)
    await actor.check_integrity()
    await actor.stop()


async def test_the_oldest_other_session_makes_place_for_a_fork() -> None:
    actor = await start_actor(decoder(), 200, max_sessions=2)
    await ask(actor, turn(PROMPT, 9, "a"))
    await ask(actor, turn(PROMPT[5:], 9, "b"))
    assert await actor.fork_session("public", "a", "c") is ForkOutcome.FORKED
    assert {info.session_id for info in await actor.sessions()} == {"a", "c"}
    await actor.stop()


async def test_a_fork_knows_what_was_generated_before_it() -> None:
    def detokenize(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    actor = await start_actor(decoder(), 200, detokenize)
    first = await ask(actor, turn(PROMPT, 6, "a"))
    await actor.fork_session("public", "a", "b")
    digest = hashlib.sha256(detokenize(first.tokens).encode()).digest()
    span = HistorySpan(len(PROMPT), len(PROMPT) + 2, digest)
    answer = await ask(actor, turn([*PROMPT, 900, 901, 44], 5, "b", spans=(span,)))
    assert answer.tokens == answer_of([*PROMPT, *first.tokens, 44], 5)
    await actor.stop()
