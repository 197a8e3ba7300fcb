"""Candidates, order, token budget: E (F084 to F102)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.errors import ContractViolation, EngineUnhealthy, InvalidOption
from engine_actor.limits import EngineLimits, FairnessBounds
from engine_actor.requests.outcomes import DeferralReason, StepOutcome
from engine_actor.requests.record import RequestStatus
from engine_actor.scheduling.scheduler import Scheduler, row_limit, share_budget
from tests.support.doubles import SyntheticDecoder, solo
from tests.support.engine_room import FIFO, LOWEST, OpenedEngine
from tests.support.engine_view import view

P10, P20, P30 = [4, 5, 6], [6, 7, 8], [8, 9, 10]


def test_planning_one_prompt_allocates_nothing() -> None:
    room = OpenedEngine(**FIFO)
    request = room.add(P10)
    assert room.counts() == [(request.id, 3)]
    assert request.status is RequestStatus.WAITING and room.pool.free_count == 128 and room.pool.generation == 0


@pytest.mark.parity("F093", "F097", scenario="SC-02")
def test_offsets_and_logits_rows_follow_from_the_counts_of_the_rows() -> None:
    room = OpenedEngine(**FIFO)
    requests = [room.add(p) for p in (P10, P20, P30)]
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [r.id for r in requests]
    assert [row.offset for row in plan.rows] == [0, 3, 6]
    assert [list(row.logits_rows) for row in plan.rows] == [[2], [5], [8]]
    assert plan.token_count == 9 and not plan.graph_capture_eligible


@pytest.mark.parity("F104", "F109", scenario="SC-03")
def test_residents_beyond_the_capacity_are_deferred() -> None:
    room = OpenedEngine(max_residents=2)
    requests = [room.add(p) for p in (P10, P20, P30)]
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [r.id for r in requests[:2]]
    assert [(d.request_id, d.reason) for d in plan.deferrals] == [(requests[2].id, DeferralReason.RESIDENTS)]
    assert {r.status for r in requests} == {RequestStatus.WAITING}


@pytest.mark.parity("F084", "F104", "F118", scenario="SC-04")
def test_a_complete_resident_is_skipped_but_keeps_its_place() -> None:
    room = OpenedEngine(max_residents=1)
    x = room.dormant(P10)
    y = room.add(P20)
    plan = room.plan()
    assert plan.outcome is StepOutcome.CAPACITY_DEFERRED and not plan.rows and len(plan.deferrals) == 1
    x.close()
    assert room.counts() == [(y.id, 3)]


@pytest.mark.parity("F087", "F122", "F097", scenario="SC-06")
def test_a_budget_of_two_takes_two_decodes_and_defers_the_rest() -> None:
    room = OpenedEngine()
    decodes = [room.resident(p, ignore_eos=True) for p in (P10, P20, P30)]
    prefill = room.add(P10)
    view(room.engine).limit(max_scheduled_tokens=2)
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [r.id for r in decodes[:2]]
    assert [d.request_id for d in plan.deferrals] == [decodes[2].id, prefill.id]
    assert plan.graph_capture_eligible and plan.token_count == 2


@pytest.mark.parity("F089", "F092", "F094", scenario="SC-07, SC-09")
@pytest.mark.parametrize(("chunk", "count"), [(1, 1), (0, 2)])
def test_a_prompt_of_three_under_a_budget_of_two_is_cut_with_and_without_a_chunk_size(chunk: int, count: int) -> None:
    room = OpenedEngine(max_scheduled_tokens=2, chunk_size=chunk)
    room.add(P10)
    (row,) = room.plan().rows
    assert (row.count, row.demand.target, row.demand.length) == (count, count, 3)


@pytest.mark.parity("F095", "F234", scenario="SC-10")
@pytest.mark.parametrize("tampered", [0, 4])
def test_a_count_outside_the_unprocessed_tokens_is_refused(tampered: int) -> None:
    room = OpenedEngine()
    request = room.add(P10)
    plan = room.plan()
    plan.check()
    plan.rows[0].count = tampered
    plan.rows[0].demand = replace(plan.rows[0].demand, target=tampered)
    plan.token_count = tampered
    with pytest.raises(ContractViolation, match=f"{tampered} tokens planned, 3 remain"):
        plan.check()
    # Through the engine: nothing is reserved, the decoder is not called, the engine stops.
    view(room.engine).scheduler.plan = lambda transaction_id: plan  # type: ignore[method-assign]
    room.engine.run(10)
    assert not room.decoder.steps and not room.blocks(request)
    with pytest.raises(EngineUnhealthy, match="3 remain"):
        room.engine.run(10)


@pytest.mark.parity("F095")
def test_a_plan_with_a_request_twice_a_finished_one_or_a_gap_is_refused() -> None:
    room = OpenedEngine()
    request = room.add(P10)
    room.add(P20)
    plan = room.plan()
    plan.rows[1].record = plan.rows[0].record
    with pytest.raises(ContractViolation, match="twice in one step"):
        plan.check()
    plan = room.plan()
    plan.rows[1].offset = 2
    with pytest.raises(ContractViolation, match="start at 2, not at 3"):
        plan.check()
    plan = room.plan()
    plan.token_count = 7
    with pytest.raises(ContractViolation, match="7 tokens planned, the rows have 6"):
        plan.check()
    plan = room.plan()
    request.cancel_turn(1)
    with pytest.raises(ContractViolation, match="is idle and cannot run"):
        plan.check()


@pytest.mark.parity("F113", "F116", scenario="SC-11")
def test_a_resident_whose_growth_can_never_fit_is_unserviceable() -> None:
    room = OpenedEngine(num_blocks=1, **LOWEST)
    request = room.resident([4, 5, 6, 7])
    plan = room.plan()
    assert not plan.executable and not plan.deferrals
    assert plan.outcome is StepOutcome.UNSERVICEABLE_REQUEST and [r.id for r in plan.unserviceable] == [request.id]


@pytest.mark.parity("F088", "F089", scenario="SC-12")
@pytest.mark.parametrize(
    ("wants", "budget", "counts"),
    [
        ([1, 1, 8, 8], 7, [1, 1, 4, 1]),
        ([2, 3, 10], 7, [2, 3, 2]),
        ([1, 1, 1], 3, [1, 1, 1]),
        ([1, 512, 512, 100], 1024, [1, 512, 510, 1]),
    ],
)
def test_the_budget_gives_one_token_each_and_the_rest_to_prefills_in_order(
    wants: list[int], budget: int, counts: list[int]
) -> None:
    assert share_budget(wants, budget) == counts


@pytest.mark.parity("F088", "F089", scenario="SC-12")
def test_a_budget_below_one_token_each_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 rows do not fit into a budget of 2"):
        share_budget([1, 1, 1], 2)


@pytest.mark.parity("F090", "F091", "F052")
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 120))
def test_the_budget_is_never_exceeded_and_never_wasted(wants: list[int], budget: int) -> None:
    if len(wants) > budget:
        with pytest.raises(ValueError, match="do not fit"):
            share_budget(wants, budget)
        return
    counts = share_budget(wants, budget)
    assert all(1 <= count <= want for count, want in zip(counts, wants, strict=True))  # so a decode gets just one
    assert sum(counts) == min(budget, sum(wants))
    # Greedy in order: whoever follows a row that got less than it wanted keeps its mandatory token only.
    short = next((i for i, (c, w) in enumerate(zip(counts, wants, strict=True)) if c < w), len(wants))
    assert counts[short + 1 :] == [1] * len(counts[short + 1 :])


@pytest.mark.parity("F088", "F091", "F100", scenario="SC-14")
def test_a_huge_prefill_hides_no_decode() -> None:
    """131,072 tokens beside 7 decodes under 2,048: 2,041 a step, 65 steps, each decode one token in every step."""
    room = OpenedEngine(
        SyntheticDecoder(context=140_000), num_blocks=600, block_size=256, max_length=140_000, max_residents=8
    )
    decodes = [room.add([4, i + 2], ignore_eos=True) for i in range(7)]
    room.step()
    before = [r.current_length for r in decodes]
    huge = room.add([3] * 131_072, max_generated_tokens=1)
    counts = []
    while huge.finish_reason is None:
        (tokens,) = [count for request_id, count in room.counts() if request_id == huge.id]
        counts.append(tokens)
        room.engine.run(100)
    assert counts == [2041] * 64 + [131_072 - 64 * 2041] and len(counts) == 65
    assert [r.current_length - n for r, n in zip(decodes, before, strict=True)] == [65] * 7


@pytest.mark.parity("F096", "F098", scenario="SC-15")
def test_planning_twice_gives_the_same_plan_and_changes_nothing() -> None:
    room = OpenedEngine(prefix_reuse=True)
    assert [view(room.engine).plan(9).outcome, view(room.engine).plan(9).transaction_id] == [
        StepOutcome.NO_WORK,
        9,
    ]
    room.resident(P10)
    room.dormant(P20)
    room.add(P30)
    before = room.fingerprint()
    first, second = view(room.engine).plan(17), view(room.engine).plan(18)
    assert (first.transaction_id, second.transaction_id) == (17, 18)
    second.transaction_id = 17
    assert first == second and room.fingerprint() == before


@pytest.mark.parity("F084", "F109", "F138", scenario="SC-16")
def test_an_omitted_prefill_keeps_its_table_while_a_decode_runs() -> None:
    room = OpenedEngine(num_blocks=4, max_batch_size=2, chunk_size=3, **LOWEST)
    prefill, decode = room.add([4, 5, 6, 7, 8]), room.add([9])
    room.step()
    assert (prefill.num_computed_tokens, decode.num_computed_tokens) == (3, 1)
    view(room.engine).limit(max_scheduled_tokens=1)
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [decode.id] and plan.graph_capture_eligible
    before = room.blocks(prefill), room.cache.table(prefill.id)
    room.step()
    assert (room.blocks(prefill), room.cache.table(prefill.id)) == before
    assert (prefill.num_computed_tokens, decode.num_computed_tokens) == (3, 2)


@pytest.mark.parity("F086", "F084", scenario="SC-17")
def test_decodes_first_then_prefills_both_stable() -> None:
    room = OpenedEngine(chunk_size=2)
    prompts = [[4] * 20, [5], [6] * 20, [7]]
    requests = [room.add(p, ignore_eos=True) for p in prompts]
    room.step()
    p1, d1, p2, d2 = requests
    assert [row.record.id for row in room.plan().rows] == [d1.id, d2.id, p1.id, p2.id]  # indices 1, 3, 0, 2


@pytest.mark.parity("F087", scenario="SC-17")
def test_a_step_has_no_more_rows_than_either_limit_allows() -> None:
    assert (row_limit(3, 8), row_limit(8, 3)) == (3, 3)
    for tokens, batch in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            row_limit(tokens, batch)
        with pytest.raises(InvalidOption):
            EngineLimits(max_scheduled_tokens=tokens, max_batch_size=batch)


@pytest.mark.parity("F101", "F092", "F106", "F056", scenario="SC-18")
def test_a_prompt_spans_steps_and_reserves_at_the_first() -> None:
    room = OpenedEngine(num_blocks=3, max_batch_size=1, max_scheduled_tokens=2, **LOWEST)
    request = room.add([4, 5, 6, 7, 8, 9, 10, 11, 12], max_generated_tokens=1)
    counts, slots, events = [], [], []
    while request.finish_reason is None:
        counts.append(room.counts()[0][1])
        events.append(len(room.step()))
        slots.append(request.num_computed_tokens)
        assert len(room.blocks(request)) == 3
    assert counts == [2, 2, 2, 2, 1] and slots == [2, 4, 6, 8, 9] and events == [0, 0, 0, 0, 1]


@pytest.mark.parity("F084")
def test_candidates_are_residents_in_resident_order_then_the_queue_in_order_of_submission() -> None:
    room = OpenedEngine()
    first, second, third = room.dormant(P10), room.dormant(P20), room.dormant(P30)
    queued = [room.add([11, 12]), room.add([13])]
    third.begin_turn([7])
    first.begin_turn([7])
    assert [row.record.id for row in room.plan().rows] == [first.id, third.id, queued[0].id, queued[1].id]
    assert second.status is RequestStatus.IDLE


@pytest.mark.parity("F085")
def test_a_continuation_is_not_new_and_allocates_none_of_its_blocks_again() -> None:
    room = OpenedEngine(**FIFO)
    request = room.dormant([4, 5, 6, 7, 8])
    blocks = room.blocks(request)
    request.begin_turn([9])
    (row,) = room.plan().rows
    assert not row.demand.new and room.cache.paged.blocks_to_add(row.demand) == 0
    generation = room.pool.generation
    room.step()
    assert room.blocks(request) == blocks and room.pool.generation == generation


@pytest.mark.parity("F093", "F100", "F243")
def test_prefills_and_decodes_share_one_call_without_padding() -> None:
    room = OpenedEngine()
    decode = room.resident([9, 3])
    prompts = [room.add([4, 5, 6]), room.add([7, 8])]
    room.step()
    step = room.decoder.steps[-1]
    assert step.input_ids.tolist() == [decode.tokens[2], 4, 5, 6, 7, 8]
    assert step.cumulative_sequence_lengths.tolist() == [0, 1, 4, 6]
    assert step.logits_rows.tolist() == [0, 3, 5]
    assert len(room.decoder.steps) == 2 and all(p.current_length == len(p.tokens) for p in prompts)


@pytest.mark.parity("F094", "F055")
def test_targets_are_processed_plus_count_and_whole_is_the_current_length() -> None:
    room = OpenedEngine(chunk_size=2)
    decode = room.resident([9])
    prompt = room.add([4, 5, 6, 7, 8])
    room.step()
    rows = {row.record.id: row.demand for row in room.plan().rows}
    assert (rows[decode.id].target, rows[decode.id].length) == (decode.num_computed_tokens + 1, decode.current_length)
    assert (rows[prompt.id].target, rows[prompt.id].length) == (4, 5)


@pytest.mark.parity("F097")
def test_only_a_pure_decode_step_can_replay_a_graph() -> None:
    room = OpenedEngine()
    room.resident([9])
    assert room.plan().graph_capture_eligible
    room.add([4])  # one token, but a prefill
    assert not room.plan().graph_capture_eligible
    assert not OpenedEngine().plan().graph_capture_eligible


@pytest.mark.parity("F099")
def test_planning_is_the_only_way_to_a_step() -> None:
    """There is no call that schedules and executes past the plan: the scheduler's public calls return or note one."""
    assert {name for name in vars(Scheduler) if not name.startswith("_")} == {"plan", "note_committed"}


def test_priorities_go_first_and_equal_ones_keep_their_order() -> None:
    room = OpenedEngine(max_batch_size=2, max_residents=8)
    low, high, same = room.add([4], priority=1), room.add([5], priority=-1), room.add([6], priority=-1)
    assert [row.record.id for row in room.plan().rows] == [high.id, same.id]
    assert [d.request_id for d in room.plan().deferrals] == [low.id]


@pytest.mark.parity("F091", "F054")
@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 5))
def test_any_budget_and_chunk_writes_each_position_once_and_gives_the_same_tokens(
    length: int, budget: int, chunk: int
) -> None:
    prompt = [3 + i for i in range(length)]
    room = OpenedEngine(num_blocks=16, max_scheduled_tokens=budget, chunk_size=chunk)
    request = room.add(prompt, max_generated_tokens=6)
    other = room.add([7, 2, 20, 4], max_generated_tokens=6)
    room.run_out()
    assert room.tokens[request.id] == solo(prompt, 6) and room.tokens[other.id] == solo([7, 2, 20, 4], 6)
    positions = []
    for step in room.decoder.steps:
        starts = step.cumulative_sequence_lengths.tolist()
        assert starts[-1] <= budget
        for row in range(len(starts) - 1):
            if int(step.block_table[row, 0]) == room.blocks(request)[0]:
                positions += step.position_ids[starts[row] : starts[row + 1]].tolist()
    assert positions == list(range(request.num_computed_tokens))


@pytest.mark.parity("F086", "F108")
def test_a_blocked_decode_gives_its_row_to_the_next_decode_not_to_a_prefill() -> None:
    room = OpenedEngine(num_blocks=4, max_batch_size=4, preemption=False, **LOWEST)
    blocked = room.add([4, 5, 6, 7], ignore_eos=True)
    others = [room.add([8], ignore_eos=True), room.add([9], ignore_eos=True)]
    room.step()
    prefill = room.add([10])
    view(room.engine).limit(max_batch_size=2)
    room.pool.allocate(room.pool.free_count)  # nothing is free: the first decode lacks a block
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [r.id for r in others]
    assert {d.request_id: d.reason for d in plan.deferrals} == {
        blocked.id: DeferralReason.BLOCKS,
        prefill.id: DeferralReason.ROWS,
    }


def test_decodes_use_what_a_short_prefill_leaves_of_its_share() -> None:
    room = OpenedEngine(max_batch_size=16, max_scheduled_tokens=8, fairness=FairnessBounds(min_prefill_share=0.5))
    for i in range(7):
        room.add([4 + i], ignore_eos=True)
    room.step()
    short = room.add([6, 7])
    assert [count for _, count in room.counts()] == [1, 1, 1, 1, 2, 1, 1] and room.counts()[4][0] == short.id
    short.close()
    long = room.add([6] * 9)
    assert [count for _, count in room.counts()] == [1, 1, 1, 1, 4] and room.counts()[4][0] == long.id
