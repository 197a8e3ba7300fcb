"""Preemption by the reconciled rules C06, C23, C29: on need only, cheapest to recompute first, never the oldest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.limits import FairnessBounds
from engine_actor.options import RequestOptions
from engine_actor.requests.events import ErrorCode, EventFlags
from engine_actor.requests.outcomes import DeferralReason, StepOutcome
from engine_actor.requests.record import FinishReason, RequestRecord, RequestStatus
from engine_actor.scheduling.preemption import choose_victim
from tests.support.doubles import solo
from tests.support.engine_room import FIFO, OpenedEngine
from tests.support.engine_view import record_of, view


def record(number: int, processed: int, preemptions: int = 0) -> RequestRecord:
    made = RequestRecord(number, RequestOptions(), 100)
    made.submitted, made.num_computed_tokens, made.preemptions = number, processed, preemptions
    return made


def victim_of(*records: RequestRecord, most: int = 4) -> int | None:
    victim = choose_victim(records, most)
    return None if victim is None else victim.id


@pytest.mark.parity("F341", scenario="PR-01")
def test_nobody_is_preempted_while_no_row_needs_a_block() -> None:
    """X's 12 tokens fill all three blocks; its step writes the last position of them."""
    room = OpenedEngine(num_blocks=3, max_batch_size=2, **FIFO)
    x = room.resident([5] * 11, ignore_eos=True)
    y = room.add([7])
    assert (x.current_length, len(room.blocks(x)), room.pool.free_count) == (12, 3, 0)
    room.step()
    assert x.num_computed_tokens == 12 and room.engine.metrics.preemptions == 0
    assert room.engine.last_report.deferrals[0].reason is DeferralReason.BLOCKS and not room.blocks(y)


@pytest.mark.parity("F364", scenario="PR-02")
def test_the_victim_costs_least_to_recompute_and_is_never_the_oldest() -> None:
    assert victim_of(record(1, 10), record(2, 7), record(3, 4)) == 3
    assert victim_of(record(1, 4), record(2, 7), record(3, 10)) == 2
    assert victim_of(record(3, 10), record(1, 4), record(2, 7)) == 2  # whatever the order
    assert victim_of(record(1, 4), record(2, 7), record(3, 7)) == 3  # the newer of two equal ones
    assert victim_of(record(1, 9), record(2, 3, preemptions=4), record(3, 8)) == 3
    assert victim_of(record(1, 9), record(2, 3, preemptions=4), record(3, 8, preemptions=5)) == 2
    assert victim_of(record(1, 9)) is None and victim_of() is None


@pytest.mark.parity("F364", scenario="PR-06")
def test_who_was_preempted_before_comes_last_and_nobody_is_preempted_in_vain() -> None:
    """The candidates of PR-06 in blocks of 4: a, b, and c that was preempted once; d, which has had no step, owns
    nothing and is none. Ours goes by the cost of recomputing and spares the oldest; so it is b as well."""
    a, b, c = record(1, 4), record(2, 16), record(3, 8, preemptions=1)
    assert victim_of(a, b, c, most=1) == 2
    assert victim_of(a, b, c, most=2) == 3  # c is cheaper, if it may be preempted again
    # A need of 20 blocks, which no victim could meet, preempts nobody.
    room = OpenedEngine(num_blocks=19, max_length=128, **FIFO)
    running = [room.resident([7] * 4), room.resident([8] * 16), room.resident([9] * 30)]
    huge = room.add([5] * 77)  # 20 blocks
    room.step()
    assert room.engine.metrics.preemptions == 0 and huge.finish_reason is FinishReason.FAILED
    assert all(request.status is RequestStatus.RUNNING for request in running)


@pytest.mark.parity("F342", "F365", scenario="PR-03")
def test_a_preempted_request_is_recomputed_from_the_front_and_goes_on_as_if_undisturbed() -> None:
    room = OpenedEngine(num_blocks=6, **FIFO)
    x = room.add([5, 9, 13, 21], max_generated_tokens=16, ignore_eos=True)
    y = room.add([7, 2, 20, 4], max_generated_tokens=16, ignore_eos=True)
    waiting = room.add([6] * 20, max_generated_tokens=1)
    for _ in range(10):
        if not room.engine.metrics.preemptions:
            room.step()
    # Three blocks each; x goes on, y has given its blocks back in one piece.
    assert x.status is RequestStatus.RUNNING and y.status is RequestStatus.WAITING
    assert (y.num_computed_tokens, room.blocks(y), record_of(y).preemptions) == (0, [], 1)
    assert y.current_length == 13 and list(view(room.engine).requests.queue) == [y.id, waiting.id]
    for _ in range(40):
        for event in room.step():
            if event.flags & EventFlags.TURN_FINISHED and event.request is not None:
                event.request.close()
    assert room.tokens[x.id] == solo([5, 9, 13, 21], 16, eos=-1)
    assert room.tokens[y.id] == solo([7, 2, 20, 4], 16, eos=-1)
    prefilled = [len(step.input_ids) for step in room.decoder.steps]
    assert 13 in prefilled  # 12 processed and the token that waited, at once
    assert room.engine.metrics.preemptions == 1 and room.pool.free_count == 6


@pytest.mark.parity("F341", "F116", scenario="PR-05")
def test_a_sole_request_that_fills_the_pool_ends_with_a_reason() -> None:
    room = OpenedEngine(num_blocks=3, **FIFO)
    request = room.add([5] * 10, ignore_eos=True)
    room.run_out(20)
    last = room.events[-1]
    assert (last.finish_reason, last.error_code) == (FinishReason.FAILED, ErrorCode.UNSERVICEABLE)
    assert "13 tokens need 4 blocks" in last.message
    assert room.engine.metrics.preemptions == 0 and request.current_length == 13
    assert sum(1 for e in room.events if e.flags & EventFlags.TURN_FINISHED) == 1


def test_dormant_requests_are_the_callers_to_close_before_anyone_is_preempted() -> None:
    room = OpenedEngine(num_blocks=3, **FIFO)
    dormant = room.dormant([5] * 4)
    running = [room.add([7] * 4), room.add([8] * 4)]
    room.step()
    events = room.step()
    assert events[0].flags == EventFlags.CAPACITY_BLOCKED and room.engine.metrics.preemptions == 0
    assert all(len(room.blocks(r)) == 1 for r in running)
    dormant.close()
    room.step()
    assert room.engine.metrics.preemptions == 0 and room.engine.last_report.rows == 1


@pytest.mark.parity("F341")
def test_without_preemption_a_growth_deadlock_is_reported_with_its_reason() -> None:
    room = OpenedEngine(num_blocks=2, preemption=False, **FIFO)
    running = [room.add([7] * 4), room.add([8] * 4)]
    room.step()
    for _ in range(3):
        (event,) = room.step()
        assert (event.flags, event.error_code) == (EventFlags.CAPACITY_BLOCKED, ErrorCode.DEFERRED)
        assert room.engine.last_report.outcome is StepOutcome.CAPACITY_DEFERRED
        assert [d.request_id for d in room.engine.last_report.deferrals] == [r.id for r in running]
    running[1].close()
    room.step()
    assert room.engine.last_report.outcome is StepOutcome.COMMITTED


@pytest.mark.parity("F342")
def test_a_victims_shared_blocks_survive_with_their_other_owner() -> None:
    room = OpenedEngine(num_blocks=4, **FIFO)
    parent = room.dormant([5, 9, 13, 21, 30, 3])
    child = parent.fork()
    room.requests.append(child)
    parent.begin_turn([7, 8])  # 9 positions: grows and copies the tail
    child.begin_turn([6])
    for _ in range(60):
        for event in room.step():
            if event.flags & EventFlags.TURN_FINISHED and event.request is not None:
                event.request.close()
    first = [5, 9, 13, 21, 30, 3, *room.tokens[parent.id][:1]]
    assert room.engine.metrics.preemptions >= 1
    # Both end with the pool: the last token each could hold is the 17th.
    assert room.tokens[parent.id][1:] == solo([*first, 7, 8], 8)
    assert room.tokens[child.id] == solo([*first, 6], 9)
    assert room.pool.free_count == 4


workload = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(2, 60), min_size=1, max_size=9), st.integers(1, 12)),
    min_size=1,
    max_size=7,
)


@given(workload, st.integers(6, 9), st.integers(2, 5), st.booleans(), st.booleans(), st.integers(0, 2))
def test_under_any_pressure_every_turn_ends_once_with_its_undisturbed_answer(
    arrivals: list[tuple[int, list[int], int]], blocks: int, rows: int, bounded: bool, reuse: bool, most: int
) -> None:
    """Every request fits alone (at most 21 positions, 6 blocks), so each must come through, and soon."""
    room = OpenedEngine(
        num_blocks=blocks,
        max_batch_size=rows,
        max_residents=8,
        max_preemptions=most,
        prefix_reuse=reuse,
        fairness=FairnessBounds(2, 0.25, 2) if bounded else FairnessBounds.off(),
    )
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    expected: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    work = sum(len(prompt) + count for _, prompt, count in arrivals)
    for step in range(20 * work + 50):
        while left and left[0][0] <= step:
            _, prompt, count = left.pop(0)
            request = room.add(prompt, max_generated_tokens=count, ignore_eos=True)
            expected[request.id] = solo(prompt, count, eos=-1)
        for event in room.step():
            if event.flags & EventFlags.TURN_FINISHED and event.request is not None:
                ends[event.request.id] = ends.get(event.request.id, 0) + 1
                assert event.finish_reason is FinishReason.MAX_GENERATED_TOKENS
                event.request.close()
        if not left and not room.engine.has_pending_requests():
            break
    assert room.tokens == expected and ends == dict.fromkeys(expected, 1)
    assert room.pool.available == blocks
