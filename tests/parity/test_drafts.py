"""Drafts that a caller proposes (T). Sequence [4, 5, 6, 7], three positions processed, B = 4 unless stated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.core.engine import Engine
from engine_actor.errors import InvalidCall, InvalidOption, RetryableStepError
from engine_actor.memory.block_table import blocks_for
from engine_actor.options import SamplingParams, TurnOptions
from engine_actor.requests.events import EngineEvent, EventFlags
from engine_actor.requests.outcomes import StepOutcome
from engine_actor.requests.record import FinishReason, RequestStatus
from engine_actor.requests.request import Request
from engine_actor.scheduling.draft_budget import DraftWant, share_drafts
from tests.parity.test_synthetic import SECOND, A, L
from tests.support.doubles import ForcedDecoder, SyntheticDecoder, build_engine, run_out, solo, tokens_of
from tests.support.engine_room import FIFO, OpenedEngine
from tests.support.engine_view import record_of, view

PROPOSED = [8, 9, 10]
TOKEN, FINISHED = EventFlags.TOKEN, EventFlags.TURN_FINISHED


def room_at_four(rows: list[int], drafts: list[int] = PROPOSED, **config: Any) -> tuple[OpenedEngine, Request]:
    """The model answers 7 to the prompt, then `rows`: one for each row of logits that a step asks for."""
    turn = {key: config.pop(key) for key in ("max_generated_tokens",) if key in config}
    room = OpenedEngine(ForcedDecoder([7, *rows], drafts=16), **config)
    request = room.resident([4, 5, 6], **turn)
    assert request.tokens == [4, 5, 6, 7] and request.num_computed_tokens == 3
    request.set_draft_tokens(drafts)
    return room, request


def force(room: OpenedEngine, tokens: list[int]) -> None:
    assert isinstance(room.decoder, ForcedDecoder)
    room.decoder.force(tokens)


def said(events: list[EngineEvent]) -> list[tuple[int | None, EventFlags, FinishReason | None]]:
    return [(event.token, event.flags, event.finish_reason) for event in events]


@pytest.mark.parity("F297", "F298", "F299", "F304", "F081", "F352", "F029")
@pytest.mark.parametrize(
    ("rows", "tokens", "current", "processed"),
    [
        ([8, 9, 11, 12], [8, 9, 11], 7, 6),  # the third is replaced
        ([8, 9, 10, 12], [8, 9, 10, 12], 8, 7),  # all, and what follows them
        ([5, 9, 10, 12], [5], 5, 4),  # none
        ([8, 5, 10, 12], [8, 5], 6, 5),  # what agrees after a mismatch is not kept
    ],
)
def test_the_longest_prefix_that_agrees_is_kept(
    rows: list[int], tokens: list[int], current: int, processed: int
) -> None:
    room, request = room_at_four(rows, num_blocks=8)
    (row,) = room.plan().rows
    assert (row.count, row.drafts, list(row.logits_rows)) == (4, (8, 9, 10), [0, 1, 2, 3])
    events = room.step()
    step = room.decoder.steps[-1]
    assert step.input_ids.tolist() == [7, 8, 9, 10] and step.logits_rows.tolist() == [0, 1, 2, 3]
    assert step.position_ids.tolist() == [3, 4, 5, 6] and room.decoder.decode_calls == 2
    assert said(events) == [(token, TOKEN, None) for token in tokens]
    assert (request.current_length, request.num_computed_tokens) == (current, processed)
    assert request.tokens == [4, 5, 6, 7, *tokens]
    assert request.usage.generated_tokens == 1 + len(tokens)
    assert len(room.blocks(request)) == blocks_for(processed, 4)
    metrics = room.engine.metrics
    assert (metrics.draft_tokens, metrics.accepted_draft_tokens) == (3, len(tokens) - 1)
    assert metrics.decode_tokens == 1


@pytest.mark.parity("F154", "F304", scenario="DR-03")
def test_a_block_for_rejected_drafts_goes_back() -> None:
    room, request = room_at_four([5, 9, 10, 12], num_blocks=8)
    free = room.pool.free_ids()
    room.step()
    assert len(room.blocks(request)) == 1 and sorted(room.pool.free_ids()) == sorted(free)
    force(room, [6])
    room.step()
    assert request.tokens == [4, 5, 6, 7, 5, 6] and room.decoder.steps[-1].past_sequence_lengths.tolist() == [4]


@pytest.mark.parity("F080", "F305", "F366", "F029")
@pytest.mark.parametrize(
    ("rows", "expected", "length"),
    [
        ([8, 1, 10, 12], [(8, TOKEN | FINISHED, FinishReason.EOS)], 5),
        ([8, 9, 1, 12], [(8, TOKEN, None), (9, TOKEN | FINISHED, FinishReason.EOS)], 6),
        ([1, 9, 10, 12], [(None, FINISHED, FinishReason.EOS)], 4),
    ],
)
def test_an_eos_after_accepted_drafts_joins_the_last_token(rows: list[int], expected: list[Any], length: int) -> None:
    room, request = room_at_four(rows)
    assert said(room.step()) == expected
    assert (request.current_length, request.num_computed_tokens) == (
        length,
        length,
    )  # all that is visible is in the cache
    assert request.usage.generated_tokens == length - 3


@pytest.mark.parity("F305", "F366", scenario="DP-11")
def test_an_eos_that_was_drafted_ends_the_turn_and_drops_what_follows() -> None:
    """50 tokens and a step of four queries; of [7, EOS, 9] only 7 is appended, beside the pending token."""
    room = OpenedEngine(ForcedDecoder([5, 7, 1, 9, 6], context=128, drafts=16))
    request = room.resident([4] * 50)
    request.set_draft_tokens([7, 1, 9])
    assert said(room.step()) == [(7, TOKEN | FINISHED, FinishReason.EOS)]
    assert request.tokens == [*[4] * 50, 5, 7] and request.num_computed_tokens == 52
    assert request.status is RequestStatus.IDLE


@pytest.mark.parity("F306", "F029", "F366", scenario="DR-05")
def test_a_limit_inside_accepted_drafts_cuts_them_there() -> None:
    room, request = room_at_four([8, 9, 10, 12], max_generated_tokens=3)
    assert said(room.step()) == [(8, TOKEN, None), (9, TOKEN | FINISHED, FinishReason.MAX_GENERATED_TOKENS)]
    assert (request.current_length, request.num_computed_tokens) == (6, 6)
    request.begin_turn([20])
    force(room, [5])
    room.step()
    assert room.decoder.steps[-1].input_ids.tolist() == [20]  # nothing is replayed (C30)


@pytest.mark.parity("F306")
def test_the_session_limit_truncates_drafts() -> None:
    room, request = room_at_four([8, 9, 10, 12], max_length=6)
    assert [e.token for e in room.step()] == [8, 9]
    assert request.finish_reason is FinishReason.MAX_SESSION_TOKENS and request.current_length == 6


@pytest.mark.parity("F300", "F120", scenario="DR-06")
def test_every_row_has_its_token_before_any_draft() -> None:
    room = OpenedEngine(ForcedDecoder(7, drafts=16), max_scheduled_tokens=4, num_blocks=32)
    requests = [room.add([4, 5, 6]), room.add([6, 7])]
    while any(r.current_length == r.num_computed_tokens or record_of(r).is_prefill for r in requests):
        room.step()
    for request in requests:
        request.set_draft_tokens(PROPOSED)
    plan = room.plan()
    assert plan.token_count == 4 and [(row.count, row.drafts) for row in plan.rows] == [(2, (8,)), (2, (8,))]
    assert not plan.deferrals and not plan.graph_capture_eligible


@pytest.mark.parity("F300", "F302")
def test_a_prefill_uses_its_tokens_before_drafts_do() -> None:
    room, request = room_at_four([8, 9, 10, 12], max_scheduled_tokens=6)
    prompt = room.add([9, 9, 9, 9])
    assert [(row.record.id, row.count, row.drafts) for row in room.plan().rows] == [
        (request.id, 2, (8,)),
        (prompt.id, 4, ()),
    ]


@pytest.mark.parity("F300")
def test_drafts_are_shared_out_one_a_round_in_rank_order() -> None:
    """C28."""
    assert share_drafts([DraftWant(3, 9), DraftWant(1, 9), DraftWant(5, 9)], 6, 0, 4) == [3, 1, 2]
    assert share_drafts([DraftWant(3, 9), DraftWant(1, 9), DraftWant(5, 9)], 2, 0, 4) == [1, 1, 0]
    assert share_drafts([DraftWant(0, 9), DraftWant(9, 2)], 99, 0, 4) == [0, 2]
    assert share_drafts([DraftWant(9, 2), DraftWant(9, 1)], 99, 1, 4) == [2, 5]  # the one block goes to who asks first
    assert share_drafts([DraftWant(9, 0)], 99, 2, 4) == [8]
    assert share_drafts([], 5, 5, 4) == []


@given(
    st.lists(st.builds(DraftWant, st.integers(0, 9), st.integers(0, 6)), max_size=6),
    st.integers(0, 20),
    st.integers(0, 5),
    st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
@pytest.mark.parity("F300", "F301")
def test_shares_keep_every_bound_and_waste_nothing(wants: list[DraftWant], tokens: int, blocks: int, size: int) -> None:
    given_ = share_drafts(wants, tokens, blocks, size)
    costs = [blocks_for(max(0, got - want.room), size) for got, want in zip(given_, wants, strict=True)]
    assert all(got <= want.drafts for got, want in zip(given_, wants, strict=True))
    assert sum(given_) <= tokens and sum(costs) <= blocks
    if sum(given_) < tokens and sum(costs) < blocks:
        assert given_ == [want.drafts for want in wants]


@pytest.mark.parity("F301", "F103", scenario="DR-07")
@pytest.mark.parametrize(("prompt", "verified"), [([4, 5, 6], 0), ([4], 2)])
def test_drafts_shrink_to_the_blocks_that_there_are(prompt: list[int], verified: int) -> None:
    room = OpenedEngine(ForcedDecoder([7, 8, 9, 10, 12], drafts=16), num_blocks=1)
    request = room.resident(prompt)
    request.set_draft_tokens(PROPOSED)
    (row,) = room.plan().rows
    assert len(row.drafts) == verified
    room.step()
    assert room.engine.last_report.outcome is StepOutcome.COMMITTED
    assert request.tokens == [*prompt, 7, *[8, 9, 10][: verified + 1]]


@pytest.mark.parity("F301", "F103")
def test_drafts_never_leave_a_captured_table() -> None:
    room = OpenedEngine(ForcedDecoder([7, 8, 9, 10, 12], drafts=16), num_blocks=99, max_length=8, graph_capture=True)
    request = room.resident([4, 5, 6, 7])
    request.set_draft_tokens([8, 9, 10, 11, 12, 13])
    (row,) = room.plan().rows
    assert row.drafts == (8, 9, 10) and row.demand.target == 8


@pytest.mark.parity("F337", "F154", "F340", scenario="LB-02")
def test_five_drafts_take_a_block_and_their_rejection_gives_it_back() -> None:
    """A has 11 tokens to process and five drafts behind them, B nine; seven blocks."""
    room = OpenedEngine(ForcedDecoder(7, drafts=16), num_blocks=7, **FIFO)
    a, b = room.add([4] * 6), room.add([5] * 9)
    room.step()
    b.cancel_turn(1)
    while a.current_length < 11:
        room.step()
    assert room.blocks(a) == [1, 2, 6] and room.pool.free_ids() == [7]
    a.set_draft_tokens([9] * 5)
    (row,) = room.plan().rows
    assert (row.demand.length, row.demand.target) == (11, 16)
    reservation = room.cache.reserve([row.demand])
    assert room.blocks(a) == [1, 2, 6, 7] and room.pool.free_ids() == []
    reservation.release()
    room.step()
    assert room.blocks(a) == [1, 2, 6] and room.pool.free_ids() == [7] and len(room.blocks(b)) == 3


@pytest.mark.parity("F303", scenario="DR-08")
@pytest.mark.parametrize("late", [False, True])
def test_a_rollback_keeps_the_proposal(late: bool) -> None:
    room, request = room_at_four([])
    setattr(room.decoder, "fail_next" if late else "fail_before", lambda: RetryableStepError("injected"))
    before = room.fingerprint()
    force(room, [8, 9, 11, 12])
    room.step()
    assert request.tokens == [4, 5, 6, 7] and record_of(request).drafts == (8, 9, 10)
    assert room.fingerprint()[0] == before[0]  # type: ignore[index]
    force(room, [8, 9, 11, 12])
    assert [e.token for e in room.step()] == [8, 9, 11]
    assert list(record_of(request).drafts) == []


@pytest.mark.parity("F303")
def test_a_committed_step_consumes_drafts_that_were_cut() -> None:
    room, request = room_at_four([8, 9, 10, 12], max_scheduled_tokens=3)
    assert [e.token for e in room.step()] == [8, 9, 10]  # two drafts fit, and what follows them
    assert list(record_of(request).drafts) == []


@pytest.mark.parity("F302", "F295", "F048", scenario="DR-09")
@pytest.mark.parity("F296", lacks="there is no n-gram rule that could refuse drafts")
def test_what_cannot_be_proposed_is_refused() -> None:
    room = OpenedEngine(ForcedDecoder(7, drafts=4), chunk_size=2)
    waiting = room.add([4, 5, 6])
    with pytest.raises(InvalidCall, match="prompt is processed"):
        waiting.set_draft_tokens([8])
    room.step()
    assert waiting.num_computed_tokens == 2 and waiting.status is RequestStatus.RUNNING
    with pytest.raises(InvalidCall, match="prompt is processed"):  # one token of the prompt is left
        waiting.set_draft_tokens([8])
    room.step()
    waiting.set_draft_tokens([8])
    for wrong, match in (([32], "from 0 to 31"), ([-1], "from 0 to 31"), ([8] * 5, "at most 4"), (["a"], "integers")):
        with pytest.raises(InvalidOption, match=match):
            waiting.set_draft_tokens(wrong)  # type: ignore[arg-type]
    assert record_of(waiting).drafts == (8,)
    waiting.set_draft_tokens([])
    assert list(record_of(waiting).drafts) == []

    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(logit_bias=((3, 1.0),)),
    ):
        other = room.add([4], sampling=params)
        room.step()
        with pytest.raises(InvalidCall, match="greedy"):
            other.set_draft_tokens([8])
        other.close()
    floor = room.add([4], min_generated_tokens=2)
    room.step()
    with pytest.raises(InvalidCall, match="minimum"):
        floor.set_draft_tokens([8])
    room.step()
    floor.set_draft_tokens([8])

    elsewhere = OpenedEngine(ForcedDecoder(7, drafts=4))
    with pytest.raises(InvalidCall, match="does not belong"):
        view(elsewhere.engine).lifecycle.set_draft_tokens(record_of(waiting), [8])
    waiting.cancel_turn(1)
    with pytest.raises(InvalidCall):
        waiting.set_draft_tokens([8])
    waiting.close()
    with pytest.raises(InvalidCall, match="closed"):
        waiting.set_draft_tokens([8])

    def during(step: Any) -> Any:
        floor.set_draft_tokens([8])

    room.decoder.forward = during  # type: ignore[method-assign]
    room.engine.run(9)
    with pytest.raises(Exception, match="inside its own step"):
        room.engine.run(9)


@pytest.mark.parity("F295")
def test_a_decoder_without_the_capability_verifies_none() -> None:
    room = OpenedEngine()
    request = room.resident([4, 5])
    with pytest.raises(InvalidCall, match="verifies no drafts"):
        request.set_draft_tokens([8])
    request.set_draft_tokens([])


@pytest.mark.parity("F296")
@pytest.mark.parity("F342", stand_in="there is no draft slot; the proposal that a request keeps is forgotten")
def test_the_end_of_a_turn_and_a_preemption_forget_the_proposal() -> None:
    room, request = room_at_four([8])
    request.cancel_turn(1)
    assert list(record_of(request).drafts) == []
    room, request = room_at_four([8])
    view(room.engine).preempt(request)
    assert list(record_of(request).drafts) == []


@pytest.mark.parity("F081", "F299", "F066", scenario="DR-11")
def test_several_tokens_of_one_step_come_one_by_one_through_a_small_buffer() -> None:
    room, _ = room_at_four([8, 9, 11, 12])
    calls = room.decoder.decode_calls
    events = [event for _ in range(3) for event in room.engine.run(1)]
    assert [event.token for event in events] == [8, 9, 11]
    assert room.decoder.decode_calls == calls + 1


@pytest.mark.parity("F156", "F160")
def test_a_broken_row_of_logits_after_accepted_drafts_fails_with_them() -> None:
    room, request = room_at_four([8, 9, 10, 12])
    row_logits, calls = room.decoder.row_logits, iter(range(9))
    room.decoder.row_logits = lambda sequence: row_logits(sequence) * (float("nan") if next(calls) == 1 else 1.0)  # type: ignore[method-assign]
    (event,) = room.step()
    assert event.token == 8 and event.finish_reason is FinishReason.FAILED and EventFlags.FAILED in event.flags
    assert request.tokens == [4, 5, 6, 7, 8] and not room.blocks(request)


@pytest.mark.parity("F299")
def test_each_token_of_a_step_has_the_logprob_of_its_own_row() -> None:
    room = OpenedEngine(SyntheticDecoder(drafts=4))
    requests = [room.resident(prompt, max_generated_tokens=9, logprobs=1) for prompt in ([5, 9, 13], [7, 2, 20, 4])]
    for request in requests:
        request.set_draft_tokens(solo(request.tokens, 3))
    events = room.step()
    assert [sum(e.request_id == r.id for e in events) for r in requests] == [4, 4]
    assert len({e.token for e in events}) > 4
    for event in events:
        assert event.logprob is not None and event.logprob.token == event.token
        assert event.logprob.logprob > -1e-3  # any other row's logits say -100


# -- output with drafts is output without -----------------------------------------------------------------------------


def run_with(engine: Engine, propose: Any, requests: list[Request]) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while engine.has_pending_requests():
        for request in requests:
            if request.status is RequestStatus.RUNNING and not record_of(request).is_prefill:
                request.set_draft_tokens(propose(request.tokens))
        events += engine.run(64)
        engine.check_integrity()
    return events


@given(data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parity("F307", "F298", scenario="DR-10, SY-05, SY-07")
def test_any_proposals_give_the_same_tokens(data: st.DataObject) -> None:
    """Of a long and a continued conversation, with proposals that are right up to a point."""
    decoder = SyntheticDecoder(drafts=5)
    engine = build_engine(decoder, max_length=128, num_blocks=data.draw(st.sampled_from([64, 128])))

    def propose(sequence: list[int]) -> list[int]:
        right = data.draw(st.integers(0, 5))
        guess = solo(sequence, right, eos=-1)
        return (guess + data.draw(st.lists(st.integers(0, 63), max_size=5)))[:5]

    first, long = engine.create_request(), engine.create_request()
    first.begin_turn(A, TurnOptions(60))
    long.begin_turn(L, TurnOptions(100))
    events = run_with(engine, propose, [first, long])
    assert first.tokens == A + solo(A, 60) and long.tokens == L + solo(L, 100)
    assert tokens_of(events, long) == solo(L, 100)
    first.begin_turn([1, 12], TurnOptions(60))
    events = run_with(engine, propose, [first])
    assert tokens_of(events, first) == SECOND and first.finish_reason is FinishReason.EOS
    assert decoder.decode_calls <= max(len(solo(A, 60)), 100) + 1 + len(SECOND) + 1


@pytest.mark.parity("F307")
def test_perfect_drafts_save_steps() -> None:
    decoder = SyntheticDecoder(drafts=5)
    engine = build_engine(decoder, max_length=128)
    request = engine.create_request()
    request.begin_turn(L, TurnOptions(16))
    run_with(engine, lambda sequence: solo(sequence, 5, eos=-1), [request])
    assert request.tokens == L + solo(L, 16)
    assert decoder.decode_calls == 1 + 3  # one prefill; six, six and three tokens
    assert run_out(engine) == []
