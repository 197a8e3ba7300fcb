"""What an actor tells its operator: each step's report, the evictions, the memory that running turns hold."""

from __future__ import annotations

import asyncio

from engine_actor.actor.actor import EngineActor
from engine_actor.decoding.load import LoadedDecoder
from engine_actor.limits import Numerics
from engine_actor.messages import session_key
from engine_actor.requests.outcomes import StepOutcome, StepReport
from tests.support.doubles import SyntheticDecoder
from tests.support.engines import actor_options
from tests.unit.actor.helpers import BLOCK_SIZE, ask, start_actor, turn


async def test_every_transaction_is_reported_once_with_its_tokens() -> None:
    decoder = SyntheticDecoder()
    reports: list[StepReport] = []
    memory = float(64 * decoder.manifest.paged.block_bytes(BLOCK_SIZE))
    actor = EngineActor(
        actor_options("synthetic", block_size=BLOCK_SIZE, kv_memory=memory),
        "replica-1",
        None,
        lambda _options, _progress: LoadedDecoder(decoder, 2**40),
        reports.append,
    )
    report = await actor.start()
    assert list(report.seconds) == ["allocate pools", "probe numerics"]
    assert report.numerics is Numerics.FAST and "; numerics fast" in str(report)
    answer = await ask(actor, turn([1, 2, 3], limit=4))
    await actor.stop()
    steps = [step for step in reports if step.outcome is StepOutcome.COMMITTED]
    assert len({step.transaction_id for step in reports}) == len(reports)
    assert sum(step.tokens for step in steps) == 3 + len(answer.tokens) - 1
    assert all(step.step_seconds >= step.decoder_seconds > 0 for step in steps)


async def test_routers_hear_how_much_of_a_session_is_here_and_not_of_every_step() -> None:
    actor = await start_actor(SyntheticDecoder(vocab=1000, eos=5000), 200)
    await ask(actor, turn([5, 9, 13], 4, "s"))
    deltas = actor.stream_turn(turn([5, 9, 14, 15, 16], 60, "s"))
    seen = [actor.routing_stats()["sessions"] async for _ in deltas]
    key = session_key("public", "s")
    lengths = [sessions.get(key) for sessions in seen if isinstance(sessions, dict)]
    assert set(lengths) <= {None, 3, 7, 5, 65} and len(lengths) > 1
    async with asyncio.timeout(10):
        while actor.routing_stats()["sessions"] != {key: 65}:
            await asyncio.sleep(0.01)
    await actor.stop()


async def test_evictions_are_counted_by_what_the_memory_was_needed_for() -> None:
    actor = await start_actor(SyntheticDecoder(), blocks=8, max_sessions=2)
    for name in "abc":
        await ask(actor, turn([1, 2, 3], limit=2, session=name))
    stats = await actor.stats()
    assert (stats["evicted_for_sessions"], stats["evicted_for_blocks"], stats["expired"]) == (1, 0, 0)
    await ask(actor, turn(list(range(1, 29)), limit=2, session="b"))  # needs all blocks but one
    stats = await actor.stats()
    assert (stats["evicted_for_sessions"], stats["evicted_for_blocks"]) == (1, 1)
    assert stats["blocks_active"] == 0
    assert stats["sessions"] == 1
    await actor.stop()
