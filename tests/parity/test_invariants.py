"""The integrity sweep finds each violation (base: B = 4, 4 blocks; X {0, 1}, 5 positions; Y {2}, 4)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.block_table import BlockTable
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.requests.record import RequestStatus, TokenHistory
from tests.support.engine_room import LOWEST, OpenedEngine, advance, demand
from tests.support.engine_view import free_list, owners_of, tables_of, view

X, Y = 1, 2


def base() -> PagedCache:
    cache = PagedCache(BlockPool(4, 0, "lowest"), 4)
    advance(cache, demand(cache, X, 5), demand(cache, Y, 4))
    assert (tables_of(cache)[X].blocks, tables_of(cache)[Y].blocks, cache.pool.free_ids()) == ([0, 1], [2], [3])
    return cache


@pytest.mark.parity("F181", "F183", "F184", scenario="IN-01")
def test_sound_states_pass_the_check() -> None:
    cache = base()
    cache.check_integrity()
    reservation = cache.reserve([demand(cache, X, 9)])
    assert cache.pool.free_count == 0
    cache.check_integrity()
    reservation.commit([9])
    cache.check_integrity()
    initial = PagedCache(BlockPool(1, 0, "lowest"), 4)
    initial.reserve([demand(initial, X, 1)])
    initial.check_integrity()


def give_back_an_owned_block(cache: PagedCache) -> None:
    free_list(cache.pool).append(2)


def lose_a_free_block(cache: PagedCache) -> None:
    free_list(cache.pool).clear()


def free_a_block_twice(cache: PagedCache) -> None:
    free_list(cache.pool).append(3)


def own_an_unknown_block(cache: PagedCache) -> None:
    tables_of(cache)[Y].blocks = [9]


def own_a_negative_block(cache: PagedCache) -> None:
    tables_of(cache)[Y].blocks = [-1]


def list_a_block_twice(cache: PagedCache) -> None:
    tables_of(cache)[X].blocks = [0, 0]


def own_anothers_block(cache: PagedCache) -> None:
    tables_of(cache)[Y].blocks = [1]


def use_more_than_it_owns(cache: PagedCache) -> None:
    tables_of(cache)[Y].num_computed_tokens = 5


def own_fewer_columns(cache: PagedCache) -> None:
    tables_of(cache)[X].blocks = [0]


def miscount_an_owner(cache: PagedCache) -> None:
    owners_of(cache.pool)[0] = 2


def add_a_table_of_blocks_of_others(cache: PagedCache) -> None:
    table = BlockTable(4)
    table.blocks, table.count, table.num_computed_tokens, table.resident = [0, 1], 2, 5, True
    tables_of(cache)[7] = table


def reserve_without_a_step(cache: PagedCache) -> None:
    tables_of(cache)[X].blocks += cache.pool.allocate(1)


def keep_a_provisional_table(cache: PagedCache) -> None:
    tables_of(cache)[7] = BlockTable(4)


def issue_to_nobody(cache: PagedCache) -> None:
    cache.pool.allocate(1)


def share_a_tail_that_is_written_to(cache: PagedCache) -> None:
    cache.fork(X, 7, 5)
    tables_of(cache)[X].forked = False


@pytest.mark.parity("F181", "F182", "F183", "F184", scenario="IN-02")
@pytest.mark.parametrize(
    ("violate", "message"),
    [
        (give_back_an_owned_block, r"2 free \+ 0 idle \+ 3 owned != 4"),
        (lose_a_free_block, r"0 free \+ 0 idle \+ 3 owned != 4"),
        (free_a_block_twice, r"2 free \+ 0 idle \+ 3 owned != 4"),
        (own_an_unknown_block, r"block 9 is outside \[0, 4\)"),
        (own_a_negative_block, r"block -1 is outside \[0, 4\)"),
        (list_a_block_twice, "listed twice"),
        (own_anothers_block, "block 1 has 1 owners, its holders say 2"),
        (use_more_than_it_owns, "5 positions in 1 blocks"),
        (own_fewer_columns, "2 committed blocks of 1"),
        (miscount_an_owner, "block 0 has 2 owners, its holders say 1"),
        (add_a_table_of_blocks_of_others, "block 0 has 1 owners, its holders say 2"),
        (reserve_without_a_step, "no step is live"),
        (keep_a_provisional_table, "no step is live"),
        (issue_to_nobody, "block 3 has 1 owners, its holders say 0"),
        (share_a_tail_that_is_written_to, "its last block has other owners, and it is no fork"),
    ],
)
def test_each_violation_of_an_invariant_is_found(violate: Callable[[PagedCache], None], message: str) -> None:
    cache = base()
    violate(cache)
    with pytest.raises(ContractViolation, match=message):
        cache.check_integrity()


def reserved_block_without_a_row(cache: PagedCache, row: Any) -> None:
    row.table.blocks.pop()


def row_that_names_a_block_not_reserved(cache: PagedCache, row: Any) -> None:
    row.table.blocks[-1] = 2


def reserved_block_of_another(cache: PagedCache, row: Any) -> None:
    tables_of(cache)[Y].blocks = [3]


def lost_copy_source(cache: PagedCache, row: Any) -> None:
    cache.pool.free([2])


@pytest.mark.parity("F184", scenario="IN-03")
@pytest.mark.parametrize(
    "violate",
    [
        reserved_block_without_a_row,
        row_that_names_a_block_not_reserved,
        reserved_block_of_another,
        lost_copy_source,
    ],
)
def test_reserved_blocks_belong_to_exactly_one_row(violate: Callable[[PagedCache, Any], None]) -> None:
    cache = base()
    reservation = cache.reserve([demand(cache, X, 9)])
    violate(cache, reservation.rows[0])
    with pytest.raises(ContractViolation):
        cache.check_integrity()


@pytest.mark.parity("F186", scenario="IN-05")
@pytest.mark.parametrize(
    ("current", "processed", "sound"),
    [(10, 12, False), (10, -1, False), (10, 9, True), (10, 10, True)],
)
def test_processed_never_passes_the_current_length(current: int, processed: int, sound: bool) -> None:
    """TurnComplete may have one unprocessed token (length finish) or none (EOS finish)."""
    room = OpenedEngine(**LOWEST)
    if processed == current:
        room.decoder.choose = lambda sequence: 1
    request = room.dormant([5] * (current if processed == current else current - 1))
    assert request.current_length == current
    record = room.record(request)
    if sound:
        assert record.num_computed_tokens == processed
        room.engine.check_integrity()
        return
    record.num_computed_tokens = processed
    with pytest.raises(ContractViolation, match=f"processed {processed} of {current}"):
        room.engine.check_integrity()


@pytest.mark.parity("F187", "F182", scenario="IN-06")
def test_a_table_without_a_request_is_found() -> None:
    room = OpenedEngine(**LOWEST)
    request = room.resident([5, 9])
    del view(room.engine).requests.records[request.id]
    with pytest.raises(ContractViolation, match="does not exist"):
        room.engine.check_integrity()
    view(room.engine).requests.records[request.id] = room.record(request)
    room.engine.check_integrity()


@pytest.mark.parity("F186", "F187")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_computed_tokens", 1, "not what its table says"),
        ("max_total", 2, "3 tokens, 2 allowed"),
        ("status", RequestStatus.CLOSED, "closed and still known"),
        ("status", RequestStatus.NEW, "never began a turn"),
    ],
)
def test_counters_and_states_that_contradict_memory_are_found(field: str, value: object, message: str) -> None:
    room = OpenedEngine(**LOWEST)
    record = room.record(room.resident([5, 9]))
    setattr(record, field, value)
    with pytest.raises(ContractViolation, match=message):
        room.engine.check_integrity()


@pytest.mark.parity("F187")
def test_a_queue_that_contradicts_the_states_is_found() -> None:
    room = OpenedEngine(**LOWEST)
    request = room.add([5, 9])
    del view(room.engine).requests.queue[request.id]
    with pytest.raises(ContractViolation, match="queued: False"):
        room.engine.check_integrity()
    view(room.engine).requests.queue[request.id] = room.record(request)
    room.step()
    view(room.engine).requests.queue[request.id] = room.record(request)
    with pytest.raises(ContractViolation, match="queued: True"):
        room.engine.check_integrity()


@pytest.mark.parity("F188")
def test_the_sweep_is_linear() -> None:
    """Counted in executed lines: ten times the residents, about ten times the work."""

    def lines_of(residents: int) -> int:
        room = OpenedEngine(num_blocks=4 * residents, max_batch_size=residents, prefix_reuse=True)
        for i in range(residents):
            room.add([2 + i % 60, 3, 4, 5, 6 + i // 60], ignore_eos=True)
        room.engine.run(2000)
        count = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            room.engine.check_integrity()
        finally:
            sys.settrace(None)
        return count

    small, large = lines_of(20), lines_of(200)
    assert large < 11 * small


class Untouched:
    """Stands for the table of an idle request: whoever looks at it fails."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"a step looked at {name} of an idle request's table")


@pytest.mark.parity("F146", "F188")
def test_a_step_looks_at_no_idle_request() -> None:
    """Nor do the statistics: what they cost does not grow with the sessions that rest."""
    room = OpenedEngine(num_blocks=400, max_batch_size=8, max_residents=48, prefix_reuse=True)
    idle = [room.dormant([2 + i, 3, 4, 5, 6]) for i in range(40)]
    running = [room.add([50 + i, 7, 8], ignore_eos=True) for i in range(4)]
    room.engine.run(64)
    untouched: Any = Untouched()
    tables = {request.id: tables_of(room.cache.paged)[request.id] for request in idle}
    for request in idle:
        dict.__setitem__(tables_of(room.cache.paged), request.id, untouched)
        room.record(request).history = untouched
    before = [request.num_computed_tokens for request in running]
    for _ in range(5):
        room.engine.run(64)
        room.engine.stats()
    assert [request.num_computed_tokens for request in running] == [length + 5 for length in before]
    for request_id, table in tables.items():
        dict.__setitem__(tables_of(room.cache.paged), request_id, table)
    for request in idle:
        room.record(request).history = TokenHistory()
        request.close()
