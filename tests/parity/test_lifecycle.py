"""Requests and turns: PARITY B (F012 to F051), scenarios LC."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from engine_actor.engine import Engine
from engine_actor.errors import ContextLengthExceeded, EngineUnhealthy, InvalidCall, InvalidOption, WrongThread
from engine_actor.events import EventFlags
from engine_actor.lifecycle import LAST_TURN_ID
from engine_actor.options import RequestOptions, SamplingParams, TurnOptions
from engine_actor.request import FinishReason, Request, RequestStatus
from tests.support.doubles import P10, P20, ForcedDecoder, SyntheticDecoder, build_engine, run_out, solo, tokens_of

EOS = 1
STATES = list(RequestStatus)


def request_in(engine: Engine, state: RequestStatus) -> Request:
    """A request of one turn in the wanted state; a running turn has id 1."""
    request = engine.create_request()
    if state is RequestStatus.UNASSIGNED:
        return request
    request.begin_turn(P10, TurnOptions(max_generated_tokens=1 if state is RequestStatus.TURN_COMPLETE else 9))
    if state in (RequestStatus.ACTIVE, RequestStatus.TURN_COMPLETE):
        engine.run(8)
    if state is RequestStatus.CLOSED:
        request.close()
    assert request.status is state
    return request


def visible(request: Request) -> tuple[object, ...]:
    return (
        request.status,
        request.tokens,
        request.processed_length,
        request.turn_id,
        request.finish_reason,
        request.usage,
    )


def free_blocks(engine: Engine) -> int:
    return engine.stats()["blocks_free"]


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F012", "F018")
@pytest.mark.parametrize("state", STATES)
def test_begin_turn_is_allowed_in_two_states_only(state: RequestStatus) -> None:
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    before = visible(request)
    if state in (RequestStatus.UNASSIGNED, RequestStatus.TURN_COMPLETE):
        request.begin_turn([9])
        assert request.status is RequestStatus.ASSIGNED
    else:
        with pytest.raises(InvalidCall):
            request.begin_turn([9])
        assert visible(request) == before
    engine.check_integrity()


@pytest.mark.parity("F012", "F034", "F035")
@pytest.mark.parametrize("state", STATES)
def test_cancel_ends_a_running_turn_only(state: RequestStatus) -> None:
    """LC-06."""
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    before = visible(request)
    if state in (RequestStatus.ASSIGNED, RequestStatus.ACTIVE):
        assert not request.cancel_turn(0)
        assert not request.cancel_turn(99)
        assert visible(request) == before
        assert request.cancel_turn(1)
        assert request.status is RequestStatus.TURN_COMPLETE
        assert not request.cancel_turn(1)
    elif state is RequestStatus.TURN_COMPLETE:
        assert not any(request.cancel_turn(turn) for turn in (0, 1, 99))
        assert visible(request) == before
    else:
        with pytest.raises(InvalidCall):
            request.cancel_turn(1)
        assert visible(request) == before
    engine.check_integrity()


@pytest.mark.parity("F012", "F039")
@pytest.mark.parametrize("state", STATES)
def test_close_is_legal_in_every_state_and_gives_everything_back_once(state: RequestStatus) -> None:
    """LC-07."""
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    request.close()
    assert request.status is RequestStatus.CLOSED
    after = engine.stats()
    assert after["blocks_free"] == 128 and after["requests"] == after["residents"] == after["pending_events"] == 0
    request.close()
    assert engine.stats() == after
    assert not engine.has_pending_requests()
    engine.check_integrity()


@pytest.mark.parity("F012")
@pytest.mark.parametrize("state", STATES)
def test_run_moves_work_on_and_leaves_the_rest_alone(state: RequestStatus) -> None:
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    calls = len(engine._decoder.steps)  # type: ignore[attr-defined]
    before = visible(request)
    engine.run(8)
    ran = len(engine._decoder.steps) - calls  # type: ignore[attr-defined]
    if state in (RequestStatus.ASSIGNED, RequestStatus.ACTIVE):
        assert ran == 1 and request.status is RequestStatus.ACTIVE
    else:
        assert ran == 0 and visible(request) == before


@pytest.mark.parity("F013")
@pytest.mark.parametrize("beams", [0, 2])
def test_beams_are_refused_by_name(beams: int) -> None:
    with pytest.raises(InvalidOption, match=r"num_beams must be 1 \(beam search"):
        RequestOptions(num_beams=beams)


# -- input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F014", "F016")
def test_a_refused_turn_changes_nothing_and_uses_no_id() -> None:
    """LC-14."""
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    before = visible(request)
    for tokens in ([], [32], [-1], [4, 5, 999], [1.5], ["4"], [None]):
        with pytest.raises(InvalidOption, match="tokens"):
            request.begin_turn(tokens)  # type: ignore[arg-type]
        assert visible(request) == before
        assert not engine.has_pending_requests()
    assert request.turn_id == 0
    assert [request.begin_turn(P10), request.turn_id] == [1, 1]


@pytest.mark.parity("F015")
def test_input_is_copied() -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    tokens = np.array([5, 9, 13])
    request.begin_turn(tokens, TurnOptions(12))  # type: ignore[arg-type]
    tokens[:] = 2
    assert tokens_of(run_out(engine), request) == solo([5, 9, 13], 12)


@pytest.mark.parity("F016")
def test_turns_are_numbered_from_one() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    assert request.turn_id == 0
    for turn in (1, 2, 3):
        assert request.begin_turn(P10, TurnOptions(1)) == turn
        assert [event.turn_id for event in run_out(engine)] == [turn]


@pytest.mark.parity("F017")
def test_the_last_turn_id_is_never_passed() -> None:
    """LC-10."""
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, RequestStatus.TURN_COMPLETE)
    request._record.turn_id = LAST_TURN_ID
    before = visible(request)
    with pytest.raises(InvalidCall, match="turn ids"):
        request.begin_turn([9])
    assert visible(request) == before
    request._record.turn_id = LAST_TURN_ID - 1
    assert request.begin_turn([9]) == 2**64 - 1


@pytest.mark.parity("F019")
def test_a_turn_cannot_begin_before_the_last_ones_events_are_drained() -> None:
    engine = build_engine(ForcedDecoder())
    first, second = engine.create_request(), engine.create_request()
    first.begin_turn(P10, TurnOptions(1))
    second.begin_turn(P20, TurnOptions(1))
    assert [event.request_id for event in engine.run(1)] == [first.id]
    before = visible(second)
    with pytest.raises(InvalidCall, match="1 events of turn 1 are not drained"):
        second.begin_turn([9])
    assert visible(second) == before
    first.begin_turn([9])  # its own events are drained
    assert [event.request_id for event in engine.run(1)] == [second.id]
    assert second.begin_turn([9]) == 2
    engine.check_integrity()


class Failing:
    """Fails the nth call of a method, then gets out of the way."""

    def __init__(self, error: BaseException, calls: int = 1) -> None:
        self.error, self.calls = error, calls

    def __call__(self, *_: object) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise self.error


class FailingQueue(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: object, value: object) -> None:
        raise MemoryError("queue")


@pytest.mark.parity("F020", "F021")
@pytest.mark.parametrize("fault", ["append_before", "append_after", "queue"])
def test_a_first_turn_is_taken_in_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """LC-09: device memory and sampler state are taken in the step, where a failure is a rollback."""
    engine = build_engine(SyntheticDecoder())
    request = engine.create_request()
    record = request._record
    before = visible(request)
    with monkeypatch.context() as patched:
        if fault == "queue":
            patched.setattr(engine._lifecycle, "queue", FailingQueue())
        else:
            real = type(record.history).extend

            def broken(history: object, tokens: object) -> None:
                if fault == "append_after":
                    real(history, tokens)  # type: ignore[arg-type]
                raise MemoryError("append")

            patched.setattr(type(record.history), "extend", broken)
        with pytest.raises(MemoryError):
            request.begin_turn([5, 9, 13], TurnOptions(12))
    assert visible(request) == before and request.status is RequestStatus.UNASSIGNED
    assert not engine.has_pending_requests()
    engine.check_integrity()
    assert request.begin_turn([5, 9, 13], TurnOptions(12)) == 1
    assert tokens_of(run_out(engine), request) == solo([5, 9, 13], 12)


@pytest.mark.parity("F025", "F046")
def test_a_continuation_whose_append_fails_keeps_the_last_turn_and_can_be_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LC-16."""
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, RequestStatus.TURN_COMPLETE)
    before = visible(request)
    with monkeypatch.context() as patched:
        patched.setattr(type(request._record.history), "extend", Failing(MemoryError("append")))
        with pytest.raises(MemoryError):
            request.begin_turn([7, 8])
    assert visible(request) == before
    assert request.usage.generated_tokens == 1 and request.finish_reason is FinishReason.MAX_GENERATED_TOKENS
    engine.check_integrity()
    assert request.begin_turn([7, 8], TurnOptions(1)) == 2
    assert [event.token for event in run_out(engine)] == [5]
    assert request.tokens == [*P10, 5, 7, 8, 5]


@pytest.mark.parity("F046")
def test_a_continuation_that_cannot_be_undone_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """LC-15."""
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, RequestStatus.TURN_COMPLETE)
    other = request_in(engine, RequestStatus.ACTIVE)
    engine.run(8)
    with monkeypatch.context() as patched:
        patched.setattr(type(request._record.history), "extend", Failing(MemoryError("append")))
        patched.setattr(type(request._record.history), "truncate", Failing(RuntimeError("restore")))
        with pytest.raises(EngineUnhealthy, match="restore"):
            request.begin_turn([7, 8])
    assert request.status is RequestStatus.CLOSED
    assert engine.blocks_of(other) == engine.stats()["blocks_usable"] - free_blocks(engine)
    [event] = engine.run(8)
    assert (event.request_id, event.finish_reason) == (other.id, FinishReason.FAILED)
    with pytest.raises(EngineUnhealthy, match="restore"):
        engine.run(8)
    engine.check_integrity()


@pytest.mark.parity("F022", "F023")
def test_input_must_leave_room_for_one_token() -> None:
    """LC-01."""
    engine = build_engine(ForcedDecoder())
    request = engine.create_request(RequestOptions(max_session_tokens=8))
    before = visible(request)
    with pytest.raises(ContextLengthExceeded) as refused:
        request.begin_turn([4] * 8)
    assert (refused.value.current, refused.value.added, refused.value.limit) == (0, 8, 8)
    assert visible(request) == before
    request.begin_turn([4] * 7)
    [event] = run_out(engine)
    assert event.token == 5 and event.finish_reason is FinishReason.MAX_SESSION_TOKENS
    before = visible(request)
    with pytest.raises(ContextLengthExceeded):
        request.begin_turn([4])
    assert visible(request) == before


@pytest.mark.parity("F022", "F050")
def test_a_prompt_of_the_whole_context_is_refused() -> None:
    """LC-13."""
    engine = build_engine(ForcedDecoder(context=128))
    request = engine.create_request()
    for length in (128, 129):
        with pytest.raises(ContextLengthExceeded, match=f"{length} input tokens leave no room for an answer in 128"):
            request.begin_turn([4] * length)
    request.begin_turn(P10)
    assert request.current_length == 3


@pytest.mark.parity("F023")
def test_the_session_limit_counts_all_turns_and_is_not_reset() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request(RequestOptions(max_session_tokens=12))
    reasons = []
    for tokens in ([4, 5, 6], [7], [8, 9]):  # 3+2, 1+2, 2+2 of 12
        request.begin_turn(tokens, TurnOptions(max_generated_tokens=3 if tokens == [8, 9] else 2))
        reasons.append(run_out(engine)[-1].finish_reason)
    assert reasons == [FinishReason.MAX_GENERATED_TOKENS] * 2 + [FinishReason.MAX_SESSION_TOKENS]
    assert request.current_length == 12


@pytest.mark.parity("F023", "F050")
def test_the_session_limit_may_not_exceed_the_engines() -> None:
    engine = build_engine(ForcedDecoder(), max_length=64)
    with pytest.raises(InvalidOption, match="max_session_tokens must be at most 64, not 65"):
        engine.create_request(RequestOptions(max_session_tokens=65))
    for options in (RequestOptions(max_session_tokens=64), RequestOptions(max_session_tokens=0), None):
        request = engine.create_request(options)
        with pytest.raises(ContextLengthExceeded):
            request.begin_turn([4] * 64)
        request.begin_turn([4] * 63)
        assert run_out(engine)[-1].finish_reason is FinishReason.MAX_SESSION_TOKENS
        assert request.current_length == 64


# -- limits, finish reasons, usage ------------------------------------------------------------------------------------


@pytest.mark.parity("F024", "F026")
def test_a_turns_limit_counts_its_own_output_only() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    for limit in (4, 4, 7, 1):
        request.begin_turn([8, 9], TurnOptions(limit))
        events = run_out(engine)
        assert tokens_of(events, request) == [5] * limit
        assert events[-1].finish_reason is FinishReason.MAX_GENERATED_TOKENS


@pytest.mark.parity("F024")
@pytest.mark.parametrize("options", [None, TurnOptions(max_generated_tokens=0)])
def test_without_a_limit_the_session_ends_the_turn(options: TurnOptions | None) -> None:
    engine = build_engine(ForcedDecoder(), max_length=20)
    request = engine.create_request()
    request.begin_turn(P10, options)
    events = run_out(engine)
    assert len(tokens_of(events, request)) == 17
    assert events[-1].finish_reason is FinishReason.MAX_SESSION_TOKENS


@pytest.mark.parity("F027")
def test_every_finish_reason_has_its_run() -> None:
    seen: list[FinishReason | None] = []

    def finish(forced: int | list[int], options: TurnOptions, session: int = 0) -> None:
        engine = build_engine(ForcedDecoder(forced))
        request = engine.create_request(RequestOptions(max_session_tokens=session))
        assert request.finish_reason is None
        request.begin_turn(P10, options)
        assert request.finish_reason is None
        events = run_out(engine)
        assert request.finish_reason is events[-1].finish_reason
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        seen.append(request.finish_reason)

    finish([5, EOS], TurnOptions())
    finish([5, 7], TurnOptions(stop_token_ids=frozenset({7})))
    finish(5, TurnOptions(max_generated_tokens=2))
    finish(5, TurnOptions(), session=6)
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, RequestStatus.ACTIVE)
    request.cancel_turn(1)
    seen.append(request.finish_reason)
    engine = build_engine(decoder := ForcedDecoder())
    request = request_in(engine, RequestStatus.ACTIVE)
    decoder.fail_next = lambda: RuntimeError("fatal")
    engine.run(8)
    seen.append(request.finish_reason)
    assert seen == [
        FinishReason.EOS,
        FinishReason.STOP_SEQUENCE,
        FinishReason.MAX_GENERATED_TOKENS,
        FinishReason.MAX_SESSION_TOKENS,
        FinishReason.CANCELLED,
        FinishReason.FAILED,
    ]
    assert set(seen) == set(FinishReason)


@pytest.mark.parity("F027")
@pytest.mark.parametrize(
    ("token", "stops", "limit", "reason"),
    [
        (EOS, {EOS}, 1, FinishReason.EOS),
        (7, {7}, 1, FinishReason.STOP_SEQUENCE),
        (5, set(), 1, FinishReason.MAX_SESSION_TOKENS),
    ],
)
def test_of_several_reasons_the_first_in_order_is_given(
    token: int, stops: set[int], limit: int, reason: FinishReason
) -> None:
    """C27: every one of these turns also reaches its session's and its own limit."""
    engine = build_engine(ForcedDecoder(token))
    request = engine.create_request(RequestOptions(max_session_tokens=4))
    request.begin_turn(P10, TurnOptions(limit, stop_token_ids=frozenset(stops)))
    assert run_out(engine)[-1].finish_reason is reason


@pytest.mark.parity("F028", "F029", "F030", "F031")
def test_eos_is_neither_appended_nor_emitted_nor_replayed() -> None:
    """LC-03."""
    decoder = ForcedDecoder([5, 6, EOS, 7, EOS])
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10)
    events = run_out(engine)
    assert [event.token for event in events] == [5, 6, None]
    assert (request.current_length, request.processed_length) == (5, 5)
    assert events[-1].finish_reason is FinishReason.EOS
    assert (events[-1].usage.prompt_tokens, events[-1].usage.generated_tokens) == (3, 2)
    request.begin_turn([10, 11])
    events = run_out(engine)
    assert decoder.packed_counts()[3] == [2] and decoder.steps[3].past_sequence_lengths.tolist() == [5]
    assert (events[-1].usage.prompt_tokens, events[-1].usage.generated_tokens) == (2, 1)
    assert request.tokens == [4, 5, 6, 5, 6, 10, 11, 7]


@pytest.mark.parity("F028")
def test_ignored_eos_is_a_token_like_any_other() -> None:
    engine = build_engine(ForcedDecoder(EOS))
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(2, ignore_eos=True))
    assert tokens_of(run_out(engine), request) == [EOS, EOS]
    assert request.tokens == [*P10, EOS, EOS]


@pytest.mark.parity("F029", "F030", "F031")
def test_after_a_length_finish_the_last_token_is_replayed_and_counts_nowhere() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(2))
    run_out(engine)
    assert (request.current_length, request.processed_length) == (5, 4)
    request.begin_turn([10, 11], TurnOptions(1))
    events = run_out(engine)
    assert decoder.packed_counts()[-1] == [3] and decoder.steps[-1].past_sequence_lengths.tolist() == [4]
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.generated_tokens, usage.cached_tokens) == (2, 1, 4)


@pytest.mark.parity("F032")
def test_eos_in_the_input_is_ordinary_context() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    request.begin_turn([4, EOS, 6], TurnOptions(2))
    assert tokens_of(run_out(engine), request) == [5, 5]
    request.begin_turn([EOS, 12], TurnOptions(2))
    assert tokens_of(run_out(engine), request) == [5, 5]
    assert request.tokens == [4, EOS, 6, 5, 5, EOS, 12, 5, 5]


@pytest.mark.parity("F033")
def test_a_complete_turn_keeps_its_memory_until_close() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(6))  # 8 of 9 tokens are computed; blocks for the ninth are not taken
    run_out(engine)
    assert (free_blocks(engine), engine.stats()["residents"]) == (126, 1)
    for _ in range(3):
        engine.run(8)
    assert free_blocks(engine) == 126
    request.close()
    assert (free_blocks(engine), engine.stats()["residents"]) == (128, 0)


# -- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F034", "F036")
def test_cancel_keeps_what_was_committed_and_says_so_once() -> None:
    """LC-04."""
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    turn = request.begin_turn(P10)
    engine.run(8)
    engine.run(8)
    free = free_blocks(engine)
    assert request.cancel_turn(turn)
    assert (request.current_length, request.processed_length, free_blocks(engine)) == (5, 4, free)
    assert not request.cancel_turn(turn)
    events = run_out(engine)
    assert [(e.flags, e.finish_reason) for e in events] == [(EventFlags.TURN_FINISHED, FinishReason.CANCELLED)]
    assert events[0].usage.generated_tokens == 2
    request.begin_turn([9], TurnOptions(1))
    run_out(engine)
    assert request.tokens == [*P10, 5, 5, 9, 5]
    assert decoder.steps[-1].past_sequence_lengths.tolist() == [4]


@pytest.mark.parity("F034", "F079")
def test_tokens_committed_before_a_cancel_are_delivered_before_its_end() -> None:
    engine = build_engine(ForcedDecoder())
    requests = [engine.create_request() for _ in range(3)]
    for request in requests:
        request.begin_turn(P10)
    assert [e.request_id for e in engine.run(1)] == [requests[0].id]
    assert requests[2].cancel_turn(1)
    events = [event for _ in range(3) for event in engine.run(1)]
    assert [(e.request_id, e.token) for e in events] == [(2, 5), (3, 5), (3, None)]
    assert events[-1].finish_reason is FinishReason.CANCELLED


@pytest.mark.parity("F037")
def test_a_turn_cancelled_before_admission_joins_the_next_one() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    turn = request.begin_turn(P10)
    request.cancel_turn(turn)
    assert free_blocks(engine) == 128 and request.processed_length == 0
    assert [e.finish_reason for e in run_out(engine)] == [FinishReason.CANCELLED]
    request.begin_turn([7, 8], TurnOptions(1))
    events = run_out(engine)
    assert decoder.packed_counts() == [[5]]
    assert decoder.steps[0].input_ids.tolist() == [4, 5, 6, 7, 8]
    assert events[-1].usage.prompt_tokens == 2


LONG = [3, 8, 2, 15, 6, 11, 20, 9, 4]


@pytest.mark.parity("F036", "F037")
@pytest.mark.parametrize("runs", range(0, 9))
@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_a_turn_cancelled_at_any_point_can_be_continued(runs: int, chunk: int) -> None:
    """Before admission, after each part of the prompt, in decode: the next turn equals the undisturbed answer to the
    same tokens."""
    engine = build_engine(SyntheticDecoder(), chunk_size=chunk)
    request = engine.create_request()
    request.begin_turn(LONG)
    for _ in range(runs):
        engine.run(8)
        engine.check_integrity()
    kept = request.tokens
    assert request.cancel_turn(1)
    assert request.tokens == kept == LONG + solo(LONG, len(kept) - len(LONG))
    run_out(engine)
    request.begin_turn([7, 12], TurnOptions(9))
    assert tokens_of(run_out(engine), request) == solo([*kept, 7, 12], 9)


# -- how a turn follows another ---------------------------------------------------------------------------------------


def after_eos(request: Request, engine: Engine) -> Request:
    request.begin_turn([3, 62], TurnOptions())  # 3, 62 -> 3: next 3+62+2=67 mod 64
    run_out(engine)
    return request


def after_length(request: Request, engine: Engine) -> Request:
    request.begin_turn(LONG, TurnOptions(6))
    run_out(engine)
    return request


def after_cancel(request: Request, engine: Engine) -> Request:
    request.begin_turn(LONG)
    engine.run(8)
    engine.run(8)
    request.cancel_turn(1)
    run_out(engine)
    return request


def after_rewind(request: Request, engine: Engine) -> Request:
    after_length(request, engine).rewind(11)
    return request


def after_rewind_to_nothing(request: Request, engine: Engine) -> Request:
    after_length(request, engine).rewind(0)
    return request


def after_fork(request: Request, engine: Engine) -> Request:
    return after_length(request, engine).fork()


def after_fork_of_a_closed_parent(request: Request, engine: Engine) -> Request:
    child = after_length(request, engine).fork()
    request.close()
    return child


def after_preemption(request: Request, engine: Engine) -> Request:
    request.begin_turn(LONG, TurnOptions(6))
    engine.run(8)
    engine.run(8)
    engine._lifecycle.preempt(request._record)
    run_out(engine)
    return request


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    "prepare",
    [
        after_eos,
        after_length,
        after_cancel,
        after_rewind,
        after_rewind_to_nothing,
        after_fork,
        after_fork_of_a_closed_parent,
        after_preemption,
    ],
)
def test_every_way_to_continue_equals_the_closed_form(
    prepare: Callable[[Request, Engine], Request], reuse: bool
) -> None:
    engine = build_engine(SyntheticDecoder(), prefix_reuse=reuse)
    request = prepare(engine.create_request(), engine)
    history = request.tokens
    for tokens in ([7], [21, 30, 2, 5, 9]):
        history = history + tokens
        request.begin_turn(tokens, TurnOptions(7))
        answer = tokens_of(run_out(engine), request)
        assert answer == solo(history, 7)
        history = history + answer
        assert request.tokens == history


def test_a_prompt_after_a_rewind_never_meets_the_prefix_of_the_old_one() -> None:
    """The remembered match of an earlier sequence of the same length must be forgotten."""
    engine = build_engine(SyntheticDecoder(), prefix_reuse=True)
    old, new = [3, 8, 2, 15, 6, 11, 20, 9, 4], [9, 4, 31, 2, 7, 7, 40, 13, 22]
    for _ in range(2):
        request = engine.create_request()
        request.begin_turn(old, TurnOptions(1))
        run_out(engine)
    assert request.usage.cached_tokens == 8
    request.rewind(0)
    request.begin_turn(new, TurnOptions(8))
    assert tokens_of(run_out(engine), request) == solo(new, 8)
    assert request.usage.cached_tokens == 0


def test_a_row_without_numbers_fails_alone_and_can_be_asked_again() -> None:
    """F038 in this design: state that is gone is computed again from the history, never refused."""
    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    broken, fine = engine.create_request(), engine.create_request()
    broken.begin_turn([5, 9, 13], TurnOptions(6))
    fine.begin_turn([7, 2, 20, 4], TurnOptions(6))
    engine.run(8)
    real = decoder.row_logits
    decoder.row_logits = lambda s: real(s) * (np.nan if s[0] == 5 else 1)  # type: ignore[method-assign]
    events = engine.run(8)
    assert [(e.request_id, e.finish_reason) for e in events] == [(1, FinishReason.FAILED), (2, None)]
    engine.check_integrity()
    decoder.row_logits = real  # type: ignore[method-assign]
    assert tokens_of(run_out(engine), fine) == solo([7, 2, 20, 4], 6)[2:]
    assert (broken.tokens, broken.processed_length) == ([5, 9, 13, 21], 0)
    broken.begin_turn([11], TurnOptions(4))
    assert tokens_of(run_out(engine), broken) == solo([5, 9, 13, 21, 11], 4)


# -- close, abandonment, the engine's end -----------------------------------------------------------------------------


@pytest.mark.parity("F039", "F074")
def test_close_purges_its_own_events_only() -> None:
    """EV-08."""
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    first, second, third = (engine.create_request() for _ in range(3))
    for request in (first, second, third):
        request.begin_turn(P10)
    assert [e.request_id for e in engine.run(1)] == [first.id]
    second.close()
    assert [e.request_id for e in engine.run(1)] == [third.id]
    assert decoder.decode_calls == 1
    assert [e.request_id for e in engine.run(8)] == [first.id, third.id]
    assert decoder.packed_counts()[1] == [1, 1]


@pytest.mark.parity("F040")
def test_a_request_belongs_to_one_engine() -> None:
    """LC-08: a handle knows its own engine; the guard behind it refuses another's request."""
    mine, other = build_engine(ForcedDecoder()), build_engine(ForcedDecoder())
    request = mine.create_request()
    request.begin_turn(P10)
    before = visible(request)
    with pytest.raises(InvalidCall, match="does not belong"):
        other._lifecycle.close(request._record)
    assert visible(request) == before
    request.close()
    other._lifecycle.close(request._record)
    assert request.status is RequestStatus.CLOSED
    assert other.get_request(request.id) is None


def drop_elsewhere(handles: list[Request]) -> None:
    """Releases the last reference on another thread."""
    thread = threading.Thread(target=handles.clear)
    thread.start()
    thread.join()


@pytest.mark.parity("F041", "F044")
@pytest.mark.parametrize("boundary", ["run", "has_pending_requests", "begin_turn"])
@pytest.mark.parametrize("state", STATES)
def test_a_dropped_request_is_reclaimed_at_the_next_call_of_the_owner(boundary: str, state: RequestStatus) -> None:
    """LC-11."""
    engine = build_engine(ForcedDecoder())
    other = engine.create_request()
    held = free_blocks(engine)
    handles = [request_in(engine, state)]
    after_use = free_blocks(engine)
    drop_elsewhere(handles)
    assert free_blocks(engine) == after_use  # only a flag was set
    if boundary == "run":
        engine.run(8)
    elif boundary == "has_pending_requests":
        assert not engine.has_pending_requests()
    else:
        other.begin_turn(P20)
    assert free_blocks(engine) == held
    assert engine.stats()["requests"] == 1
    engine.check_integrity()
    engine.run(8)
    assert engine.stats()["requests"] == 1


@pytest.mark.parity("F042")
def test_taking_a_handle_again_cancels_abandonment() -> None:
    """EV-13."""
    engine = build_engine(ForcedDecoder(), max_batch_size=1)
    handles = [request_in(engine, RequestStatus.TURN_COMPLETE)]
    request_id, free = handles[0].id, free_blocks(engine)
    drop_elsewhere(handles)
    again = engine.get_request(request_id)
    engine.run(8)
    assert again is not None and again.status is RequestStatus.TURN_COMPLETE
    assert free_blocks(engine) == free and engine.stats()["residents"] == 1
    assert engine.get_request(request_id) is again
    again.begin_turn([9], TurnOptions(1))
    assert tokens_of(run_out(engine), again) == [5]


@pytest.mark.parity("F043")
def test_without_an_abandonment_the_boundary_allocates_nothing() -> None:
    engine = build_engine(ForcedDecoder())
    requests = [request_in(engine, RequestStatus.TURN_COMPLETE) for _ in range(4)]
    reclaim = engine._lifecycle.reclaim_abandoned
    reclaim()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(1000):
            reclaim()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 512
    assert len(requests) == 4


@pytest.mark.parity("F044", "F071")
def test_events_and_queued_work_of_an_orphan_are_dropped() -> None:
    """EV-14."""
    decoder = ForcedDecoder()
    engine = build_engine(decoder, max_batch_size=1)
    first, second = engine.create_request(), engine.create_request()
    first.begin_turn(P10, TurnOptions(1))
    engine.run(8)
    second.begin_turn(P20, TurnOptions(1))
    handles = [first]
    del first
    drop_elsewhere(handles)
    events = engine.run(8)  # reclaims before it plans
    assert [(e.request_id, e.token) for e in events] == [(second.id, 5)]
    assert engine.stats()["requests"] == 1


@pytest.mark.parity("F044")
def test_the_undrained_events_of_an_orphan_never_come() -> None:
    engine = build_engine(ForcedDecoder())
    first, second = engine.create_request(), engine.create_request()
    first.begin_turn(P10, TurnOptions(1))
    second.begin_turn(P20, TurnOptions(1))
    assert [e.request_id for e in engine.run(1)] == [first.id]
    handles = [second]
    del second
    drop_elsewhere(handles)
    assert not engine.has_pending_requests()
    assert list(engine.run(8)) == []
    assert engine.stats()["pending_events"] == 0


@pytest.mark.parity("F045")
@pytest.mark.parametrize("state", [RequestStatus.ACTIVE, RequestStatus.TURN_COMPLETE, RequestStatus.ASSIGNED])
def test_handles_outlive_their_engine_as_tombstones(state: RequestStatus) -> None:
    """LC-12."""
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    del engine
    gc.collect()
    assert request.status is RequestStatus.CLOSED
    request.close()
    for call in (
        lambda: request.begin_turn([4]),
        lambda: request.cancel_turn(1),
        request.fork,
        lambda: request.rewind(0),
    ):
        with pytest.raises(InvalidCall):
            call()


@pytest.mark.parity("F051")
def test_a_running_request_needs_no_handle_to_stay_alive_within_a_call() -> None:
    """Dropping handles in the middle of a turn frees nothing before the next boundary, and nothing twice."""
    engine = build_engine(ForcedDecoder())
    handles = [request_in(engine, RequestStatus.ACTIVE)]
    held = free_blocks(engine)
    record = handles[0]._record
    drop_elsewhere(handles)
    gc.collect()
    assert free_blocks(engine) == held and record.status is RequestStatus.ACTIVE
    engine.run(1)
    assert record.status is RequestStatus.CLOSED and free_blocks(engine) == 128
    engine.check_integrity()


@pytest.mark.parity("F006")
def test_the_engine_keeps_its_decoder_alive() -> None:
    decoder = ForcedDecoder([5, 6, EOS])
    engine = build_engine(decoder)
    del decoder
    gc.collect()
    request = engine.create_request()
    request.begin_turn(P10)
    assert tokens_of(run_out(engine), request) == [5, 6]


# -- threads and re-entrancy ------------------------------------------------------------------------------------------


def all_calls(engine: Engine, request: Request) -> list[Callable[[], object]]:
    buffer = engine.create_event_buffer(4)
    return [
        engine.create_request,
        lambda: engine.get_request(request.id),
        lambda: engine.create_event_buffer(1),
        engine.has_pending_requests,
        engine.stats,
        lambda: engine.run(4),
        lambda: engine.run(0),
        lambda: engine.run(buffer),
        lambda: request.begin_turn([4]),
        lambda: request.cancel_turn(1),
        lambda: request.rewind(0),
        request.fork,
        request.close,
    ]


@pytest.mark.parity("F047")
@pytest.mark.parametrize("state", [RequestStatus.ACTIVE, RequestStatus.TURN_COMPLETE])
def test_every_call_from_another_thread_is_refused(state: RequestStatus) -> None:
    """LC-11."""
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    before, stats = visible(request), engine.stats()
    errors: list[BaseException | None] = []

    def try_all() -> None:
        for call in calls:
            try:
                call()
                errors.append(None)
            except BaseException as error:
                errors.append(error)

    calls = all_calls(engine, request)
    thread = threading.Thread(target=try_all)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [WrongThread] * len(calls)
    assert (visible(request), engine.stats()) == (before, stats)


@pytest.mark.parity("F047")
def test_the_engine_starts_no_thread() -> None:
    before = threading.active_count()
    engine = build_engine(ForcedDecoder())
    request_in(engine, RequestStatus.TURN_COMPLETE)
    assert threading.active_count() == before


@pytest.mark.parity("F048")
def test_no_call_is_allowed_from_inside_a_step() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    active = request_in(engine, RequestStatus.ACTIVE)
    dormant = request_in(engine, RequestStatus.TURN_COMPLETE)
    calls = all_calls(engine, active) + all_calls(engine, dormant)
    errors: list[type[BaseException]] = []

    def forced(_: list[int]) -> int:
        for call in calls:
            try:
                call()
            except BaseException as error:
                errors.append(type(error))
        return 5

    decoder.choose = forced
    before = visible(dormant)
    events = engine.run(8)
    assert errors == [InvalidCall] * len(calls)
    assert [(e.request_id, e.token) for e in events] == [(active.id, 5)]
    assert visible(dormant) == before
    engine.check_integrity()


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F049")
def test_options_are_reusable_and_cannot_be_edited() -> None:
    engine = build_engine(ForcedDecoder())
    options, session = TurnOptions(2, stop_token_ids=frozenset({9})), RequestOptions(max_session_tokens=50)
    for _ in range(2):
        request = engine.create_request(session)
        request.begin_turn(P10, options)
        assert tokens_of(run_out(engine), request) == [5, 5]
    for target, field in ((options, "max_generated_tokens"), (session, "salt"), (SamplingParams(), "seed")):
        with pytest.raises(FrozenInstanceError):
            setattr(target, field, 99)
    engine.create_request(None).begin_turn(P10, None)


@pytest.mark.parity("F050")
@pytest.mark.parametrize(("context", "blocks", "expected"), [(128, 128, 128), (128, 10, 40), (64, 128, 64)])
def test_max_length_defaults_to_what_context_and_pool_allow(context: int, blocks: int, expected: int) -> None:
    engine = build_engine(ForcedDecoder(context=context), num_blocks=blocks)
    assert engine.max_length == expected
