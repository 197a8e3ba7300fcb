"""Recurrent states in slots (F333 to F349, as far as states go): read from one slot, written to another.

A step never writes into a committed slot, so what the documents clone for a fork is here read where it is (C18)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_actor.errors import ContractViolation, InvalidOption, OutOfBlocks, RetryableStepError
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.fixed_state import FixedStates
from engine_actor.memory.layout import PoolGeometry
from engine_actor.memory.sizing import blocks_in_bytes, blocks_in_memory, state_slots_for
from engine_actor.memory.step_reservation import StepReservation
from engine_actor.options import UNBOUNDED, RequestOptions
from engine_actor.requests.outcomes import DeferralReason
from engine_actor.requests.record import RequestRecord, RequestStatus
from engine_actor.requests.request import Request
from engine_actor.scheduling.admission import Admission
from tests.support.doubles import RecurrentDecoder, SyntheticDecoder, solo
from tests.support.engine_room import FIFO, OpenedEngine, row_of
from tests.support.engine_view import view
from tests.support.engines import engine_of

X, Y, Z = 1, 2, 3


def caches(blocks: int, slots: int, residents: int = 8) -> CacheManager:
    return CacheManager(blocks, 4, residents, state_slots=slots)


def step(cache: CacheManager, *rows: tuple[int, int]) -> StepReservation:
    """A whole step: (request, positions after it) for each row."""
    demands = []
    for request, target in rows:
        table = cache.table(request)
        committed = 0 if table is None else table.num_computed_tokens
        demands.append(row_of(request, table is None, committed, target, target))
    reservation = cache.reserve(demands)
    boundaries = [target for _, target in rows]
    reservation.commit(boundaries)
    cache.check_integrity()
    return reservation


def slot(cache: CacheManager, request: int) -> int:
    assert cache.states is not None
    table = cache.states.table(request)
    assert table is not None
    return table.slot


def blocks(cache: CacheManager, request: int) -> list[int]:
    table = cache.table(request)
    assert table is not None
    return list(table.blocks)


def counts(pool: BlockPool) -> dict[int, int]:
    return {i: pool.owner_count(i) for i in range(pool.first_id, pool.num_ids) if pool.owner_count(i)}


# -- pools and their sizes --------------------------------------------------------------------------------------------


@pytest.mark.parity("F333", "F189")
def test_a_second_pool_of_the_same_class_exists_only_for_models_with_a_state() -> None:
    assert type(caches(4, 3).states.pool) is type(caches(4, 3).pool) is BlockPool  # type: ignore[union-attr]
    assert caches(4, 0).states is None
    allocated: list[PoolGeometry] = []

    class Watched(RecurrentDecoder):
        def allocate(self, pools: PoolGeometry) -> None:
            allocated.append(pools)
            super().allocate(pools)

    engine = engine_of(Watched(), num_blocks=8, block_size=4, max_batch_size=2, max_residents=3)
    assert allocated == [PoolGeometry(9, 4, 6)]  # five usable slots and slot 0, which stands for zeros
    cache = view(engine).cache
    assert cache.states is not None and cache.states.pool.usable == 5
    assert cache.index is None  # a hit would need the state at its end


@pytest.mark.parity("F335", scenario="DP-06")
def test_no_pool_is_smaller_than_a_fifth_more_than_its_sequences() -> None:
    sizes = {1: 2, 4: 5, 5: 7, 8: 10, 16: 20, 32: 39, 64: 77, 100: 121}
    for sequences, ids in sizes.items():
        assert state_slots_for(0, sequences) + 1 == ids
        assert state_slots_for(sequences, sequences) == 2 * sequences >= ids - 1
    assert state_slots_for(3, 2) == 5
    assert all(int(n * 1.2) == n * 12 // 10 for n in range(4097))


@pytest.mark.parity("F336", "F010", scenario="DP-07")
def test_states_are_taken_from_memory_before_blocks() -> None:
    two_banks = 2 * (state_slots_for(0, 8) + 1) * 10_000
    assert blocks_in_bytes(1_000_000, 3_000, two_banks) == 266
    with pytest.raises(InvalidOption, match="which is one block"):
        blocks_in_bytes(1_000_000, 3_000, 1_000_000)
    assert blocks_in_memory(1_000_000, 2_000_000, 3_000, two_banks) == 266
    assert blocks_in_memory(1.0, 1_000_000, 3_000, two_banks) == 233


@pytest.mark.parity("F295", "F304")
def test_a_state_cannot_be_committed_at_a_prefix_so_there_are_no_drafts() -> None:
    decoder = RecurrentDecoder()
    object.__setattr__(decoder.manifest, "max_draft_tokens", 4)
    with pytest.raises(InvalidOption, match="max_draft_tokens must be 0"):
        engine_of(decoder, num_blocks=8)
    cache = caches(8, 3)
    reservation = cache.reserve([row_of(X, True, 0, 5, 2)])
    with pytest.raises(ContractViolation, match="a state at 5 cannot be committed at 3"):
        reservation.validate([3])
    reservation.release()


# -- admission --------------------------------------------------------------------------------------------------------


def record(request_id: int, tokens: int) -> RequestRecord:
    made = RequestRecord(request_id, RequestOptions(), 999)
    made.history.extend([5] * tokens)
    return made


@pytest.mark.parity("F334", "F338", "F103", scenario="DP-05")
@pytest.mark.parametrize(
    ("positions", "free_blocks", "free_slots", "answer"),
    [
        (12, 3, 0, DeferralReason.STATES),
        (12, 2, 1, DeferralReason.BLOCKS),
        (12, 2, 0, DeferralReason.STATES),
        (33, 3, 0, "never"),  # of 8 blocks: never wins over later
        (12, 3, 1, "ok"),
    ],
)
def test_blocks_and_a_slot_are_needed_together(positions: int, free_blocks: int, free_slots: int, answer: Any) -> None:
    cache = caches(8, 2)
    assert cache.states is not None
    cache.pool.allocate(8 - free_blocks)
    cache.states.pool.allocate(2 - free_slots)
    admission = Admission(cache, 8, UNBOUNDED, 0)
    admission.consider(record(X, positions))
    found = admission.selection
    if answer == "never":
        assert [r.id for r in found.unserviceable] == [X] and not found.deferrals
    elif answer == "ok":
        assert [r.id for r, _ in found.rows] == [X]
    else:
        assert [d.reason for d in found.deferrals] == [answer]


@pytest.mark.parity("F334", "F120")
def test_each_row_of_a_step_takes_a_slot() -> None:
    cache = caches(8, 2)
    admission = Admission(cache, 8, UNBOUNDED, 0)
    for request in (X, Y, Z):
        admission.consider(record(request, 3))
    assert [r.id for r, _ in admission.selection.rows] == [X, Y]
    assert [(d.request_id, d.reason) for d in admission.selection.deferrals] == [(Z, DeferralReason.STATES)]


@pytest.mark.parity("F338", "F334")
def test_a_prompt_takes_its_blocks_and_one_slot_at_its_first_chunk() -> None:
    room = OpenedEngine(RecurrentDecoder(), chunk_size=3, num_blocks=8)
    states = room.cache.states
    assert states is not None
    free = states.available
    request = room.add([5, 9, 13, 2, 4, 6, 8, 3, 7], max_generated_tokens=3)
    for done in (3, 6, 9):
        room.step()
        assert (len(room.blocks(request)), states.available) == (3, free - 1)
        assert states.owners() == {request.id: done}
    room.run_out()
    assert room.tokens[request.id] == solo([5, 9, 13, 2, 4, 6, 8, 3, 7], 3)


@pytest.mark.parity("F334", "F153")
def test_a_step_without_a_slot_takes_no_block_either() -> None:
    cache = caches(8, 1)
    with pytest.raises(OutOfBlocks):
        cache.reserve([row_of(X, True, 0, 4, 4), row_of(Y, True, 0, 4, 4)])
    cache.check_integrity()
    assert cache.pool.free_count == 8 and cache.available_slots == 1 and cache.resident_count == 0


# -- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F347", "F221", "F187")
def test_a_step_reads_one_slot_and_writes_another() -> None:
    cache = caches(8, 4)
    first = cache.reserve([row_of(X, True, 0, 3, 3), row_of(Y, True, 0, 2, 2)])
    assert first.state_slots == [(0, 1), (0, 2)]
    first.commit([3, 2])
    second = cache.reserve([row_of(Y, False, 2, 3, 3), row_of(X, False, 3, 4, 4)])
    assert second.state_slots == [(2, 3), (1, 4)]
    cache.check_integrity()
    second.commit([3, 4])
    assert cache.states is not None and cache.states.pool.free_ids() == [2, 1]
    assert cache.states.owners() == {X: 4, Y: 3}


@pytest.mark.parity("F143", "F144", "F229")
def test_a_rollback_keeps_every_state_and_gives_the_new_slots_back() -> None:
    cache = caches(8, 4)
    step(cache, (X, 3))
    reservation = cache.reserve([row_of(X, False, 3, 4, 4), row_of(Y, True, 0, 2, 2)])
    reservation.release()
    reservation.release()
    cache.check_integrity()
    assert cache.states is not None
    assert cache.states.owners() == {X: 3} and slot(cache, X) == 1 and cache.available_slots == 3


@pytest.mark.parity("F145", "F148")
def test_slots_that_move_during_a_step_are_noticed() -> None:
    cache = caches(8, 4)
    assert cache.states is not None
    reservation = cache.reserve([row_of(X, True, 0, 3, 3)])
    cache.states.pool.allocate(1)
    with pytest.raises(ContractViolation, match="state pool changed"):
        reservation.commit([3])
    table = cache.table(X)
    assert table is None  # the proof comes first, so no block was published


@pytest.mark.parity("F187", "F182")
def test_blocks_and_states_are_of_the_same_requests_at_the_same_boundary() -> None:
    cache = caches(8, 4)
    step(cache, (X, 3))
    assert cache.states is not None
    table = cache.states.table(X)
    assert table is not None
    table.num_computed_tokens = 2
    with pytest.raises(ContractViolation, match="blocks are valid up to"):
        cache.check_integrity()
    table.num_computed_tokens = 3
    cache.states.pool.pin(1)
    with pytest.raises(ContractViolation, match="block 1 has 2 owners"):
        cache.check_integrity()
    cache.states.pool.free([1])
    cache.states.remove(X)
    with pytest.raises(ContractViolation, match=r"states up to \{\}"):
        cache.check_integrity()


@pytest.mark.parity("F221", "F111")
def test_a_row_that_does_not_start_at_its_state_is_refused() -> None:
    states = FixedStates(BlockPool(4, 1))
    with pytest.raises(ContractViolation, match="starts at 4, its state is at 0"):
        states.reserve([row_of(X, True, 4, 5, 5)])
    states.reserve([row_of(X, True, 0, 5, 5)]).commit()
    for wrong in (row_of(X, False, 4, 6, 6), row_of(X, True, 5, 6, 6), row_of(Y, False, 0, 6, 6)):
        with pytest.raises(ContractViolation, match="its state is at"):
            states.reserve([wrong])
    states.reserve([row_of(X, False, 5, 6, 6)])
    with pytest.raises(ContractViolation, match="second reservation"):
        states.reserve([])


# -- fork -------------------------------------------------------------------------------------------------------------


def forked(blocks_: int = 5, slots: int = 2, processed: int = 10) -> CacheManager:
    """Parent X with [1, 2, 3] and state slot 1; Y is its child."""
    cache = caches(blocks_, slots)
    step(cache, (X, processed))
    assert slot(cache, X) == 1
    assert cache.fork(X, Y, processed) == processed
    cache.check_integrity()
    return cache


@pytest.mark.parity("F343", "F344", "F347", "F349", scenario="FK-01")
def test_a_child_shares_the_state_until_its_first_step_writes_its_own() -> None:
    cache = forked()
    assert cache.states is not None
    assert blocks(cache, X) == [1, 2, 3] and cache.states.pool.owner_count(1) == 2
    reservation = cache.reserve([row_of(Y, False, 10, 11, 11)])
    assert reservation.state_slots == [(1, 2)] and reservation.copies == ((3, 4),)
    # Both sources stay pinned while the step runs.
    assert cache.pool.owner_count(3) == 2 and cache.states.pool.owner_count(1) == 2
    reservation.commit([11])
    assert blocks(cache, Y) == [1, 2, 4] and slot(cache, Y) == 2
    assert counts(cache.pool) == {1: 2, 2: 2, 3: 1, 4: 1}
    assert counts(cache.states.pool) == {1: 1, 2: 1}
    cache.check_integrity()


@pytest.mark.parity("F344", "F334", scenario="FK-02")
@pytest.mark.parametrize("lacking", ["blocks", "slots"])
def test_a_fork_waits_for_a_block_and_a_slot_and_others_go_on(lacking: str) -> None:
    cache = forked(5 if lacking == "slots" else 4, 3)
    assert cache.states is not None
    child, other = record(Y, 11), record(Z, 3)
    child.num_computed_tokens = 10
    taken = cache.states.pool.allocate(2) if lacking == "slots" else cache.pool.allocate(1)
    admission = Admission(cache, 8, UNBOUNDED, 1)
    admission.consider(child)
    wanted = DeferralReason.STATES if lacking == "slots" else DeferralReason.BLOCKS
    assert [d.reason for d in admission.selection.deferrals] == [wanted]
    assert cache.states.pool.owner_count(1) == 2 and cache.pool.owner_count(3) == 2  # what it shares stays pinned
    (cache.states.pool if lacking == "slots" else cache.pool).free(taken)
    admission = Admission(cache, 8, UNBOUNDED, 1)
    admission.consider(child)
    admission.consider(other)
    assert [r.id for r, _ in admission.selection.rows][:1] == [Y]


@pytest.mark.parity("F342", "F343", scenario="FK-03")
def test_the_parent_ends_before_its_child_runs() -> None:
    cache = forked()
    assert cache.states is not None
    free = cache.pool.free_ids(), cache.states.pool.free_ids()
    cache.remove(X)
    assert counts(cache.pool) == {1: 1, 2: 1, 3: 1} and counts(cache.states.pool) == {1: 1}
    assert (cache.pool.free_ids(), cache.states.pool.free_ids()) == free
    reservation = step(cache, (Y, 11))
    assert reservation.copies == () and blocks(cache, Y) == [1, 2, 3] and slot(cache, Y) == 2
    cache.remove(Y)
    assert cache.pool.free_count == 5 and cache.available_slots == 2


@pytest.mark.parity("F343", "F346", scenario="FK-04")
def test_a_child_takes_no_block_behind_what_is_computed() -> None:
    cache = caches(6, 3)
    cache.reserve([row_of(X, True, 0, 10, 13)]).commit([10])  # the fourth block is for what comes later
    assert blocks(cache, X) == [1, 2, 3, 4]
    cache.fork(X, Y, 10)
    assert blocks(cache, Y) == [1, 2, 3] and counts(cache.pool) == {1: 2, 2: 2, 3: 2, 4: 1}
    assert step(cache, (Y, 11)).copies == ((3, 5),)
    assert blocks(cache, Y) == [1, 2, 5]
    cache.check_integrity()


@pytest.mark.parity("F346", "F343")
def test_a_fork_at_another_position_than_the_state_starts_over() -> None:
    cache = caches(6, 3)
    step(cache, (X, 10))
    assert cache.fork(X, Y, 9) == 0 and cache.table(Y) is None
    cache.check_integrity()


# -- through the engine -----------------------------------------------------------------------------------------------


def room_of(**config: Any) -> OpenedEngine:
    return OpenedEngine(RecurrentDecoder(), **{**FIFO, **config})


@pytest.mark.parity("F343", "F347", "F346")
@pytest.mark.parametrize("reached_eos", [False, True])
def test_forks_of_a_conversation_go_on_on_their_own(reached_eos: bool) -> None:
    room = room_of()
    if reached_eos:
        room.decoder.choose = lambda sequence: 1
    parent = room.dormant([5, 9, 13])
    room.decoder.choose = SyntheticDecoder().choose
    child = parent.fork()
    room.requests.append(child)
    # After EOS the state is behind the last token, which a child computes again: it starts over.
    assert child.num_computed_tokens == (0 if reached_eos else 3)
    for request, more in ((parent, 7), (child, 8)):
        sequence = [*request.tokens, more]
        request.begin_turn([more])
        room.step()
        assert request.tokens == [*sequence, *solo(sequence, 1)]
    room.run_out(200)
    assert parent.tokens != child.tokens


@pytest.mark.parametrize("length", [0, 2, 4, 5])
def test_a_rewind_to_an_earlier_position_computes_the_sequence_again(length: int) -> None:
    room = room_of()
    request = room.dormant([5, 9, 13], generated=3)
    assert (request.current_length, request.num_computed_tokens) == (6, 5)
    kept = request.tokens[:length]
    request.rewind(length)
    room.engine.check_integrity()
    assert request.num_computed_tokens == (5 if length == 5 else 0)
    request.begin_turn([7, 2])
    room.step()
    assert request.tokens == [*kept, 7, 2, *solo([*kept, 7, 2], 1)]
    assert room.decoder.steps[-1].state_slots is not None
    assert (room.decoder.steps[-1].state_slots[0, 0] == 0) == (length != 5)


@pytest.mark.parity("F155", "F161", "F349")
def test_a_failed_step_leaves_the_states_that_its_retry_needs() -> None:
    room = room_of()
    requests = [room.add([5, 9, 13], max_generated_tokens=6), room.add([7, 2, 20, 4], max_generated_tokens=6)]
    while room.engine.has_pending_requests():
        room.decoder.fail_next = lambda: RetryableStepError("injected")
        room.step()
        room.step()
    assert [room.tokens[r.id] for r in requests] == [solo([5, 9, 13], 6), solo([7, 2, 20, 4], 6)]


@pytest.mark.parity("F342", "F365")
def test_close_and_preemption_give_slots_back() -> None:
    room = room_of(num_blocks=6)
    states = room.cache.states
    assert states is not None
    prompts = [[5, 9, 13], [7, 2, 20, 4], [3, 8, 2, 15, 6, 11]]
    requests = [room.add(prompt, max_generated_tokens=12) for prompt in prompts]
    while room.engine.has_pending_requests():
        for event in room.step():
            if event.request_id is None:
                next(r for r in requests if r.status is RequestStatus.IDLE and r.num_computed_tokens).rewind(0)
    assert room.engine.metrics.preemptions > 0
    assert [room.tokens[r.id] for r in requests] == [solo(prompt, 12) for prompt in prompts]
    for request in requests:
        request.close()
    assert states.available == states.pool.usable


@pytest.mark.parity("F102", "F069")
def test_rows_keep_their_rank_whatever_their_slots_are() -> None:
    """Slots are found through the table of a step, so rows need no sorting by slot: values and ranks are right."""
    room = room_of(max_residents=4)
    requests: list[Request] = [room.resident([5 + i, 9], max_generated_tokens=9) for i in range(3)]
    for _ in range(4):
        events = room.step()
        assert [e.request_id for e in events] == [r.id for r in requests if r.id in {e.request_id for e in events}]
    reads = np.concatenate([s.state_slots[:, 0] for s in room.decoder.steps[-3:] if s.state_slots is not None])
    assert not np.array_equal(reads, np.sort(reads))
    room.run_out()
    assert [room.tokens[r.id] for r in requests] == [solo([5 + i, 9], 9) for i in range(3)]
