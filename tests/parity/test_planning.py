"""What fits into a step (F; B = 4, N = 3, max_batch 2 unless stated; lowest, first_id 0)."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.limits import FairnessBounds
from engine_actor.options import UNBOUNDED
from engine_actor.requests.events import ErrorCode, EventFlags
from engine_actor.requests.outcomes import DeferralReason, StepOutcome
from engine_actor.requests.record import FinishReason, RequestStatus
from engine_actor.requests.request import Request
from engine_actor.scheduling.admission import Admission
from tests.support.engine_room import LOWEST, OpenedEngine
from tests.support.engine_view import record_of, view

ROWS, RESIDENTS, BLOCKS = DeferralReason.ROWS, DeferralReason.RESIDENTS, DeferralReason.BLOCKS


def room_of(blocks: int = 3, batch: int = 2, **config: Any) -> OpenedEngine:
    return OpenedEngine(num_blocks=blocks, max_batch_size=batch, **LOWEST, **config)


def deferrals(room: OpenedEngine) -> dict[int, DeferralReason]:
    return {d.request_id: d.reason for d in room.plan().deferrals}


def selected(room: OpenedEngine) -> list[int]:
    return [row.record.id for row in room.plan().rows]


@pytest.mark.parity("F113", "F104", "F115", "F120", scenario="PL-02")
def test_selected_deferred_and_unserviceable_in_one_plan() -> None:
    room = room_of()
    x = room.dormant([5, 9, 13])
    y = room.resident([7, 2, 20])
    assert y.current_length == 4 and room.blocks(y) == [1]
    x.begin_turn([3] * 9)  # 13 positions in a pool of 12
    z = room.add([8])
    plan = room.plan()
    assert plan.executable and plan.outcome is StepOutcome.COMMITTED
    assert [row.record.id for row in plan.rows] == [y.id]
    assert [record.id for record in plan.unserviceable] == [x.id]
    assert deferrals(room) == {z.id: RESIDENTS}


@pytest.mark.parity("F113", "F114", scenario="PL-03")
def test_unserviceable_is_decided_on_the_whole_sequence() -> None:
    room = room_of(chunk_size=1)
    z = room.add([5] * 13)
    plan = room.plan()
    assert not plan.executable and plan.outcome is StepOutcome.UNSERVICEABLE_REQUEST
    assert plan.rows == [] and plan.deferrals == [] and [r.id for r in plan.unserviceable] == [z.id]


@pytest.mark.parity("F105", "F106", scenario="PL-04")
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_chunk_that_would_fit_is_not_enough(chunk: int) -> None:
    room = room_of(chunk_size=chunk)
    x = room.resident([5])
    z = room.add([3] * 9)
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [x.id]
    assert [(d.request_id, d.reason, d.missing_blocks) for d in plan.deferrals] == [(z.id, BLOCKS, 1)]


@pytest.mark.parity("F109", scenario="PL-05")
def test_an_omitted_resident_keeps_its_blocks_and_slots() -> None:
    room = room_of()
    x = room.dormant([5, 9, 13])
    y = room.resident([7, 2, 20])
    before = room.blocks(x), x.num_computed_tokens, room.cache.table(x.id)
    room.step()
    room.step()
    assert y.num_computed_tokens == 5 and len(room.blocks(y)) == 2
    assert (room.blocks(x), x.num_computed_tokens, room.cache.table(x.id)) == before


@pytest.mark.parity("F104", "F117", "F120", scenario="PL-06")
def test_dormant_residents_count_toward_residency() -> None:
    room = room_of()
    room.dormant([5])
    room.dormant([7])
    z = room.add([8])
    plan = room.plan()
    assert not plan.executable and plan.outcome is StepOutcome.CAPACITY_DEFERRED
    assert [(d.request_id, d.reason, d.missing_slots) for d in plan.deferrals] == [(z.id, RESIDENTS, 1)]


@pytest.mark.parity("F109", "F110", scenario="PL-08")
def test_any_ordered_subset_can_be_selected() -> None:
    room = room_of(batch=3)
    room.dormant([5])
    y = room.resident([7])
    z = room.add([8])
    admission = Admission(room.cache, 3, UNBOUNDED, 1)
    admission.consider(record_of(z))
    admission.consider(record_of(y))
    assert [(record.id, demand.new) for record, demand in admission.selection.rows] == [(z.id, True), (y.id, False)]
    assert not admission.selection.deferrals
    reservation = room.cache.reserve([demand for _, demand in admission.selection.rows])
    assert [row.table is room.cache.table(y.id) for row in reservation.rows] == [False, True]
    reservation.release()


@pytest.mark.parity("F105", "F142", scenario="PL-09")
def test_a_first_chunk_of_three_reserves_blocks_for_nine() -> None:
    room = room_of(chunk_size=3)
    z = room.resident([5] * 9)
    assert z.num_computed_tokens == 3 and room.blocks(z) == [0, 1, 2]


@pytest.mark.parity("F106", "F113", scenario="PL-10")
def test_the_largest_prompt_of_an_empty_pool_fits_and_one_token_more_never_does() -> None:
    room = room_of()
    fits = room.add([5] * 12)
    assert selected(room) == [fits.id]
    fits.close()
    too_long = room.add([5] * 13)
    plan = room.plan()
    assert plan.outcome is StepOutcome.UNSERVICEABLE_REQUEST and plan.unserviceable[0].id == too_long.id


@pytest.mark.parity("F103", "F113", "F120", "F247", scenario="PL-11")
def test_a_table_wider_than_a_captured_graph_is_unserviceable() -> None:
    """Context 16 in blocks of 4: four columns, although 100 blocks are free."""
    room = OpenedEngine(num_blocks=100, max_length=16, graph_capture=True)
    assert room.cache.max_columns == 4 and room.cache.longest == 16
    for length, fits in ((16, True), (17, False)):
        request = room.engine.create_request()
        record_of(request).max_total = 100  # past the check of the input's length, to reach that of the plan
        request.begin_turn([5] * length)
        plan = room.plan()
        assert (plan.executable, len(plan.unserviceable)) == (fits, not fits)
        (event,) = room.engine.run(8)
        assert (event.error_code == ErrorCode.UNSERVICEABLE) is not fits
        if not fits:
            assert event.message == "17 tokens need 5 table columns, a captured graph has 4"
        request.close()
    assert room.pool.free_count == 100


@pytest.mark.parity("F247")
@pytest.mark.parametrize(("length", "blocks", "columns"), [(16, 100, 4), (17, 100, 5), (400, 3, 3), (1, 1, 1)])
def test_a_captured_table_is_as_wide_as_the_longest_sequence_and_the_pool(
    length: int, blocks: int, columns: int
) -> None:
    captured = OpenedEngine(num_blocks=blocks, max_length=length, graph_capture=True)
    assert captured.cache.max_columns == columns
    assert OpenedEngine(num_blocks=blocks, max_length=length).cache.longest == blocks * 4  # only graphs are narrow


@pytest.mark.parity("F107", "F116", scenario="PL-13")
def test_a_continuation_that_can_never_fit_fails_and_keeps_its_memory_until_close() -> None:
    room = room_of()
    room.decoder.choose = lambda sequence: 1  # EOS
    x = room.dormant([5, 9, 13, 21])
    assert (x.finish_reason, x.num_computed_tokens) == (FinishReason.EOS, 4)
    turn = x.begin_turn([3] * 9)
    events = room.step()
    assert [(e.request_id, e.turn_id, e.finish_reason, e.error_code) for e in events] == [
        (x.id, turn, FinishReason.FAILED, ErrorCode.UNSERVICEABLE)
    ]
    assert room.blocks(x) == [0] and x.status is RequestStatus.IDLE
    assert room.step() == [] and not room.engine.has_pending_requests()  # said once
    x.close()
    assert room.pool.free_count == 3


@pytest.mark.parity("F107", "F105")
def test_a_continuation_reserves_its_whole_new_sequence_at_its_first_chunk() -> None:
    room = room_of(blocks=8, chunk_size=1)
    room.decoder.choose = lambda sequence: 1
    x = room.dormant([5, 9, 13, 21])
    x.begin_turn([3] * 9)
    (row,) = room.plan().rows
    assert (row.demand.new, row.demand.length, row.demand.target) == (False, 13, 5)
    room.step()
    assert len(room.blocks(x)) == 4 and x.num_computed_tokens == 5


@pytest.mark.parity("F103", "F120")
def test_each_limit_defers_with_its_own_reason() -> None:
    rows = room_of(blocks=8, batch=1, max_residents=4)
    first, second = rows.add([5]), rows.add([7])
    assert selected(rows) == [first.id] and deferrals(rows) == {second.id: ROWS}

    tokens = room_of(blocks=8, batch=4, max_scheduled_tokens=1)
    first, second = tokens.add([5]), tokens.add([7])
    assert selected(tokens) == [first.id] and deferrals(tokens) == {second.id: ROWS}

    residents = room_of(blocks=8, batch=1)
    residents.dormant([5])
    waiting = residents.add([7])
    assert deferrals(residents) == {waiting.id: RESIDENTS}

    blocks = room_of()
    blocks.dormant([5] * 8)
    waiting = blocks.add([7] * 5)
    assert deferrals(blocks) == {waiting.id: BLOCKS}

    growth = room_of(preemption=False)
    growth.dormant([5] * 8)
    decode = growth.resident([7, 2, 20, 4])
    assert deferrals(growth) == {decode.id: BLOCKS}
    assert decode.status is RequestStatus.RUNNING and len(growth.blocks(decode)) == 1


@pytest.mark.parity("F108", "F109")
def test_a_blocked_candidate_is_skipped_and_later_ones_run() -> None:
    room = room_of(batch=4)
    resident = room.resident([5, 9, 13])
    blocked = room.add([3] * 9)
    fits = room.add([7] * 4)
    before = room.blocks(resident)
    assert selected(room) == [resident.id, fits.id] and deferrals(room) == {blocked.id: BLOCKS}
    room.step()
    assert (blocked.status, room.blocks(blocked), blocked.num_computed_tokens) == (RequestStatus.WAITING, [], 0)
    assert fits.status is RequestStatus.RUNNING
    assert room.blocks(resident) == before


@pytest.mark.parity("F115")
def test_a_step_runs_although_others_are_deferred_and_says_so() -> None:
    room = room_of()
    x = room.resident([5])
    z = room.add([3] * 9)
    room.step()
    report = room.engine.last_report
    assert report.outcome is StepOutcome.COMMITTED and report.rows == 1
    assert [(d.request_id, d.missing_blocks) for d in report.deferrals] == [(z.id, 1)]
    assert room.engine.metrics.capacity_deferrals == 1 and x.num_computed_tokens == 2


@pytest.mark.parity("F116", "F363")
def test_an_unserviceable_request_ends_once_and_blocks_nobody() -> None:
    room = room_of()
    huge = room.add([5] * 13)
    small = room.add([7, 2], max_generated_tokens=3)
    room.run_out()
    ends = [e for e in room.events if e.request_id == huge.id]
    assert [(e.flags, e.finish_reason, e.error_code) for e in ends] == [
        (EventFlags.TURN_FINISHED | EventFlags.FAILED, FinishReason.FAILED, ErrorCode.UNSERVICEABLE)
    ]
    assert "13 tokens need 4 blocks, the pool has 3" in ends[0].message
    assert len(room.tokens[small.id]) == 3 and not room.blocks(huge)
    again = room.add([9])  # the engine is healthy
    room.step()
    assert again.num_computed_tokens == 1


@pytest.mark.parity("F117", "F118", "F119")
def test_blocked_work_is_reported_waits_and_runs_after_a_close() -> None:
    room = room_of()
    first, second = room.dormant([5] * 4), room.dormant([7] * 4)
    tables = room.blocks(first), room.blocks(second)
    z = room.add([3] * 5)
    for _ in range(3):
        (event,) = room.step()
        assert event.request_id is None
        assert event.flags == EventFlags.CAPACITY_BLOCKED and event.error_code == ErrorCode.DEFERRED
        assert room.engine.last_report.outcome is StepOutcome.CAPACITY_DEFERRED
        assert room.engine.has_pending_requests() and z.status is RequestStatus.WAITING
        # The engine evicts nobody by itself.
        assert (room.blocks(first), room.blocks(second)) == tables
    steps = len(room.decoder.steps)
    first.close()
    room.step()
    assert len(room.decoder.steps) == steps + 1 and z.num_computed_tokens == 5


@pytest.mark.parity("F123")
def test_memory_that_runs_out_while_planning_is_raised_and_the_engine_stays_healthy() -> None:
    room = room_of()
    z = room.add([5, 9])
    before = room.fingerprint()
    plan = view(room.engine).scheduler.plan

    def fail(transaction_id: int) -> Any:
        raise MemoryError("planning")

    view(room.engine).scheduler.plan = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="planning"):
        room.engine.run(10)
    assert room.fingerprint() == before and not room.decoder.steps
    view(room.engine).scheduler.plan = plan  # type: ignore[method-assign]
    room.step()
    assert z.num_computed_tokens == 2


# -- fairness ---------------------------------------------------------------------------------------------------------


def endless(room: OpenedEngine, count: int) -> list[Request]:
    room.decoder.choose = lambda sequence: 5
    requests = [room.add([4, i + 2]) for i in range(count)]
    return requests


@pytest.mark.parity("F121")
@pytest.mark.parametrize("bounded", [False, True])
def test_decodes_starve_a_prefill_unless_bounds_are_on(bounded: bool) -> None:
    fairness = FairnessBounds(max_passed_over=4) if bounded else FairnessBounds.off()
    room = OpenedEngine(max_scheduled_tokens=2, fairness=fairness)
    endless(room, 2)
    for _ in range(4):
        room.step()
    late = room.add([6, 7])
    for _ in range(50):
        room.step()
    assert (late.num_computed_tokens > 0) == bounded


@pytest.mark.parity("F122")
@pytest.mark.parametrize("bounded", [False, True])
def test_the_last_of_three_decodes_starves_in_two_rows_unless_bounds_are_on(bounded: bool) -> None:
    fairness = FairnessBounds() if bounded else FairnessBounds.off()
    room = OpenedEngine(max_scheduled_tokens=2, fairness=fairness)
    room.decoder.choose = lambda sequence: 5
    requests = [room.resident([4, i + 2]) for i in range(2)]
    # The third prefills before the others are admitted again, so that all three are decodes.
    for request in requests:
        request.cancel_turn(1)
    room.step()
    third = room.resident([4, 9])
    for request in requests:
        request.begin_turn([6])
    trace = []
    for _ in range(60):
        trace.append([row.record.id for row in room.plan().rows])
        room.step()
    served = {r.id: sum(r.id in rows for rows in trace[6:]) for r in (*requests, third)}
    if bounded:
        assert max(served.values()) - min(served.values()) <= 1  # 54 steps of 2 rows: 36 each
    else:
        assert min(served.values()) == 0


@pytest.mark.parity("F125")
@pytest.mark.parametrize("bound", [None, 0, 1, 5])
def test_a_large_prompt_is_overtaken_for_ever_unless_bounds_are_on(bound: int | None) -> None:
    fairness = FairnessBounds.off() if bound is None else FairnessBounds(max_overtakes=bound)
    room = room_of(batch=3, fairness=fairness)
    room.decoder.choose = lambda sequence: 5
    small = room.add([4] * 3, max_generated_tokens=2)
    room.step()
    large = room.add([3] * 9, max_generated_tokens=1)
    overtakes = 0
    for _ in range(40):
        if large.num_computed_tokens:
            break
        following = room.add([4] * 3, max_generated_tokens=2)
        room.step()
        overtakes += following.status is not RequestStatus.WAITING
        if small.finish_reason is not None:
            small.close()
            small = following
    if bound is None:
        assert large.num_computed_tokens == 0 and overtakes > 10
    else:
        assert large.num_computed_tokens == 9 and overtakes == bound


@pytest.mark.parity("F125")
def test_one_step_admits_no_more_past_a_blocked_prompt_than_it_has_left() -> None:
    room = room_of(blocks=4, batch=8, fairness=FairnessBounds(max_overtakes=2))
    room.dormant([5])
    blocked = room.add([3] * 13)
    small = [room.add([4]) for _ in range(3)]
    assert selected(room) == [r.id for r in small[:2]]
    assert deferrals(room) == {blocked.id: BLOCKS, small[2].id: DeferralReason.TURN}


def test_a_preempted_request_returns_only_where_the_running_ones_can_grow_beside_it() -> None:
    room = room_of(blocks=6, batch=8)
    room.resident([5])
    room.resident([7])
    preempted = room.add([3] * 16)  # four blocks, and four are free
    assert selected(room)[-1] == preempted.id
    for times, missing in ((1, 2), (2, 4)):
        record_of(preempted).preemptions = times
        (deferral,) = room.plan().deferrals
        assert (deferral.request_id, deferral.reason, deferral.missing_blocks) == (preempted.id, BLOCKS, missing)


@pytest.mark.parity("F125", "F107")
@pytest.mark.parametrize("bound", [None, 2])
def test_a_large_continuation_is_overtaken_for_ever_unless_bounds_are_on(bound: int | None) -> None:
    """It owns a block already; what it waits for goes to newcomers."""
    fairness = FairnessBounds.off() if bound is None else FairnessBounds(max_overtakes=bound)
    room = room_of(blocks=4, batch=3, fairness=fairness)
    room.decoder.choose = lambda sequence: 5
    large = room.dormant([3] * 4)
    small = room.add([4] * 3, max_generated_tokens=2)
    room.step()
    large.begin_turn([3] * 10)  # 15 positions: three more blocks
    overtakes = 0
    for _ in range(40):
        if large.num_computed_tokens > 4:
            break
        following = room.add([4] * 3, max_generated_tokens=2)
        room.step()
        overtakes += following.status is not RequestStatus.WAITING
        if small.finish_reason is not None:
            small.close()
            small = following
    if bound is None:
        assert large.num_computed_tokens == 4 and overtakes > 10
    else:
        assert large.num_computed_tokens == 15 and overtakes == bound


@pytest.mark.parity("F121")
@pytest.mark.parametrize("rows", [32, 31])
@pytest.mark.parametrize("bounded", [True, False])
def test_a_long_prompt_beside_31_endless_decodes_gets_its_share_where_bounds_are_on(bounded: bool, rows: int) -> None:
    """Budget 32: a quarter, 8 tokens a step, is the prefill's, so 2,000 tokens take 250 steps, and one more
    where decodes that have waited for long go first. In the plain order it gets the one token that 31 decodes leave,
    and where they leave no row it never starts."""
    fairness = FairnessBounds() if bounded else FairnessBounds.off()
    room = OpenedEngine(
        num_blocks=800,
        block_size=16,
        max_batch_size=rows,
        max_residents=32,
        max_scheduled_tokens=32,
        max_length=4096,
        fairness=fairness,
    )
    decodes = endless(room, 31)
    while any(r.num_computed_tokens == 0 for r in decodes):
        room.step()
    prompt = room.add([3] * 2000, max_generated_tokens=1)
    generated = {r.id: r.current_length for r in decodes}
    waited = dict.fromkeys(generated, 0)
    progress = []
    for _ in range(251):
        served = {row.record.id for row in room.plan().rows}
        for name in waited:
            waited[name] = 0 if name in served else waited[name] + 1
            assert waited[name] <= 8 + 2
        room.step()
        progress.append(prompt.num_computed_tokens)
    assert (prompt.finish_reason is not None) == bounded
    if not bounded:
        assert progress == [(rows - 31) * step for step in range(1, 252)]
    else:
        assert progress[1] >= 1 and progress[249] > 248 * 8
        grown = [r.current_length - generated[r.id] for r in decodes]
        assert max(grown) - min(grown) <= 2  # the decodes shared what was left evenly


@pytest.mark.parity("F107", "F125")
@pytest.mark.parametrize("bounded", [False, True])
def test_of_two_running_rows_that_lack_a_block_the_one_that_was_passed_over_goes_first(bounded: bool) -> None:
    """Both stand before a full block, and one block comes free at a time."""
    fairness = FairnessBounds(max_passed_over=4) if bounded else FairnessBounds.off()
    room = room_of(blocks=5, batch=8, fairness=fairness)
    room.decoder.choose = lambda sequence: 5
    dormant = [room.dormant([6]) for _ in range(3)]
    first, second = room.add([4] * 4), room.add([4] * 4)
    room.step()
    assert selected(room) == [] and deferrals(room) == {first.id: BLOCKS, second.id: BLOCKS}
    dormant.pop().close()
    for _ in range(4):
        assert selected(room) == [first.id] and deferrals(room) == {second.id: BLOCKS}
        room.step()
    dormant.pop().close()
    assert selected(room) == [(second if bounded else first).id]


@pytest.mark.parity("F117", "F120")
def test_what_is_missing_is_said_for_the_request_that_lacks_most() -> None:
    room = room_of()
    continued = room.dormant([5] * 7)
    room.dormant([6])
    continued.begin_turn([7, 8])  # ten positions: a third block
    room.add([9])  # a third resident
    (event,) = room.step()
    assert event.message == "2 requests wait; 1 blocks and 1 places are missing"
