"""Configuration and construction: A (F001 to F011) as far as one engine with one paged group has them."""

from __future__ import annotations

import numpy as np
import pytest

from engine_actor.errors import InvalidOption
from engine_actor.limits import EngineLimits, FairnessBounds, Numerics
from engine_actor.manifest import DecoderManifest, PagedState
from engine_actor.memory.layout import PoolGeometry, PoolLayout, plan_pools, pools_in_memory
from engine_actor.memory.sizing import blocks_in_memory, blocks_in_share
from engine_actor.options import UNBOUNDED, TurnOptions
from tests.support.doubles import P10, P20, ForcedDecoder, SyntheticDecoder, build_engine, run_out
from tests.support.engine_view import table_matrix, tables_of, view
from tests.support.engines import engine_of

GIB = 2**30


@pytest.mark.parity("F003", scenario="CF-01")
def test_the_token_budget_has_its_default_and_takes_positive_integers() -> None:
    assert EngineLimits().max_scheduled_tokens == 2048
    assert EngineLimits(max_scheduled_tokens=321).max_scheduled_tokens == 321
    for value in (0, -1, 1.5, 4_000_000_000, True, "5", None):
        with pytest.raises(InvalidOption, match=r"max_scheduled_tokens must be an integer from 1 to 2147483647"):
            EngineLimits(max_scheduled_tokens=value)  # type: ignore[arg-type]


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
        engine_of(SyntheticDecoder(), **values)  # type: ignore[arg-type]


@pytest.mark.parity("F004")
@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_batch_size", "max_residents", "max_length"])
def test_zero_is_no_limit_that_an_engine_could_work_with(name: str) -> None:
    with pytest.raises(InvalidOption, match=name):
        engine_of(SyntheticDecoder(), **{"num_blocks": 8, name: 0})  # type: ignore[arg-type]


@pytest.mark.parity("F004")
def test_limits_have_their_defaults() -> None:
    limits = EngineLimits()
    assert (limits.block_size, limits.max_batch_size, limits.chunk_size) == (16, 32, 0)
    assert (limits.preemption, limits.prefix_reuse, limits.numerics) == (True, True, Numerics.AUTO)
    assert (limits.first_block_id, limits.block_order) == (1, "fifo")
    assert FairnessBounds.off() == FairnessBounds(UNBOUNDED, 0.0, UNBOUNDED) != limits.fairness
    pools = plan_pools(SyntheticDecoder(context=100).manifest, limits, num_blocks=8)
    assert (pools.max_residents, pools.max_length, pools.max_columns) == (32, 100, None)


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
        EngineLimits(**{field: value})  # type: ignore[arg-type]


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
        engine_of(decoder, num_blocks=8, max_length=65)
    decoder.row_invariant = False
    with pytest.raises(InvalidOption, match="numerics must be 'auto' or 'fast'"):
        engine_of(decoder, num_blocks=8, numerics=Numerics.EXACT)
    engine_of(decoder, num_blocks=8, numerics=Numerics.FAST)


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
    mirror = table_matrix(view(engine).packer)
    containers = (view(engine).requests.records, tables_of(view(engine).cache.paged), view(engine).requests.queue)
    sizes = [len(container) for container in containers]
    for _ in range(100):
        engine.run(8)
    assert [len(container) for container in containers] == sizes
    assert table_matrix(view(engine).packer) is mirror and decoder.cache.ctypes.data == storage
    assert len(allocated) == 1


@pytest.mark.parity("F008", scenario="PL-14")
def test_the_pool_is_sized_from_free_memory() -> None:
    paged = PagedState(tuple(range(32)), 8, 128, 2)
    assert blocks_in_share(10 * GIB, 0.9, paged.block_bytes(256)) == 259
    half = PagedState(tuple(range(16)), 8, 128, 2)
    ring, batch = 2, 16
    windowed = ring * batch * half.block_bytes(256)
    assert blocks_in_share(10 * GIB, 0.9, half.block_bytes(256), windowed) == 486


@pytest.mark.parity("F008", "F004")
def test_bytes_are_taken_literally_and_shares_in_their_range() -> None:
    assert blocks_in_memory(1000.0, 10_000, 100) == 10
    assert blocks_in_memory(1.0, 10_000, 100) == 90
    for share in (0, -0.1):
        with pytest.raises(InvalidOption, match="kv_memory"):
            blocks_in_memory(share, 10_000, 100)
    with pytest.raises(InvalidOption, match="at most the 500 bytes"):
        blocks_in_memory(1000.0, 500, 100)
    with pytest.raises(InvalidOption, match="kv_memory"):
        blocks_in_share(10_000, 1.01, 100)


@pytest.mark.parity("F009")
def test_a_budget_that_the_windows_use_up_is_an_error() -> None:
    assert blocks_in_share(1000, 1.0, 100, 800) == 1
    for windowed in (801, 900, 5000):
        with pytest.raises(InvalidOption, match="which is one block"):
            blocks_in_share(1000, 1.0, 100, windowed)


def pools_of(kv_memory: float, free_bytes: int, *, context: int, sessions: int = 6) -> PoolLayout:
    """Of a model whose block of 4 positions has 96 bytes, in an engine of two rows."""
    manifest = DecoderManifest(32, context, frozenset({1}), PagedState((0,), 1, 12, 1))
    limits = EngineLimits(block_size=4, max_batch_size=2)
    return pools_in_memory(manifest, limits, kv_memory=kv_memory, free_bytes=free_bytes, max_sessions=sessions)


@pytest.mark.parity("F008")
def test_a_pool_smaller_than_the_context_says_so() -> None:
    pools = pools_of(1000.0, 10_000, context=4096)
    assert (pools.max_length, pools.limited_by_pool, pools.tokens, pools.bytes) == (40, True, 40, 960)
    assert pools_of(0.9, 10**9, context=40).limited_by_pool is False


def test_no_pool_is_larger_than_whole_sequences_for_all_residents() -> None:
    assert pools_of(0.5, 10**9, context=16, sessions=1).num_blocks == 3 * 4


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
