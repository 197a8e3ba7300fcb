"""Blocks, owners, free lists: G and the pools of W."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine_actor.decoding.packing import StepPacker, TableMirror
from engine_actor.errors import ContractViolation, OutOfBlocks
from engine_actor.memory.block_pool import BlockPool, Capacity
from engine_actor.memory.block_table import BlockTable, blocks_for
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.paged_cache import PagedCache
from tests.support.engine_room import FIFO, LOWEST, OpenedEngine, advance, demand
from tests.support.engine_view import reservation_of, watch_owners

OK, LATER, NEVER = Capacity.OK, Capacity.LATER, Capacity.NEVER


def example_pool() -> tuple[PagedCache, BlockPool]:
    """The pool of a worked example: ids 1 to 7, four positions in a block, fifo."""
    pool = BlockPool(8, 1, "fifo")
    return PagedCache(pool, 4), pool


def lab_at_eleven(drafts: int) -> tuple[PagedCache, BlockPool]:
    """The example up to its fourth line: A has 11 tokens and `drafts` reserved positions, B nine tokens."""
    cache, pool = example_pool()
    advance(cache, demand(cache, 1, 6), demand(cache, 2, 9))
    advance(cache, demand(cache, 1, 8))
    assert blocks_of(cache, 1) == [1, 2] and pool.free_ids() == [6, 7]
    advance(cache, demand(cache, 1, 9))
    assert blocks_of(cache, 1) == [1, 2, 6] and pool.free_ids() == [7]
    advance(cache, demand(cache, 1, 11))
    cache.reserve([demand(cache, 1, 11 + drafts, length=11)])
    return cache, pool


def commit_at_twelve(cache: PagedCache) -> None:
    reservation = reservation_of(cache)
    assert reservation is not None
    reservation.commit([12])


def blocks_of(cache: PagedCache, request: int) -> list[int]:
    table = cache.table(request)
    assert table is not None
    return list(table.blocks)


# -- a worked example (fifo, first_id 1, B = 4) -----------------------------------------------------------------------


@pytest.mark.parity("F327", "F328", "F337", "F339")
def test_a_worked_example_line_by_line() -> None:
    cache, pool = lab_at_eleven(2)
    assert blocks_of(cache, 1) == [1, 2, 6, 7] and pool.free_ids() == []
    commit_at_twelve(cache)  # both drafts rejected, one token verified
    assert blocks_of(cache, 1) == [1, 2, 6] and pool.free_ids() == [7]
    assert pool.can_allocate(4) is LATER
    cache.remove(2)
    assert pool.free_ids() == [7, 5, 4, 3]
    assert [pool.can_allocate(k) for k in (0, 1, 4, 5, 7, 8)] == [OK, OK, OK, LATER, LATER, NEVER]


@pytest.mark.parity("F337", "F339", scenario="LB-02")
def test_five_drafts_in_a_partly_filled_block_take_one_more() -> None:
    cache, pool = lab_at_eleven(5)
    assert blocks_of(cache, 1) == [1, 2, 6, 7] and pool.free_ids() == []


@pytest.mark.parity("F340", scenario="LB-03")
def test_five_drafts_after_a_full_block_take_two_blocks_at_once() -> None:
    cache, _ = example_pool()
    advance(cache, demand(cache, 1, 12))
    assert cache.blocks_to_add(demand(cache, 1, 17, length=12)) == 2
    cache.reserve([demand(cache, 1, 17, length=12)])
    assert len(blocks_of(cache, 1)) == 5


@pytest.mark.parity("F340", scenario="LB-04")
@pytest.mark.parametrize("size", [1, 4, 128])
def test_one_block_of_growth_suffices_iff_a_step_adds_at_most_a_block(size: int) -> None:
    for drafts in range(1, 2 * size + 1):
        growth = {blocks_for(n + drafts, size) - blocks_for(n, size) for n in range(1, 501)}
        assert (max(growth) <= 1) == (drafts <= size)


@pytest.mark.parity("F328", "F342", scenario="LB-05")
def test_release_order_decides_the_next_blocks() -> None:
    cache, pool = lab_at_eleven(2)
    commit_at_twelve(cache)
    forward = BlockPool(8, 1, "fifo")
    forward.allocate(7)
    forward.free([7])
    forward.free([3, 4, 5])  # a table walked from its front
    assert forward.free_ids() == [7, 3, 4, 5] and forward.allocate(2) == [7, 3]
    cache.remove(2)  # walks it from its back
    assert pool.free_ids() == [7, 5, 4, 3] and pool.allocate(2) == [7, 5]


# -- pools with a null block ------------------------------------------------------------------------------------------


@pytest.mark.parity("F326", scenario="DP-01")
def test_block_zero_is_never_issued() -> None:
    with pytest.raises(ValueError, match="nothing to issue"):
        BlockPool(1)
    assert BlockPool(2).free_ids() == [1]
    pool = BlockPool(8)
    assert pool.usable == 7 and pool.allocate(7) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


@pytest.mark.parity("F330", "F331", "F131", "F132", scenario="DP-02")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.pin(0), r"block 0 is outside \[1, 4\)"),
        (lambda pool: pool.pin(4), r"block 4 is outside \[1, 4\)"),
        (lambda pool: pool.pin(-1), "block -1 is outside"),
        (lambda pool: pool.pin(3), "try to pin free block 3"),
        (lambda pool: pool.free([0]), "block 0 is outside"),
        (lambda pool: pool.free([4]), "block 4 is outside"),
        (lambda pool: pool.free([3]), "ref_count corrupted: block 3"),
        (lambda pool: pool.free([1, 1]), "listed twice"),
        (lambda pool: pool.free([1, 2, 3]), "ref_count corrupted: block 3"),
    ],
)
def test_a_wrong_pin_or_free_is_refused_and_changes_nothing(call: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ContractViolation, match=message):
        call(pool)
    assert [pool.owner_count(b) for b in (1, 2, 3)] == [1, 1, 0] and pool.free_ids() == [3]


@pytest.mark.parity("F328", "F331", scenario="DP-03")
def test_a_block_returns_to_the_tail_only_with_its_last_owner() -> None:
    pool = BlockPool(4)
    counts = []
    assert pool.allocate(1) == [1]
    counts.append(pool.owner_count(1))
    for _ in range(2):
        pool.pin(1)
        counts.append(pool.owner_count(1))
    for _ in range(3):
        assert pool.free_ids() == [2, 3]
        pool.free([1])
        counts.append(pool.owner_count(1))
    assert counts == [1, 2, 3, 2, 1, 0] and pool.free_ids() == [2, 3, 1]
    with pytest.raises(ContractViolation, match="ref_count corrupted"):
        pool.free([1])


@pytest.mark.parametrize("order", ["fifo", "lowest"])
def test_reset_needs_every_block_back(order: str) -> None:
    pool = BlockPool(4, 1, order)
    pool.allocate(2)
    pool.free([1])
    with pytest.raises(ContractViolation, match="in use when reset"):
        pool.reset()
    pool.free([2])
    pool.reset()
    assert pool.free_ids() == [1, 2, 3]


@pytest.mark.parity("F327", scenario="DP-05")
def test_a_pool_says_now_later_or_never() -> None:
    pool = BlockPool(8)
    assert pool.can_allocate(4) is OK and pool.can_allocate(7) is OK and pool.can_allocate(8) is NEVER
    pool.allocate(4)
    assert pool.can_allocate(3) is OK and pool.can_allocate(4) is LATER and pool.can_allocate(7) is LATER
    assert pool.can_allocate(8) is NEVER
    # C01: the same rule with ids from 0.
    zero = BlockPool(7, 0)
    assert zero.can_allocate(7) is OK and zero.can_allocate(8) is NEVER


@pytest.mark.parity("F337", scenario="DP-08")
@pytest.mark.parametrize(
    ("length", "inflight", "drafts", "blocks"),
    [(120, 0, 0, 1), (120, 6, 0, 1), (120, 6, 5, 2), (117, 6, 5, 1), (128, 12, 5, 2), (129, 0, 0, 2)],
)
def test_blocks_cover_length_in_flight_and_drafts(length: int, inflight: int, drafts: int, blocks: int) -> None:
    cache = PagedCache(BlockPool(8), 128)
    target = length + inflight + drafts
    assert blocks_for(target, 128) == blocks
    assert cache.blocks_to_add(demand(cache, 1, target, length=length)) == blocks


@pytest.mark.parity("F339", "F154", scenario="DP-13")
def test_a_table_grows_for_drafts_and_gives_the_surplus_to_the_free_tail() -> None:
    cache = PagedCache(BlockPool(8), 128)
    advance(cache, demand(cache, 1, 250))
    assert blocks_of(cache, 1) == [1, 2]
    reservation = cache.reserve([demand(cache, 1, 250 + 6 + 5, length=250)])
    assert blocks_of(cache, 1) == [1, 2, 3]
    reservation.commit([251])
    assert blocks_of(cache, 1) == [1, 2] and cache.pool.free_ids() == [4, 5, 6, 7, 3]


@pytest.mark.parity("F329")
def test_pool_operations_do_not_look_at_the_rest_of_the_pool() -> None:
    """A pool of a million ids looks at as many of them as one of eight."""

    def places_of(pool: BlockPool) -> list[int]:
        owners = watch_owners(pool)
        blocks = pool.allocate(3)
        pool.pin(blocks[0])
        pool.free(blocks[::-1])
        pool.free(blocks[:1])
        return owners.places

    assert places_of(BlockPool(1_000_000)) == places_of(BlockPool(8))


# -- a pool from id 0 on (lowest, B = 4) ------------------------------------------------------------------------------


def cache_from_zero(blocks: int) -> PagedCache:
    return PagedCache(BlockPool(blocks, 0, "lowest"), 4)


@pytest.mark.parity("F128", "F130", scenario="BP-01")
def test_five_slots_take_two_blocks() -> None:
    cache = cache_from_zero(4)
    advance(cache, demand(cache, 1, 5))
    table = cache.table(1)
    assert table is not None and table.blocks == [0, 1] and table.used_slots() == [4, 1]
    assert cache.pool.available == 2


@pytest.mark.parity("F130", scenario="BP-02")
def test_reserved_blocks_consume_capacity_and_hold_no_slot() -> None:
    cache = cache_from_zero(4)
    reservation = cache.reserve([demand(cache, 1, 5)])
    table = reservation.rows[0].table
    assert cache.pool.available == 2 and table.num_computed_tokens == 0 and table.used_slots() == []
    reservation.commit([0])
    assert cache.table(1) is table and table.used_slots() == [0, 0]
    used = []
    for length in range(1, 6):
        advance(cache, demand(cache, 1, length, length=5))
        used.append(table.used_slots())
    assert used == [[1, 0], [2, 0], [3, 0], [4, 0], [4, 1]] and cache.pool.available == 2


@pytest.mark.parity("F129", scenario="BP-03, BP-04")
def test_an_allocation_is_all_or_nothing() -> None:
    full = cache_from_zero(3)
    advance(full, demand(full, 1, 12))
    assert full.pool.available == 0
    fresh = cache_from_zero(3)
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 free of 3"):
        fresh.reserve([demand(fresh, 1, 13)])
    assert fresh.pool.available == 3 and fresh.table(1) is None
    fresh.check_integrity()
    held = cache_from_zero(4)
    advance(held, demand(held, 1, 8))
    with pytest.raises(OutOfBlocks):
        held.reserve([demand(held, 2, 12)])
    assert held.pool.available == 2
    held.check_integrity()


@pytest.mark.parity("F131", "F132", scenario="BP-05")
def test_a_wrong_free_leaves_the_pool_unchanged() -> None:
    pool = BlockPool(2, 0, "lowest")
    for wrong in ([None], [5], [0]):
        with pytest.raises((ContractViolation, TypeError)):
            pool.free(wrong)  # type: ignore[arg-type]
        assert pool.available == 2
    pool = BlockPool(4, 0, "lowest")
    pool.allocate(1)
    with pytest.raises(ContractViolation, match="listed twice"):
        pool.free([0, 0])
    assert pool.available == 3
    pool.free([0])
    with pytest.raises(ContractViolation, match="no owner to drop"):
        pool.free([0])
    assert pool.available == 4


@pytest.mark.parity("F128", "F337", scenario="BP-06")
def test_a_length_needs_the_blocks_that_it_fills_or_begins() -> None:
    assert [blocks_for(n, 4) for n in (0, 1, 3, 4, 5, 32)] == [0, 1, 1, 1, 2, 8]
    for n in range(1, 200):
        assert 0 <= blocks_for(n, 4) * 4 - n <= 3


@pytest.mark.parity("F127", scenario="BP-07")
def test_a_block_has_its_own_slots_and_takes_no_more_than_those() -> None:
    cache = cache_from_zero(4)
    advance(cache, demand(cache, 7, 12))  # takes 0, 1, 2
    advance(cache, demand(cache, 1, 2))
    table = cache.table(1)
    assert table is not None and table.blocks == [3]
    assert [table.slot(p) for p in (0, 1)] == [12, 13]
    advance(cache, demand(cache, 1, 4))
    with pytest.raises(OutOfBlocks):
        cache.reserve([demand(cache, 1, 5)])
    assert table.used_slots() == [4]
    table.num_computed_tokens = 5
    with pytest.raises(ContractViolation, match="5 positions in 1 blocks"):
        cache.check_integrity()


@pytest.mark.parity("F126")
def test_a_position_lives_in_its_blocks_entry_at_its_offset() -> None:
    """Gather through a shuffled table gives the sequence back."""
    table = BlockTable(4)
    table.blocks = [6, 1, 3]
    memory = np.full(8 * 4, -1)
    for position in range(10):
        memory[table.slot(position)] = 100 + position
    assert [table.slot(p) for p in (0, 3, 4, 9)] == [24, 27, 4, 13]
    assert [int(memory[table.blocks[p // 4] * 4 + p % 4]) for p in range(10)] == list(range(100, 110))


# -- block tables as the decoder sees them ----------------------------------------------------------------------------


@pytest.mark.parity("F134", "F136", scenario="RS-04")
def test_reserved_blocks_are_shown_behind_committed_ones_before_commit() -> None:
    cache = cache_from_zero(4)
    advance(cache, demand(cache, 1, 4))
    reservation = cache.reserve([demand(cache, 1, 5), demand(cache, 2, 1)])
    mirror = TableMirror(3)
    x, y = (mirror.sync(row.demand.request_id, row.table) for row in reservation.rows)
    rows = mirror.gather([y, x], 3)
    assert rows.dtype == np.int32 and rows.tolist() == [[2, -1, -1], [0, 1, -1]]
    assert reservation.rows[0].table.count == 1 and cache.table(2) is None
    # A rolled-back step leaves nothing of itself in the mirror.
    reservation.release()
    table = cache.table(1)
    assert table is not None
    assert mirror.gather([mirror.sync(1, table)], 3).tolist() == [[0, -1, -1]]


@pytest.mark.parity("F135")
def test_rows_of_the_table_follow_the_packed_rows_not_residency() -> None:
    """X became resident before Y; a step that packs (Y, X) shows Y's blocks in row 0."""
    room = OpenedEngine(num_blocks=8, **LOWEST)
    x, y = room.resident([5, 9, 13, 21]), room.resident([7, 2])
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [x.id, y.id]
    plan.rows.reverse()
    plan.rows[0].offset, plan.rows[1].offset = 0, 1
    reservation = room.cache.reserve([row.demand for row in plan.rows])
    packed = StepPacker(room.cache, 4).pack(plan, reservation)
    assert packed.block_table.tolist() == [[*room.blocks(y), -1], room.blocks(x)]
    assert packed.past_sequence_lengths.tolist() == [2, 5]
    reservation.release()


@pytest.mark.parity("F137")
def test_pools_are_allocated_once_and_only_tables_change() -> None:
    room = OpenedEngine(num_blocks=16, **FIFO)
    address = room.decoder.cache.__array_interface__["data"]
    room.add([5, 9, 13], max_generated_tokens=50, ignore_eos=True)
    room.run_out()
    assert len(room.decoder.steps) == 50
    assert room.decoder.cache.__array_interface__["data"] == address
    assert room.decoder.cache.shape == (17, 4)  # the null block included


@pytest.mark.parity("F133")
def test_a_block_is_free_idle_or_owned_and_its_count_is_the_sum_of_its_holders() -> None:
    manager = CacheManager(6, 4, 4)
    reservation = manager.reserve([demand(manager.paged, 1, 8)])
    reservation.commit([8])
    manager.index_full_blocks(1, b"", list(range(8)), 0)
    manager.fork(1, 2, 8)
    assert [manager.pool.owner_count(b) for b in (1, 2)] == [3, 3]  # two tables and the index
    manager.check_integrity()
    manager.remove(1)
    manager.remove(2)
    assert [manager.pool.owner_count(b) for b in (1, 2)] == [1, 1]
    assert (manager.pool.free_count, manager.pool.idle_count) == (4, 2)
    manager.check_integrity()
