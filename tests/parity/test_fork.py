"""Forks share full blocks and copy a partly filled tail (fifo, first_id 1, B = 4)."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from engine_actor.errors import InvalidCall, RetryableStepError
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.memory.reservation import Reservation
from engine_actor.requests.outcomes import DeferralReason
from engine_actor.requests.record import RequestStatus
from engine_actor.requests.request import Request
from tests.support.doubles import next_token, solo
from tests.support.engine_room import FIFO, OpenedEngine, advance, demand

TEN = [5, 9, 13, 21, 30, 3, 2, 8, 4, 11]


def room_of(blocks: int, **config: Any) -> OpenedEngine:
    return OpenedEngine(num_blocks=blocks, **FIFO, **config)


def copies(room: OpenedEngine) -> tuple[tuple[int, int], ...]:
    """(source, destination) of the blocks that the last step copied."""
    return room.decoder.steps[-1].block_copies


def counts(room: OpenedEngine, *blocks: int) -> list[int]:
    return [room.pool.owner_count(b) for b in blocks]


def lab_parent(processed: int, blocks: int = 3) -> PagedCache:
    """The parent, request 1: table [1 .. blocks], `processed` valid positions, in a pool of ids 1 to 5."""
    cache = PagedCache(BlockPool(6, 1, "fifo"), 4)
    advance(cache, demand(cache, 1, processed, length=4 * blocks))
    return cache


def table_of(cache: PagedCache, request: int) -> list[int]:
    table = cache.table(request)
    assert table is not None
    return list(table.blocks)


# -- bare memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F343", "F344", "F345", scenario="LB-09, FK-01")
def test_a_partial_tail_is_copied_and_full_blocks_are_shared() -> None:
    for processed in (9, 10):
        cache = lab_parent(processed)
        cache.fork(1, 2, processed)
        pool = cache.pool
        assert [pool.owner_count(b) for b in (1, 2, 3)] == [2, 2, 2] and pool.free_ids() == [4, 5]
        reservation = cache.reserve([demand(cache, 2, processed + 1)])
        assert reservation.copies == ((3, 4),) and reservation.rows[0].table.blocks == [1, 2, 4]
        assert pool.owner_count(3) == 2  # the source stays pinned until the copy has been made
        cache.check_integrity()
        reservation.commit([processed + 1])
        assert [pool.owner_count(b) for b in (1, 2, 3, 4)] == [2, 2, 1, 1]
        assert table_of(cache, 1) == [1, 2, 3] and table_of(cache, 2) == [1, 2, 4]


@pytest.mark.parity("F345", scenario="LB-08, FK-05")
@pytest.mark.parametrize("parent_blocks", [3, 2])
def test_a_full_last_block_is_not_copied(parent_blocks: int) -> None:
    cache = lab_parent(8, parent_blocks)
    cache.fork(1, 2, 8)
    assert table_of(cache, 2) == [1, 2]
    assert [cache.pool.owner_count(b) for b in (1, 2)] == [2, 2]
    if parent_blocks == 3:
        assert cache.pool.owner_count(3) == 1  # the parent's own room is not shared
    reservation = cache.reserve([demand(cache, 2, 9)])
    assert reservation.copies == ()
    reservation.commit([9])
    cache.check_integrity()


@pytest.mark.parity("F344", scenario="FK-04")
def test_blocks_that_the_parent_only_reserved_are_not_shared() -> None:
    cache = lab_parent(10, 4)
    cache.fork(1, 2, 10)
    assert table_of(cache, 1) == [1, 2, 3, 4] and cache.pool.owner_count(4) == 1
    reservation = advance(cache, demand(cache, 2, 11))
    assert reservation.copies == ((3, 5),) and table_of(cache, 2) == [1, 2, 5]


@pytest.mark.parity("F345", "F339", scenario="FK-07")
@pytest.mark.parametrize(("processed", "copies", "keeps"), [(10, 1, 2), (8, 0, 2)])
def test_a_fork_that_goes_on_takes_the_rest_of_its_blocks_at_once(processed: int, copies: int, keeps: int) -> None:
    cache = PagedCache(BlockPool(9, 1, "fifo"), 4)
    advance(cache, demand(cache, 1, processed, length=12))
    cache.fork(1, 2, processed)
    row = demand(cache, 2, 17)
    assert cache.blocks_to_add(row) == 3
    reservation = advance(cache, row)
    assert reservation.copies == ((3, 4),)[:copies]
    assert table_of(cache, 2) == [*range(1, keeps + 1), 4, 5, 6]
    assert cache.pool.owner_count(3) == 1


@pytest.mark.parity("F349", scenario="LB-06, LB-07, LB-08, LB-09")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("processed", [8, 9, 10])
def test_a_source_that_is_released_before_its_copy_is_corrupted(processed: int, early: bool) -> None:
    """Token ids stand in for KV rows. The negative control shows that the check can see the corruption: of what is
    copied, and of nothing else."""
    pool = BlockPool(5, 1, "fifo")
    memory = np.zeros((5, 4), np.int64)
    parent = pool.allocate(3)
    for position in range(processed):
        memory[parent[position // 4], position % 4] = 100 + position
    for block in parent:
        pool.pin(block)
    child = [*parent[:2], *pool.allocate(1)]
    queued = [(parent[2], child[2])] if processed % 4 else []
    pool.free(parent[::-1])  # the parent finishes
    assert pool.free_ids() == []
    if early:
        pool.free([parent[2]])
        (block,) = pool.allocate(1)
        assert block == 3
        memory[block, :2] = 900, 901  # a writer that does not wait for the queue
    for source, destination in queued:
        memory[destination] = memory[source]
    if not early:
        pool.free([parent[2]])
        assert pool.free_ids() == [3]
    read = [int(memory[child[p // 4], p % 4]) for p in range(processed)]
    tail = [900, 901] if early else [108, 109]
    assert read == [*range(100, 108), *tail[: processed - 8]]


@pytest.mark.parity("F176")
def test_a_release_that_breaks_off_drops_no_share_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = lab_parent(10)
    for child in (2, 3):
        cache.fork(1, child, 10)
    reservation = cache.reserve([demand(cache, child, 11) for child in (2, 3)])
    assert reservation.copies == ((3, 4), (3, 5))
    free, freed = cache.pool.free, []

    def second_fails(blocks: list[int]) -> None:
        freed.append(list(blocks))
        if len(freed) == 2:
            raise RuntimeError("broken off")
        free(blocks)

    with monkeypatch.context() as patched:
        patched.setattr(cache.pool, "free", second_fails)
        with pytest.raises(RuntimeError, match="broken off"):
            reservation.release()
    reservation.abandon()
    assert freed == [[5], [4]] and cache.pool.owner_count(3) == 3
    assert [table_of(cache, request) for request in (1, 2, 3)] == [[1, 2, 3]] * 3


# -- through the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parity("F343", "F344", "F348", "F349", scenario="FK-01")
def test_the_copy_is_part_of_the_childs_first_step() -> None:
    room = room_of(5)
    parent = room.dormant(TEN)
    child = parent.fork()
    assert child.status is RequestStatus.IDLE and child.tokens == parent.tokens
    assert room.blocks(child) == room.blocks(parent) == [1, 2, 3] and counts(room, 1, 2, 3) == [2, 2, 2]
    child.begin_turn([7])
    during = []
    forward = room.decoder.forward

    def watch(step: Any) -> Any:
        during.append((step.block_copies, counts(room, 3)))
        return forward(step)

    room.decoder.forward = watch  # type: ignore[method-assign]
    room.step()
    assert during == [(((3, 4),), [2])]
    assert room.blocks(child) == [1, 2, 4] and counts(room, 1, 2, 3, 4) == [2, 2, 1, 1]


@pytest.mark.parity("F344", "F349", scenario="FK-02")
def test_a_child_without_a_free_block_waits_and_keeps_its_pins() -> None:
    room = room_of(5)
    other = room.resident([6])
    parent, filler = room.dormant(TEN[:6]), room.dormant(TEN[:5])
    assert room.pool.free_count == 0
    child = parent.fork()
    child.begin_turn([7])
    before, length = room.blocks(child), other.current_length
    room.step()
    (deferral,) = room.engine.last_report.deferrals
    assert (deferral.request_id, deferral.reason, deferral.missing_blocks) == (child.id, DeferralReason.BLOCKS, 1)
    assert copies(room) == () and other.current_length == length + 1
    assert room.blocks(child) == before and counts(room, *before) == [2, 2]
    filler.close()
    room.step()
    ((source, destination),) = copies(room)
    assert (source, destination) == (before[1], room.blocks(child)[1]) and counts(room, *before) == [2, 1]
    assert room.tokens[child.id] == [next_token([*parent.tokens, 7])]


@pytest.mark.parity("F342", "F349", scenario="FK-03")
def test_a_parent_that_goes_first_leaves_its_blocks_to_the_child() -> None:
    room = room_of(8)
    parent = room.dormant(TEN)
    free = room.pool.free_ids()
    child = parent.fork()
    history = child.tokens
    parent.close()
    assert counts(room, 1, 2, 3) == [1, 1, 1] and room.pool.free_ids() == free
    room.requests.append(child)
    child.begin_turn([7])
    room.step()
    # The only owner writes in place.
    assert copies(room) == () and room.blocks(child) == [1, 2, 3]
    assert room.tokens[child.id] == [next_token([*history, 7])]


@pytest.mark.parity("F346", scenario="FK-06")
def test_an_uncomputed_parent_cannot_be_forked() -> None:
    room = room_of(8)
    parent = room.add(TEN)
    with pytest.raises(InvalidCall, match="waiting cannot be forked"):
        parent.fork()
    parent.cancel_turn(1)
    with pytest.raises(InvalidCall, match="nothing was computed"):
        parent.fork()
    assert room.pool.free_count == 8 and room.engine.stats()["requests"] == 1


@pytest.mark.parity("F346", scenario="FK-10")
def test_the_childs_last_token_is_computed_again() -> None:
    room = room_of(8)
    room.decoder.choose = lambda sequence: 1
    parent = room.dormant(TEN)
    assert (parent.num_computed_tokens, parent.current_length) == (10, 10)
    child = parent.fork()
    assert child.num_computed_tokens == 9
    room.decoder.choose = next_token
    child.begin_turn([7])
    room.step()
    step = room.decoder.steps[-1]
    assert step.input_ids.tolist() == [TEN[9], 7] and step.past_sequence_lengths.tolist() == [9]
    assert step.block_copies == ((3, 4),) and room.blocks(child) == [1, 2, 4]
    assert room.tokens[child.id] == [next_token([*TEN, 7])]


@pytest.mark.parity("F342", "F343", scenario="FK-09")
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_fork_of_a_fork_survives_every_order_of_ends(order: tuple[int, ...]) -> None:
    room = room_of(12)
    parent = room.dormant(TEN)
    child = parent.fork()
    family: list[Request] = [parent, child, child.fork()]
    assert counts(room, 1, 2) == [3, 3]
    for i, which in enumerate(order):
        family[which].close()
        room.engine.check_integrity()
        for survivor in (family[k] for k in order[i + 1 :]):
            history = [*survivor.tokens, 7]
            survivor.begin_turn([7])
            survivor_events = [e for e in room.step() if e.token is not None]
            assert [e.token for e in survivor_events] == [next_token(history)]
            survivor.cancel_turn(survivor.turn_id)
            room.step()
    assert sorted(room.pool.free_ids()) == list(range(1, 13))


@pytest.mark.parity("F343", "F348")
def test_children_of_one_parent_copy_the_same_tail_in_one_step() -> None:
    """As n > 1 does: each child samples its own continuation from the shared history."""
    room = room_of(16)
    parent = room.dormant(TEN)
    children = [parent.fork() for _ in range(3)]
    for i, child in enumerate(children):
        child.begin_turn([7 + i])
    room.step()
    assert [source for source, _ in copies(room)] == [3, 3, 3]
    assert counts(room, 1, 2, 3) == [4, 4, 1]
    for _ in range(6):
        room.step()
    for i, child in enumerate(children):
        assert room.tokens[child.id] == solo([*parent.tokens, 7 + i], 7)


@pytest.mark.parity("F144", "F349")
def test_a_rolled_back_fork_step_leaves_parent_and_child_as_they_were() -> None:
    room = room_of(8)
    parent = room.dormant(TEN)
    child = parent.fork()
    child.begin_turn([7])
    before = room.blocks(child), counts(room, 1, 2, 3), sorted(room.pool.free_ids())
    room.decoder.fail_next = lambda: RetryableStepError("injected")
    room.step()
    assert (room.blocks(child), counts(room, 1, 2, 3), sorted(room.pool.free_ids())) == before
    room.step()
    assert room.tokens[child.id] == [next_token([*parent.tokens, 7])]
    parent.begin_turn([7])
    room.step()
    assert room.tokens[parent.id][-1] == next_token([*parent.tokens[:-1]])


@pytest.mark.parity("F176", "F349")
@pytest.mark.parametrize("fails_in", ["commit", "release"])
def test_a_step_that_breaks_off_keeps_no_share_of_the_block_it_copied(
    monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    room = room_of(8)
    parent = room.dormant(TEN)
    child = parent.fork()
    child.begin_turn([7])
    if fails_in == "release":
        room.decoder.fail_next = lambda: RetryableStepError("injected")

    def fail(*_: object) -> None:
        raise RuntimeError("broken off")

    with monkeypatch.context() as patched:
        patched.setattr(Reservation, fails_in, fail)
        room.engine.run(8)
    assert room.engine.fatal_error is not None
    room.cache.check_integrity()
    parent.close()
    child.close()
    assert room.pool.free_count == 8
    room.cache.check_integrity()


@pytest.mark.parity("F343")
def test_the_one_who_writes_first_copies_and_the_last_writes_in_place() -> None:
    room = room_of(8)
    parent = room.dormant(TEN)
    child = parent.fork()
    parent.begin_turn([7])
    room.step()
    assert copies(room) == ((3, 4),) and room.blocks(parent) == [1, 2, 4]
    parent.cancel_turn(2)
    room.step()
    child.begin_turn([9])
    room.step()
    assert copies(room) == () and room.blocks(child) == [1, 2, 3]
    assert room.tokens[child.id] == [next_token([*child.tokens[:11], 9])]


def test_a_block_that_is_still_written_to_is_never_indexed() -> None:
    """A parent that ended on a full, indexed block: its child starts at that block instead of copying it. Otherwise a
    child alone in a full pool would need a block more than its sequence has, for ever."""
    room = room_of(3, prefix_reuse=True)
    room.decoder.choose = lambda sequence: 1
    parent = room.dormant(TEN[:8])
    assert parent.num_computed_tokens == 8 and room.pool.is_indexed(room.blocks(parent)[1])
    child = parent.fork()
    assert child.num_computed_tokens == 4 and len(room.blocks(child)) == 1
    parent.close()
    room.engine.check_integrity()
    room.decoder.choose = next_token
    room.requests.append(child)
    child.begin_turn([7])
    room.step()
    assert room.tokens[child.id] == [next_token([*TEN[:8], 7])]
