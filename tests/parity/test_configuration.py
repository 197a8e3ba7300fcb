"""Configuration and construction: PARITY A (F001 to F011) as far as one engine with one paged group has them."""

from __future__ import annotations

import numpy as np
import pytest

from engine_actor.core.engine import Engine
from engine_actor.decoding.decoder import DecoderManifest, PagedState, PoolGeometry
from engine_actor.errors import InvalidOption
from engine_actor.memory.sizing import blocks_in_share, size_pool
from engine_actor.options import UNBOUNDED, EngineConfig, FairnessBounds, Numerics, TurnOptions
from tests.support.doubles import P10, P20, ForcedDecoder, SyntheticDecoder, build_engine, run_out

GIB = 2**30


@pytest.mark.parity("F003")
def test_the_token_budget_has_its_default_and_takes_positive_integers() -> None:
    """CF-01."""
    assert EngineConfig(num_blocks=8).max_scheduled_tokens == 2048
    assert EngineConfig(num_blocks=8, max_scheduled_tokens=321).max_scheduled_tokens == 321
    for value in (0, -1, 1.5, 4_000_000_000, True, "5", None):
        with pytest.raises(InvalidOption, match=r"max_scheduled_tokens must be an integer from 1 to 2147483647"):
            EngineConfig(num_blocks=8, max_scheduled_tokens=value)  # type: ignore[arg-type]


@pytest.mark.parity("F003")
def test_rows_and_tokens_are_limited_independently() -> None:
    for limits, counts in (({"max_batch_size": 1}, [3]), ({"max_scheduled_tokens": 4}, [3, 1]), ({}, [3, 3])):
        decoder = ForcedDecoder()
        engine = build_engine(decoder, **limits)
        requests = [engine.create_request(), engine.create_request()]
        for request, prompt in zip(requests, (P10, P20), strict=True):
            request.begin_turn(prompt)
        engine.run(8)
        assert decoder.packed_counts() == [counts]


@pytest.mark.parity("F004")
@pytest.mark.parametrize(
    "name",
    ["num_blocks", "block_size", "max_batch_size", "max_residents", "max_length", "chunk_size", "max_preemptions"],
)
@pytest.mark.parametrize("value", [-1, 1.5, True, "8", 2**31])
def test_bad_limits_are_refused_by_name(name: str, value: object) -> None:
    values = {"num_blocks": 8, name: value}
    with pytest.raises(InvalidOption, match=f"{name} must be an integer"):
        EngineConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parity("F004")
@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_batch_size", "max_residents", "max_length"])
def test_zero_is_no_limit_that_an_engine_could_work_with(name: str) -> None:
    with pytest.raises(InvalidOption, match=name):
        EngineConfig(**{"num_blocks": 8, name: 0})  # type: ignore[arg-type]


@pytest.mark.parity("F004")
def test_other_defaults() -> None:
    config = EngineConfig(num_blocks=8)
    assert (config.block_size, config.max_batch_size, config.chunk_size) == (16, 32, 0)
    assert (config.max_residents, config.residents, config.max_length) == (None, 32, None)
    assert (config.preemption, config.prefix_reuse, config.numerics) == (True, True, Numerics.EXACT)
    assert (config.first_block_id, config.block_order) == (1, "fifo")
    assert FairnessBounds.off() == FairnessBounds(UNBOUNDED, 0.0, UNBOUNDED) != config.fairness


@pytest.mark.parity("F004")
@pytest.mark.parametrize(
    ("field", "value"),
    [("max_passed_over", 0), ("min_prefill_share", 0.95), ("min_prefill_share", float("nan")), ("max_overtakes", -1)],
)
def test_fairness_bounds_are_checked(field: str, value: float) -> None:
    with pytest.raises(InvalidOption, match=f"fairness.{field}"):
        FairnessBounds(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("block_order", "random"), ("first_block_id", 2)])
def test_unknown_orders_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=field):
        EngineConfig(**{"num_blocks": 8, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_generated_tokens", -1), ("priority", 1.5), ("stop_token_ids", frozenset({-1})), ("stop_token_ids", {"a"})],
)
def test_turn_options_are_checked(field: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=field):
        TurnOptions(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parity("F002")
def test_capabilities_come_from_the_manifest_alone() -> None:
    class Renamed(SyntheticDecoder):
        model_type = "something else entirely"

    answers = []
    for kind in (SyntheticDecoder, Renamed):
        engine = build_engine(kind(vocab=16, eos=3, context=30))
        request = engine.create_request()
        request.begin_turn([5, 9])
        answers.append([(e.token, e.finish_reason) for e in run_out(engine)])
        assert engine.max_length == 30
    assert answers[0] == answers[1]


@pytest.mark.parity("F005")
def test_an_engine_refuses_at_once_what_its_decoder_cannot_do() -> None:
    decoder = SyntheticDecoder(context=64)
    with pytest.raises(InvalidOption, match="max_length must be at most 64, not 65"):
        Engine(decoder, EngineConfig(num_blocks=8, max_length=65))
    decoder.row_invariant = False
    with pytest.raises(InvalidOption, match="numerics must be 'fast'"):
        Engine(decoder, EngineConfig(num_blocks=8))
    Engine(decoder, EngineConfig(num_blocks=8, numerics=Numerics.FAST))


@pytest.mark.parity("F007", "F137")
def test_pools_are_allocated_once_and_a_decode_step_grows_nothing() -> None:
    allocated: list[PoolGeometry] = []

    class Counting(ForcedDecoder):
        def allocate(self, pools: PoolGeometry) -> None:
            allocated.append(pools)
            super().allocate(pools)

    decoder = Counting()
    engine = build_engine(decoder)
    assert allocated == [PoolGeometry(129, 4)]
    requests = [engine.create_request() for _ in range(4)]
    for request in requests:
        request.begin_turn([4, 5, 6, 7])
    engine.run(8)
    storage = decoder.cache.ctypes.data
    mirror = engine._packer._mirror._matrix
    containers = (engine._lifecycle.requests.records, engine._cache.paged._tables, engine._lifecycle.requests.queue)
    sizes = [len(container) for container in containers]
    for _ in range(100):
        engine.run(8)
    assert [len(container) for container in containers] == sizes
    assert engine._packer._mirror._matrix is mirror and decoder.cache.ctypes.data == storage
    assert len(allocated) == 1


@pytest.mark.parity("F008")
def test_the_pool_is_sized_from_free_memory() -> None:
    """PL-14."""
    paged = PagedState(tuple(range(32)), 8, 128, 2)
    assert blocks_in_share(10 * GIB, 0.9, paged.block_bytes(256)) == 259
    half = PagedState(tuple(range(16)), 8, 128, 2)
    ring, batch = 2, 16
    windowed = ring * batch * half.block_bytes(256)
    assert blocks_in_share(10 * GIB, 0.9, half.block_bytes(256), windowed) == 486


@pytest.mark.parity("F008", "F004")
def test_bytes_are_taken_literally_and_shares_in_their_range() -> None:
    assert size_pool(1000.0, 10_000, 4, 100, 4096, 8).num_blocks == 10
    assert size_pool(1.0, 10_000, 4, 100, 4096, 8).num_blocks == 90
    assert size_pool(0.5, 10**9, 4, 100, 16, 2).num_blocks == 8  # no more than two whole sequences can use
    for share in (0, -0.1):
        with pytest.raises(InvalidOption, match="kv_memory"):
            size_pool(share, 10_000, 4, 100, 4096, 8)
    with pytest.raises(InvalidOption, match="at most the 500 bytes"):
        size_pool(1000.0, 500, 4, 100, 4096, 8)
    with pytest.raises(InvalidOption, match="kv_memory"):
        blocks_in_share(10_000, 1.01, 100)


@pytest.mark.parity("F009")
def test_a_budget_that_the_windows_use_up_is_an_error() -> None:
    assert blocks_in_share(1000, 1.0, 100, 800) == 1
    for windowed in (801, 900, 5000):
        with pytest.raises(InvalidOption, match="which is one block"):
            blocks_in_share(1000, 1.0, 100, windowed)


@pytest.mark.parity("F008")
def test_a_pool_smaller_than_the_context_says_so() -> None:
    size = size_pool(1000.0, 10_000, 4, 100, 4096, 8)
    assert (size.max_length, size.limited_by_pool, size.tokens, size.bytes) == (40, True, 40, 1000)
    assert size_pool(0.9, 10**9, 4, 100, 40, 8).limited_by_pool is False


@pytest.mark.parametrize("first", [0, 1])
def test_the_null_block_comes_on_top_of_the_usable_ones(first: int) -> None:
    """C01."""
    decoder = ForcedDecoder()
    engine = build_engine(decoder, num_blocks=3, first_block_id=first)
    assert decoder.cache.shape == (3 + first, 4) and engine.stats()["blocks_usable"] == 3
    request = engine.create_request()
    request.begin_turn([4] * 10, TurnOptions(2))
    run_out(engine)
    assert sorted(decoder.steps[-1].block_table[0].tolist()) == [first, first + 1, first + 2]


def test_a_manifest_speaks_of_one_paged_group() -> None:
    manifest = DecoderManifest(32, 128, frozenset({1}), PagedState((0, 2), 4, 64, 2))
    assert manifest.paged.block_bytes(16) == 2 * 2 * 16 * 4 * 64 * 2
    assert np.iinfo(np.int32).max >= UNBOUNDED
