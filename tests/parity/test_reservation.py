"""Reserve, validate, commit, roll back: H (F138 to F155); unless stated lowest first, from id 0 on, B = 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_actor.decoding.packing import StepPacker
from engine_actor.errors import ContractViolation, EngineUnhealthy, OutOfBlocks, RetryableStepError
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.block_table import BlockTable
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.memory.reservation import Reservation, RowDemand
from engine_actor.requests.events import EventFlags
from engine_actor.requests.outcomes import StepOutcome
from tests.support.doubles import POISON, solo
from tests.support.engine_room import LOWEST, OpenedEngine, advance, demand, row_of
from tests.support.engine_view import owners_of, tables_of, view

X, Y, Z = 1, 2, 3


def cache_from_zero(blocks: int) -> PagedCache:
    return PagedCache(BlockPool(blocks, 0, "lowest"), 4)


def state_of(cache: PagedCache) -> object:
    tables = [(i, list(t.blocks), t.count, t.num_computed_tokens) for i, t in tables_of(cache).items() if t.resident]
    return tables, cache.pool.free_ids(), list(owners_of(cache.pool))


@pytest.mark.parity("F139", "F138", scenario="RS-01")
def test_ceilings_are_summed_per_request() -> None:
    cache = cache_from_zero(4)
    cache.reserve([demand(cache, X, 1), demand(cache, Y, 1)])
    assert cache.pool.available == 2 and cache.table(X) is None and cache.table(Y) is None
    cache.check_integrity()


@pytest.mark.parity("F129", "F139", scenario="RS-02")
def test_what_does_not_fit_as_a_whole_takes_nothing() -> None:
    cache = cache_from_zero(1)
    with pytest.raises(OutOfBlocks):
        cache.reserve([demand(cache, X, 1), demand(cache, Y, 1)])
    assert cache.pool.available == 1 and not list(cache.residents())
    cache.reserve([demand(cache, X, 1)]).commit([1])  # no reservation was left behind


@pytest.mark.parity("F141", scenario="RS-03")
def test_the_tail_of_the_last_block_is_filled_first() -> None:
    cache = cache_from_zero(2)
    advance(cache, demand(cache, X, 3))
    row = demand(cache, X, 4)
    assert cache.blocks_to_add(row) == 0
    advance(cache, row)
    table = cache.table(X)
    assert table is not None and table.used_slots() == [4] and cache.pool.available == 1


@pytest.mark.parity("F143", scenario="RS-05")
def test_release_is_idempotent_and_the_id_is_issued_again() -> None:
    cache = cache_from_zero(1)
    reservation = cache.reserve([demand(cache, X, 1)])
    block = reservation.rows[0].table.blocks[0]
    reservation.release()
    assert cache.pool.available == 1
    reservation.release()
    assert cache.pool.available == 1
    assert cache.reserve([demand(cache, Y, 1)]).rows[0].table.blocks == [block]


@pytest.mark.parity("F143", scenario="RS-06")
def test_commit_publishes_once() -> None:
    cache = cache_from_zero(2)
    reservation = advance(cache, demand(cache, X, 5))
    table = cache.table(X)
    assert table is not None and table.num_computed_tokens == 5 and table.used_slots() == [4, 1]
    again: list[Callable[[], None]] = [
        lambda: reservation.commit([5]), lambda: reservation.validate([5]), reservation.release,
    ]  # fmt: skip
    for call in again:
        with pytest.raises(ContractViolation, match="a committed reservation"):
            call()
    assert table.num_computed_tokens == 5 and cache.pool.available == 0


@pytest.mark.parity("F142", "F106", scenario="RS-07")
def test_the_whole_prompt_is_reserved_at_its_first_chunk() -> None:
    cache = cache_from_zero(3)
    advance(cache, demand(cache, X, 2, length=9))
    table = cache.table(X)
    assert table is not None
    assert (len(table.blocks), cache.pool.available, table.num_computed_tokens) == (3, 0, 2)
    row = demand(cache, X, 6, length=9)
    assert cache.blocks_to_add(row) == 0
    advance(cache, row)
    assert (len(table.blocks), table.num_computed_tokens) == (3, 6)


@pytest.mark.parity("F111", "F112", "F140", "F152", scenario="RS-11")
def test_a_plan_that_contradicts_the_tables_is_refused_and_takes_nothing() -> None:
    cache = cache_from_zero(4)
    advance(cache, demand(cache, X, 4))
    before = state_of(cache)
    wrong: list[tuple[list[RowDemand], str]] = [
        ([row_of(X, False, 4, 3, 4)], "target 3 < committed 4"),
        ([row_of(X, True, 0, 1, 1)], "marked new but is resident"),
        ([row_of(Y, False, 0, 1, 1)], "marked resident but is not"),
        ([demand(cache, X, 5), demand(cache, X, 5)], "twice in one step"),
        ([row_of(X, False, 3, 5, 5)], "plan says 3, table 4"),
        ([row_of(Y, True, 4, 5, 5)], "plan says 4, table 0"),
        ([row_of(X, False, 4, 5, 5, (0,))], "cannot adopt"),
        ([demand(cache, X, 5), row_of(Y, True, 4, 5, 5, (3,))], "try to pin free block 3"),
    ]
    for rows, message in wrong:
        with pytest.raises(ContractViolation, match=message):
            cache.reserve(rows)
        assert state_of(cache) == before
        cache.check_integrity()
    advance(cache, demand(cache, X, 5))


@pytest.mark.parity("F138", "F144")
def test_a_reservation_leaves_committed_tables_alone_and_its_release_returns_all() -> None:
    cache = cache_from_zero(6)
    advance(cache, demand(cache, X, 4), demand(cache, Y, 3))
    before = state_of(cache)
    reservation = cache.reserve([demand(cache, Y, 9), demand(cache, Z, 5)])
    cache.check_integrity()
    x, y = cache.table(X), cache.table(Y)
    assert x is not None and y is not None and cache.table(Z) is None
    assert (x.count, x.num_computed_tokens, y.count, y.num_computed_tokens) == (1, 4, 1, 3)
    assert (cache.pool.available, cache.resident_count, list(cache.residents())) == (0, 2, [X, Y])
    reservation.release()
    assert state_of(cache) == before
    cache.check_integrity()


@pytest.mark.parity("F129", "F138")
@pytest.mark.parametrize("failing", ["pool", "room", "pin"])
def test_a_reservation_that_fails_owns_nothing_of_the_prefixes_that_it_found(failing: str) -> None:
    """Blocks that new rows adopt are pinned before others are taken, and given back where these can't be had."""

    def make_room(_: int) -> None:
        if failing == "room":
            raise RuntimeError("no room")

    cache = PagedCache(BlockPool(6, 0, "lowest"), 4, make_room)
    shared = cache.pool.allocate(2)  # somebody holds them: the prefix index, or another request
    before = state_of(cache)
    adopting = [row_of(X, True, 8, 9, 20, (0, 1)), row_of(Y, True, 4, 5, 12, (5,) if failing == "pin" else (0,))]
    with pytest.raises(RuntimeError if failing == "room" else OutOfBlocks if failing == "pool" else ContractViolation):
        cache.reserve(adopting)
    assert state_of(cache) == before
    cache.pool.free(shared)
    assert cache.pool.free_count == 6
    cache.check_integrity()


@pytest.mark.parity("F151", "F148")
def test_one_reservation_lives_at_a_time() -> None:
    cache = cache_from_zero(6)
    reservation = cache.reserve([demand(cache, X, 4)])
    with pytest.raises(ContractViolation, match="second reservation"):
        cache.reserve([demand(cache, Y, 4)])
    reservation.release()
    cache.reserve([demand(cache, Y, 4)])


@pytest.mark.parity("F145")
def test_validation_is_pure_and_repeatable() -> None:
    cache = cache_from_zero(6)
    advance(cache, demand(cache, X, 3))
    reservation = cache.reserve([demand(cache, X, 6), demand(cache, Y, 2)])
    before = state_of(cache), cache.changes
    reservation.validate([6, 2])
    reservation.validate([6, 2])
    reservation.validate([4, 0])  # a narrower boundary is fine
    assert (state_of(cache), cache.changes) == before
    for boundaries in ([7, 2], [2, 2], [6], [6, 2, 1], [6, 3], [6, -1]):
        with pytest.raises(ContractViolation):
            reservation.validate(boundaries)
    reservation.commit([6, 2])


def grow_pool(cache: PagedCache) -> None:
    cache.pool.allocate(1)


def replace_omitted_table(cache: PagedCache) -> None:
    table = BlockTable(4)
    table.blocks, table.count, table.num_computed_tokens, table.resident = tables_of(cache)[Y].blocks, 1, 4, True
    tables_of(cache)[Y] = table


def advance_omitted_table(cache: PagedCache) -> None:
    tables_of(cache)[Y].num_computed_tokens += 1


def advance_planned_table(cache: PagedCache) -> None:
    tables_of(cache)[X].num_computed_tokens += 1


def remap_omitted_table(cache: PagedCache) -> None:
    tables_of(cache)[Y].blocks[0] = 5
    tables_of(cache)[Y].epoch += 1


def add_a_table(cache: PagedCache) -> None:
    tables_of(cache)[9] = BlockTable(4)


TAMPERINGS = [
    grow_pool,
    replace_omitted_table,
    advance_omitted_table,
    advance_planned_table,
    remap_omitted_table,
    add_a_table,
]


@pytest.mark.parity("F145", "F146", "F147", "F148", "F149", scenario="RS-12")
@pytest.mark.parametrize("tamper", TAMPERINGS)
@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_published_over_memory_that_moved(tamper: Callable[[PagedCache], None], late: bool) -> None:
    """`late`: the change comes between validation and publishing, so publishing itself has to look again."""
    cache = cache_from_zero(6)
    advance(cache, demand(cache, X, 4), demand(cache, Y, 3))
    reservation = cache.reserve([demand(cache, X, 5)])
    if late:
        reservation.validate([5])
    tamper(cache)
    with pytest.raises(ContractViolation, match="changed while a step held a reservation"):
        (reservation.commit if late else reservation.validate)([5])
    table = cache.table(X)
    assert table is not None and table.count == 1


@pytest.mark.parity("F148", "F150")
@pytest.mark.parametrize(
    "call",
    [lambda c: c.remove(Y), lambda c: c.truncate(Y, 1), lambda c: c.fork(Y, Z, 1)],
)
def test_tables_cannot_change_while_a_step_is_live(call: Callable[[PagedCache], Any]) -> None:
    cache = cache_from_zero(6)
    advance(cache, demand(cache, X, 4), demand(cache, Y, 3))
    reservation = cache.reserve([demand(cache, X, 5)])
    before = state_of(cache)
    with pytest.raises(ContractViolation, match="while a step holds a reservation"):
        call(cache)
    assert state_of(cache) == before
    reservation.commit([5])
    call(cache)  # afterwards it can
    cache.check_integrity()


@pytest.mark.parity("F150")
def test_occupancy_has_no_setters() -> None:
    pool = BlockPool(4)
    for name in ("usable", "free_count", "idle_count", "available"):
        with pytest.raises(AttributeError):
            setattr(pool, name, 1)
    with pytest.raises(AttributeError):
        cache_from_zero(4).resident_count = 1  # type: ignore[misc]


@pytest.mark.parity("F149")
def test_a_removed_and_readmitted_request_has_another_table() -> None:
    """A mirror that knew the old table does not take the new one for it, even with the same blocks."""
    room = OpenedEngine(num_blocks=16, **LOWEST)
    request = room.resident([5, 9, 13], max_generated_tokens=20)
    old = room.cache.table(request.id)
    view(room.engine).preempt(request)
    room.step()
    new = room.cache.table(request.id)
    assert old is not new and new is not None and new.blocks[0] == 0
    room.run_out()
    assert room.tokens[request.id] == solo([5, 9, 13], 20)


@pytest.mark.parity("F154")
@pytest.mark.parametrize(("accepted", "blocks", "free"), [(0, 3, [7]), (1, 4, []), (2, 4, [])])
def test_a_draft_step_is_narrowed_to_what_was_accepted(accepted: int, blocks: int, free: list[int]) -> None:
    """11 tokens + 2 drafts take a fourth block; 12 positions (nothing accepted) do not need it."""
    cache = PagedCache(BlockPool(8, 1, "fifo"), 4)
    advance(cache, demand(cache, X, 11))
    cache.pool.allocate(3)
    reservation = cache.reserve([demand(cache, X, 14, length=12)])
    assert cache.pool.free_ids() == []
    reservation.validate([12 + accepted])
    reservation.commit([12 + accepted])
    table = cache.table(X)
    assert table is not None and len(table.blocks) == blocks and cache.pool.free_ids() == free
    assert table.num_computed_tokens == 12 + accepted


@pytest.mark.parity("F352")
def test_a_boundary_advances_by_what_was_kept_not_by_what_was_written() -> None:
    cache = PagedCache(BlockPool(40, 1, "fifo"), 4)
    advance(cache, demand(cache, X, 100))
    reservation = cache.reserve([demand(cache, X, 104, length=101)])
    reservation.validate([102])
    reservation.commit([102])
    table = cache.table(X)
    assert table is not None and table.num_computed_tokens == 102


@pytest.mark.parity("F353")
def test_rejected_rows_stay_written_and_invalid_until_they_are_overwritten() -> None:
    cache = PagedCache(BlockPool(8, 1, "fifo"), 4)
    memory = {}

    def step(target: int, whole: int, kept: int, mark: str) -> None:
        reservation = cache.reserve([demand(cache, X, target, length=whole)])
        table = reservation.rows[0].table
        for position in range(table.num_computed_tokens, target):
            memory[table.slot(position)] = f"{mark}{position}"
        reservation.commit([kept])

    step(9, 9, 9, "a")
    step(12, 10, 10, "draft")
    table = cache.table(X)
    assert table is not None
    assert memory[table.slot(10)] == "draft10" and table.num_computed_tokens == 10 and table.used_slots() == [4, 4, 2]
    step(12, 12, 12, "b")
    assert [memory[table.slot(p)] for p in (9, 10, 11)] == ["draft9", "b10", "b11"]


@pytest.mark.parity("F147")
def test_publishing_issues_nothing_and_grows_no_table() -> None:
    cache = cache_from_zero(6)
    advance(cache, demand(cache, X, 4))
    reservation = cache.reserve([demand(cache, X, 9), demand(cache, Y, 5)])
    tables = {row.demand.request_id: list(row.table.blocks) for row in reservation.rows}
    entries, generation = len(tables_of(cache)), cache.pool.generation
    cache.pool.allocate = lambda count: pytest.fail("publishing allocated")  # type: ignore[method-assign]
    reservation.commit([9, 5])
    assert {i: list(tables_of(cache)[i].blocks) for i in tables} == tables
    assert (len(tables_of(cache)), cache.pool.generation) == (entries, generation)


# -- through the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parity("F153")
def test_a_reservation_that_fails_after_a_plan_stops_the_engine() -> None:
    room = OpenedEngine()
    request = room.add([5, 9, 13])

    def fail(demands: object) -> Reservation:
        raise OutOfBlocks("injected")

    room.cache.paged.reserve = fail  # type: ignore[method-assign]
    events = room.engine.run(10)
    assert [(e.request_id, e.flags) for e in events] == [(request.id, EventFlags.TURN_FINISHED | EventFlags.FAILED)]
    assert "injected" in events[0].message
    assert room.engine.last_report.outcome is StepOutcome.EXECUTION_CONTRACT_FAILURE
    assert room.engine.metrics.reservation_failures == 1 and not room.decoder.steps
    with pytest.raises(EngineUnhealthy, match="injected"):
        room.engine.run(10)


@pytest.mark.parity("F146", "F148")
@pytest.mark.parametrize("tamper", [grow_pool, advance_omitted_table])
def test_memory_that_moves_during_a_step_stops_the_engine(tamper: Callable[[PagedCache], None]) -> None:
    room = OpenedEngine()
    first = room.dormant([5, 9, 13])
    omitted = room.dormant([7, 2, 20])
    assert (first.id, omitted.id) == (X, Y)
    first.begin_turn([3])
    forward = room.decoder.forward

    def forward_and_tamper(step: Any) -> Any:
        tamper(room.cache.paged)
        return forward(step)

    room.decoder.forward = forward_and_tamper  # type: ignore[method-assign]
    tokens = first.tokens
    events = room.engine.run(10)
    assert [e.request_id for e in events if e.flags & EventFlags.FAILED] == [X]
    assert first.tokens == tokens and first.num_computed_tokens == 3
    # Found in time to roll back, not while publishing.
    assert room.engine.last_report.outcome is StepOutcome.EXECUTION_CONTRACT_FAILURE
    assert room.engine.metrics.rollbacks == 1
    with pytest.raises(EngineUnhealthy):
        room.engine.run(10)


@pytest.mark.parity("F155")
def test_what_a_rolled_back_step_wrote_is_never_read() -> None:
    """The step fails after it wrote; its blocks are poisoned and handed to somebody else."""
    room = OpenedEngine(num_blocks=16)
    request = room.resident([5, 9, 13, 21], max_generated_tokens=20)  # its next step needs a second block
    room.decoder.fail_next = lambda: RetryableStepError("injected")
    other = room.add([7, 2, 20, 4, 6], max_generated_tokens=20)
    room.step()
    assert len(room.blocks(request)) == 1 and not room.blocks(other)
    for block in room.pool.free_ids():
        room.decoder.cache[block] = POISON
    room.run_out()
    assert room.tokens[request.id] == solo([5, 9, 13, 21], 20)
    assert room.tokens[other.id] == solo([7, 2, 20, 4, 6], 20)


@pytest.mark.parity("F152")
def test_tables_are_packed_only_for_rows_that_are_reserved() -> None:
    room = OpenedEngine()
    room.add([5, 9, 13])
    room.add([7, 2])
    plan = room.plan()
    reservation = room.cache.reserve([plan.rows[0].demand])
    with pytest.raises(ValueError, match="zip"):
        StepPacker(room.cache, 32).pack(plan, reservation)
    reservation.release()
