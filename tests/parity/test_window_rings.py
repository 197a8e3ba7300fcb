"""Sliding-window layers in rings of blocks: N (F223 to F232)."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.errors import ContractViolation, InvalidOption, OutOfBlocks, RetryableStepError
from engine_actor.manifest import DecoderManifest, PagedState, WindowedState
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.layout import PoolGeometry
from engine_actor.memory.sizing import blocks_in_share
from engine_actor.memory.window_ring import WindowRings, ring_blocks
from engine_actor.options import TurnOptions
from engine_actor.requests.outcomes import DeferralReason
from engine_actor.requests.record import RequestStatus
from engine_actor.scheduling.scheduler import longest_part
from tests.support.doubles import SyntheticDecoder, WindowedDecoder, WindowedMixingDecoder, solo
from tests.support.engine_room import LOWEST, OpenedEngine, row_of
from tests.support.engine_view import view
from tests.support.engines import engine_of

X, Y, Z = 1, 2, 3


def rings(cap: int, window: int, block: int, requests: int = 2) -> WindowRings:
    count = requests * ring_blocks(cap, window, block)
    return WindowRings(BlockPool(count, 0, "lowest"), window, cap, block)


def room_of(**config: Any) -> OpenedEngine:
    return OpenedEngine(WindowedDecoder(), **{"chunk_size": 4, **config})


def ring_slot(ring: list[int], position: int, block: int) -> int:
    return ring[(position // block) % len(ring)] * block + position % block


# -- the ring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F224", scenario="WR-01")
def test_a_ring_has_the_blocks_of_a_window_and_a_step() -> None:
    cases = [(256, 128, 256), (129, 128, 256), (130, 128, 256), (256, 128, 64), (64, 128, 64), (1, 128, 64)]
    assert [ring_blocks(*case) for case in cases] == [2, 1, 2, 6, 3, 2]


@pytest.mark.parity("F225")
@pytest.mark.parametrize(("window", "block", "chunk"), [(3, 4, 4), (5, 2, 3), (4, 3, 1)])
def test_a_position_lives_in_its_remainder_of_the_ring(window: int, block: int, chunk: int) -> None:
    room = OpenedEngine(WindowedDecoder(window=window), chunk_size=chunk, block_size=block)
    decoder, windows = room.decoder, room.cache.windows
    assert isinstance(decoder, WindowedDecoder) and windows is not None
    requests = [room.add([5 + i, 9, 13, 2, 4, 6, 8], max_generated_tokens=30) for i in range(2)]
    while room.engine.has_pending_requests():
        room.step()
        for request in requests:
            ring, computed = windows.blocks(request.id), request.num_computed_tokens
            for p in range(max(0, computed - window), computed):
                at = p % (len(ring) * block)
                assert decoder.rings[ring[at // block], at % block] == request.tokens[p]
        table = decoder.steps[-1].windowed_table
        assert table is not None
        for row, request in zip(table.tolist(), requests, strict=True):
            ring = windows.blocks(request.id)
            assert row == [ring[column % len(ring)] for column in range(len(row))]


@pytest.mark.parity("F227", scenario="WR-03")
@pytest.mark.parametrize(
    ("window", "block", "cap", "count", "end"), [(128, 256, 256, 256, 3000), (128, 64, 64, 1, 1000), (3, 4, 2, 2, 99)]
)
def test_a_step_overwrites_nothing_that_it_sees(window: int, block: int, cap: int, count: int, end: int) -> None:
    ring = list(range(ring_blocks(cap, window, block)))
    for past in range(0, end, count):
        live = range(max(0, past - window + 1), past + count)
        assert len({ring_slot(ring, p, block) for p in live}) == len(live)


@pytest.mark.parity("F227", "F224")
def test_a_ring_one_block_smaller_would_not_do() -> None:
    """The negative control: R is the least that works for some alignment."""
    window, block, cap = 6, 4, 4
    ring = list(range(ring_blocks(cap, window, block) - 1))
    live = range(8 - window + 1, 8 + cap)
    assert len({ring_slot(ring, p, block) for p in live}) < len(live)


@pytest.mark.parity("F228", scenario="WR-04")
def test_a_step_that_is_larger_than_the_ring_was_made_for_is_refused() -> None:
    windows = rings(64, 128, 64)
    with pytest.raises(ContractViolation, match="256 tokens in a step, its ring is for 64"):
        windows.reserve([row_of(X, True, 0, 256, 256)])
    assert windows.pool.free_count == windows.pool.usable
    cache = CacheManager(64, 64, 2, window=128, query_cap=64)
    cache.reserve([row_of(X, True, 0, 64, 768)]).commit([64])
    with pytest.raises(ContractViolation, match="its ring is for 64"):
        cache.reserve([row_of(X, False, 64, 320, 768)])
    cache.check_integrity()


@pytest.mark.parity("F225", "F232", scenario="WR-05")
def test_a_row_of_the_windowed_table_repeats_its_ring() -> None:
    room = OpenedEngine(WindowedDecoder(window=3), chunk_size=3, block_size=3, **LOWEST)
    request = room.add([5, 9, 13, 2, 4, 6, 8, 3, 7, 2, 2, 2, 3], max_generated_tokens=2)
    room.step()
    step = room.decoder.steps[-1]
    assert step.windowed_table is not None
    assert step.windowed_table.tolist() == [[0, 1, 0, 1, 0]] and step.block_table.shape == (1, 5)
    room.run_out()
    assert request.finish_reason is not None


# -- configuration ----------------------------------------------------------------------------------------------------


def manifest(paged: tuple[int, ...], windowed: tuple[int, ...], window: int = 4) -> DecoderManifest:
    return DecoderManifest(
        64, 64, frozenset({1}), PagedState(paged, 1, 1, 8), 0, 0, WindowedState(windowed, 1, 1, 8, window)
    )


@pytest.mark.parity("F223", "F231", "F011", scenario="WR-06")
def test_what_cannot_be_windowed_is_refused() -> None:
    with pytest.raises(InvalidOption, match="chunk_size must be at least 1"):
        engine_of(WindowedDecoder(), num_blocks=8)
    with pytest.raises(InvalidOption, match="at least one layer that keeps the whole sequence"):
        manifest((), (0, 1))
    for layers in ((1, 2), (2, 2), (), (-1,)):
        with pytest.raises(InvalidOption, match=r"windowed\.layers"):
            manifest((0, 1), layers)
    with pytest.raises(InvalidOption, match=r"windowed\.window must be at least 1, not 0"):
        manifest((0,), (1,), 0)
    assert manifest((0, 2), (1, 3)).windowed is not None


@pytest.mark.parity("F223")
def test_a_model_without_windows_has_no_window_pool() -> None:
    room = OpenedEngine()
    room.resident([5, 9])
    assert room.cache.windows is None and room.decoder.steps[-1].windowed_table is None


@pytest.mark.parity("F224", "F008", scenario="PL-14")
def test_memory_of_rings_comes_before_that_of_blocks() -> None:
    half = WindowedState(tuple(range(16, 32)), 8, 128, 2, 128)
    blocks = ring_blocks(256, half.window, 256) * 16
    assert blocks == 32
    assert blocks_in_share(10 * 2**30, 0.9, half.block_bytes(256), blocks * half.block_bytes(256)) == 486


@pytest.mark.parity("F224")
def test_the_window_pool_has_a_ring_for_each_resident() -> None:
    allocated: list[PoolGeometry] = []

    class Watched(WindowedDecoder):
        def allocate(self, pools: PoolGeometry) -> None:
            allocated.append(pools)
            super().allocate(pools)

    engine_of(Watched(), num_blocks=8, block_size=4, max_batch_size=5, chunk_size=4)
    assert allocated == [PoolGeometry(9, 4, 0, 5 * 2 + 1)]  # R = ceil((4 + 3 - 1) / 4)


@pytest.mark.parity("F226", "F092", scenario="SC-08")
def test_the_cap_holds_whatever_the_chunk_size_is() -> None:
    assert [longest_part(chunk, 2) for chunk in (7, 0, 1)] == [2, 2, 1]
    room = room_of(chunk_size=2)
    room.add([5] * 9)
    for chunk, count in ((7, 2), (0, 2), (1, 1)):
        view(room.engine).limit(chunk_size=chunk)
        assert [row.count for row in room.plan().rows] == [count]


@pytest.mark.parity("F226", "F301")
def test_a_draft_step_is_no_longer_than_the_cap() -> None:
    room = OpenedEngine(WindowedDecoder(drafts=8), chunk_size=3)
    request = room.resident([5, 9, 13], max_generated_tokens=9)
    request.set_draft_tokens(solo(request.tokens, 6))
    assert room.counts() == [(request.id, 3)]
    room.run_out()
    assert room.tokens[request.id] == solo([5, 9, 13], 9)


# -- reserve, commit, roll back, remove --------------------------------------------------------------------------------


@pytest.mark.parity("F229", scenario="RS-08")
def test_a_rollback_restores_both_pools() -> None:
    cache = CacheManager(1, 4, 1, first_block_id=0, block_order="lowest", window=5, query_cap=4)
    assert cache.windows is not None and cache.windows.ring_size == 2 and cache.windows.pool.free_count == 2
    reservation = cache.reserve([row_of(X, True, 0, 1, 1)])
    assert (cache.pool.free_count, cache.windows.pool.free_count) == (0, 0)
    reservation.release()
    assert cache.windows.pool.free_count == 2 and cache.table(X) is None and not cache.windows.owners()
    cache.check_integrity()


@pytest.mark.parity("F229", scenario="RS-10")
def test_the_next_request_gets_the_same_ring() -> None:
    cache = CacheManager(1, 4, 1, first_block_id=0, block_order="lowest", window=5, query_cap=4)
    assert cache.windows is not None
    for request in (X, Y):
        cache.reserve([row_of(request, True, 0, 1, 1)]).commit([1])
        assert cache.windows.blocks(request) == [0, 1]
        cache.check_integrity()
        cache.remove(request)
    assert cache.windows.pool.free_count == 2


@pytest.mark.parity("F229", "F224", scenario="WR-07")
def test_a_rollback_with_a_resident_and_a_new_row_restores_both_pools() -> None:
    cache = CacheManager(8, 4, 2, window=5, query_cap=4)
    assert cache.windows is not None
    cache.reserve([row_of(X, True, 0, 4, 4)]).commit([4])
    ring = list(cache.windows.blocks(X))
    before = sorted(cache.pool.free_ids()), sorted(cache.windows.pool.free_ids())
    reservation = cache.reserve([row_of(X, False, 4, 8, 8), row_of(Y, True, 0, 4, 4)])
    assert not cache.windows.available and cache.windows.blocks(X) == ring
    reservation.release()
    reservation.release()
    assert (sorted(cache.pool.free_ids()), sorted(cache.windows.pool.free_ids())) == before
    cache.check_integrity()


@pytest.mark.parity("F103", "F120", "F229", scenario="WR-08")
def test_only_the_window_pool_defers() -> None:
    room = room_of(max_residents=3)
    assert room.cache.windows is not None
    requests = [room.resident([5 + i]) for i in range(2)]
    taken = room.cache.windows.pool.allocate(room.cache.windows.ring_size)
    third = room.add([7])
    plan = room.plan()
    assert [(d.request_id, d.reason) for d in plan.deferrals] == [(third.id, DeferralReason.WINDOWS)]
    assert [row.record.id for row in plan.rows] == [r.id for r in requests]
    assert room.pool.available > 100
    room.cache.windows.pool.free(taken)
    room.step()
    assert third.status is RequestStatus.RUNNING


@pytest.mark.parity("F103", "F120")
def test_each_new_row_of_a_step_takes_a_ring() -> None:
    room = room_of(max_residents=3)
    assert room.cache.windows is not None
    room.cache.windows.pool.allocate(room.cache.windows.ring_size)
    requests = [room.add([5 + i]) for i in range(3)]
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [r.id for r in requests[:2]]
    assert [(d.request_id, d.reason) for d in plan.deferrals] == [(requests[2].id, DeferralReason.WINDOWS)]


@pytest.mark.parity("F229", "F153")
def test_without_a_ring_no_block_is_taken() -> None:
    cache = CacheManager(8, 4, 2, window=5, query_cap=4, rings=1)
    with pytest.raises(OutOfBlocks):
        cache.reserve([row_of(X, True, 0, 4, 4), row_of(Y, True, 0, 4, 4)])
    cache.check_integrity()
    assert cache.pool.free_count == 8 and cache.resident_count == 0


@pytest.mark.parity("F145", "F148")
def test_a_window_pool_that_moves_during_a_step_is_noticed() -> None:
    cache = CacheManager(8, 4, 2, window=5, query_cap=4)
    assert cache.windows is not None
    reservation = cache.reserve([row_of(X, True, 0, 4, 4)])
    cache.windows.pool.allocate(1)
    with pytest.raises(ContractViolation, match="window pool changed"):
        reservation.commit([4])
    assert cache.table(X) is None


@pytest.mark.parity("F185", scenario="IN-04")
def test_every_resident_owns_exactly_its_ring() -> None:
    def two() -> CacheManager:
        cache = CacheManager(8, 4, 2, first_block_id=0, block_order="lowest", window=5, query_cap=4)
        cache.reserve([row_of(X, True, 0, 4, 4), row_of(Y, True, 0, 4, 4)]).commit([4, 4])
        cache.check_integrity()
        assert cache.windows is not None and cache.windows.pool.free_count == 0
        assert (cache.windows.blocks(X), cache.windows.blocks(Y)) == ([0, 1], [2, 3])
        return cache

    cache = two()
    cache.windows.blocks(X).pop()  # type: ignore[union-attr]
    with pytest.raises(ContractViolation, match="request 1: a ring of 1 blocks instead of 2"):
        cache.check_integrity()
    cache = two()
    cache.windows.blocks(Y)[:] = [1, 1]  # type: ignore[union-attr]
    with pytest.raises(ContractViolation, match="request 2: a block is twice"):
        cache.check_integrity()
    cache = two()
    cache.windows.blocks(Y)[:] = [0, 3]  # type: ignore[union-attr]
    with pytest.raises(ContractViolation, match="block 0 has 1 owners"):
        cache.check_integrity()
    cache = two()
    cache.windows.remove(Y)  # type: ignore[union-attr]
    with pytest.raises(ContractViolation, match="own rings"):
        cache.check_integrity()


@pytest.mark.parity("F224", "F229")
def test_a_ring_is_for_life_and_goes_back_at_close() -> None:
    room = room_of(max_residents=2)
    windows = room.cache.windows
    assert windows is not None
    request = room.add([5, 9, 13, 2, 4, 6], max_generated_tokens=20)
    room.step()
    ring = list(windows.blocks(request.id))
    room.run_out()
    assert windows.blocks(request.id) == ring and len(room.blocks(request)) > len(ring)
    assert room.tokens[request.id] == solo([5, 9, 13, 2, 4, 6], 20)
    request.close()
    assert windows.available == 2


@pytest.mark.parity("F230", "F227", scenario="WR-09")
def test_a_failed_step_that_wrapped_leaves_what_its_retry_needs() -> None:
    room = room_of()
    prompt = [5, 9, 13, 2, 4, 6, 8, 3, 7, 12, 20]
    requests = [room.add(prompt, max_generated_tokens=9), room.add([7, 2], max_generated_tokens=9)]
    while room.engine.has_pending_requests():
        room.decoder.fail_next = lambda: RetryableStepError("injected")
        room.step()
        room.step()
    assert [room.tokens[r.id] for r in requests] == [solo(prompt, 9), solo([7, 2], 9)]


@pytest.mark.parity("F227")
def test_a_rewind_goes_no_further_back_than_the_ring_does() -> None:
    """Rings of 8 positions, windows of 3: from 11 written positions, 3 to 10 are left, which position 5 sees."""
    for length in range(12):
        room = room_of()
        request = room.dormant([5, 9, 13, 2], generated=8)
        assert request.current_length == 12 and request.num_computed_tokens == 11
        kept = request.tokens[:length]
        request.rewind(length)
        room.engine.check_integrity()
        assert request.num_computed_tokens == (length if length >= 5 else 0)
        request.begin_turn([6, 2])
        while request.current_length == length + 2:
            room.step()
        assert request.tokens[: length + 3] == [*kept, 6, 2, *solo([*kept, 6, 2], 1)]


@pytest.mark.parity("F227")
@pytest.mark.parametrize("first", range(1, 12))
def test_a_second_rewind_remembers_what_the_first_left_behind(first: int) -> None:
    """What a ring had written before a rewind stays overwritten, however little is written after it."""
    for second in range(1, first + 2):
        room, fresh = (OpenedEngine(WindowedMixingDecoder(eos=99), chunk_size=4) for _ in range(2))
        request = room.dormant([5, 9, 13, 2], generated=8)
        for length in (first, second):
            request.rewind(length)
            room.engine.check_integrity()
            request.begin_turn([6], TurnOptions(1))
            room.run_out()
        assert request.tokens == fresh.dormant(request.tokens[:-1]).tokens, f"after rewinds to {first} and {second}"


@pytest.mark.parity("F343")
def test_a_fork_computes_its_sequence_again() -> None:
    room = room_of()
    parent = room.dormant([5, 9, 13])
    child = parent.fork()
    assert child.num_computed_tokens == 0
    child.begin_turn([4])
    sequence = child.tokens
    while child.current_length == len(sequence):
        room.step()
    assert child.tokens == [*sequence, *solo(sequence, 1)]


def test_the_double_would_notice_a_wrong_ring() -> None:
    """The negative control of every test above: tokens come from the ring."""
    room = room_of()
    request = room.resident([5, 9, 13, 2])
    decoder = room.decoder
    assert isinstance(decoder, WindowedDecoder) and isinstance(decoder, SyntheticDecoder)
    decoder.rings[:] = 3
    decoder.choose = lambda sequence: sum(sequence) % 64
    room.step()
    assert request.tokens[-1] != sum(request.tokens[:-1]) % 64
