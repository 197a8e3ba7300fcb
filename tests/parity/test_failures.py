"""Failure classes and outcomes: J (F169 to F180). Every failure is injected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine_actor.core.engine import Engine
from engine_actor.core.step import StepTransaction
from engine_actor.errors import (
    ContractViolation,
    EngineUnhealthy,
    ExecutionMemoryExceeded,
    InvalidCall,
    OutOfBlocks,
    RetryableStepError,
)
from engine_actor.memory.fixed_state import StateReservation
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.memory.reservation import Reservation
from engine_actor.memory.window_ring import WindowReservation
from engine_actor.options import TurnOptions
from engine_actor.requests.events import ErrorCode, EventFlags
from engine_actor.requests.outcomes import StepOutcome
from engine_actor.requests.record import FinishReason, RequestStatus, TokenHistory
from engine_actor.requests.request import Request
from engine_actor.sampling.batched_sampler import BatchedSampler
from engine_actor.scheduling.scheduler import Scheduler
from engine_actor.scheduling.step_plan import StepPlan
from tests.support.doubles import (
    P10,
    P20,
    P30,
    ForcedDecoder,
    RecurrentDecoder,
    SyntheticDecoder,
    WindowedDecoder,
    build_engine,
    run_out,
    solo,
    tokens_of,
)
from tests.support.engine_view import ADD_EVENTS, PUBLISH_ROW, view

FAILED = EventFlags.TURN_FINISHED | EventFlags.FAILED


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def mixed_engine(decoder: ForcedDecoder) -> tuple[Engine, list[Request]]:
    """X runs, Y waits for a place, Z is dormant."""
    engine = build_engine(decoder, max_batch_size=4, max_residents=2)
    x, y, z = (engine.create_request() for _ in range(3))
    z.begin_turn(P30, TurnOptions(1))
    engine.run(8)
    x.begin_turn(P10)
    engine.run(8)
    y.begin_turn(P20)
    return engine, [x, y, z]


def memory_of(engine: Engine) -> list[int | None]:
    """Blocks, state slots and rings that a step could take."""
    cache = view(engine).cache
    return [cache.pool.free_count, cache.available_slots, cache.available_rings]


def expect_stopped(engine: Engine, decoder: ForcedDecoder, cause: str) -> None:
    """The same error for every later run and turn; the model is not called again; close still works (F175, F176)."""
    calls = decoder.decode_calls
    errors = []
    for _ in range(3):
        with pytest.raises(EngineUnhealthy, match=cause) as raised:
            engine.run(8)
        errors.append(raised.value)
    assert errors[0] is errors[1] is errors[2] is engine.fatal_error
    request = engine.create_request()
    with pytest.raises(EngineUnhealthy, match=cause):
        request.begin_turn(P10)
    assert request.status is RequestStatus.NEW and not request.tokens
    assert decoder.decode_calls == calls
    request.close()


@pytest.mark.parity("F169")
def test_the_eight_outcomes() -> None:
    assert [outcome.name for outcome in StepOutcome] == [
        "NO_WORK",
        "CAPACITY_DEFERRED",
        "UNSERVICEABLE_REQUEST",
        "COMMITTED",
        "RETRYABLE_BATCH_ABORT",
        "EXECUTION_CAPACITY_EXCEEDED",
        "EXECUTION_CONTRACT_FAILURE",
        "FATAL_EXECUTION_FAILURE",
    ]


@pytest.mark.parity("F169", "F170", "F171", "F172", scenario="FA-04, FA-12")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RetryableStepError("busy"), StepOutcome.RETRYABLE_BATCH_ABORT),
        (MemoryError("host"), StepOutcome.EXECUTION_CAPACITY_EXCEEDED),
        (ExecutionMemoryExceeded("device"), StepOutcome.EXECUTION_CAPACITY_EXCEEDED),
        (torch.OutOfMemoryError("CUDA out of memory"), StepOutcome.EXECUTION_CAPACITY_EXCEEDED),
        (
            RuntimeError("Failed to allocate memory for requested buffer of size 2443129088"),
            StepOutcome.EXECUTION_CAPACITY_EXCEEDED,
        ),
        (RuntimeError("Non-zero status code returned while running Add node"), StepOutcome.FATAL_EXECUTION_FAILURE),
        (ValueError("anything"), StepOutcome.FATAL_EXECUTION_FAILURE),
        (ContractViolation("rows"), StepOutcome.FATAL_EXECUTION_FAILURE),
        (AssertionError("ours"), StepOutcome.FATAL_EXECUTION_FAILURE),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_the_model_raises_decides_what_follows(error: Exception, outcome: StepOutcome, late: bool) -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(2))
    engine.run(8)
    setattr(decoder, "fail_next" if late else "fail_before", lambda: error)
    [event] = engine.run(8)
    assert engine.last_report.outcome is outcome
    assert str(error) in event.message and type(error).__name__ in event.message
    assert outcome.value in event.message and "transaction 2" in event.message
    engine.check_integrity()
    if outcome is StepOutcome.FATAL_EXECUTION_FAILURE:
        assert (event.flags, event.error_code, event.request_id) == (FAILED, ErrorCode.FATAL, request.id)
        expect_stopped(engine, decoder, "Cause")
        return
    assert event.request_id is None and engine.fatal_error is None
    assert (request.tokens, request.status) == ([*P10, 5], RequestStatus.RUNNING)
    memory = outcome is StepOutcome.EXECUTION_CAPACITY_EXCEEDED
    assert event.flags == (EventFlags.CAPACITY_BLOCKED if memory else EventFlags.RETRYABLE)
    assert event.error_code == (ErrorCode.EXECUTION_MEMORY if memory else ErrorCode.RETRYABLE)
    assert [e.token for e in run_out(engine)] == [5]


@pytest.mark.parity("F170", scenario="FA-05")
def test_a_failure_after_the_model_is_retryable_and_names_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(2))
    with monkeypatch.context() as patched:
        patched.setattr(BatchedSampler, "sample", raising(ValueError("bad row")))
        [event] = engine.run(8)
    assert event.flags == EventFlags.RETRYABLE and "ValueError: bad row" in event.message
    assert (request.tokens, request.status) == (P10, RequestStatus.WAITING)
    assert engine.stats()["blocks_free"] == 128
    engine.check_integrity()
    assert tokens_of(run_out(engine), request) == [5, 5]


@pytest.mark.parity("F161", "F162", scenario="FA-11")
def test_a_continuation_that_fails_stays_where_it_was() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(1))
    run_out(engine)
    request.begin_turn([7, 8], TurnOptions(1))
    decoder.fail_next = lambda: RetryableStepError("now")
    engine.run(8)
    assert (request.status, request.current_length, request.num_computed_tokens) == (RequestStatus.WAITING, 6, 3)
    assert engine.stats()["residents"] == 1
    assert [e.token for e in run_out(engine)] == [5]


@pytest.mark.parity("F180")
@pytest.mark.parametrize("error", [RetryableStepError, MemoryError])
def test_repetition_alone_never_turns_fatal(error: type[Exception]) -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    requests = [engine.create_request(), engine.create_request()]
    for request, prompt in zip(requests, ([5, 9, 13], [7, 2, 20, 4]), strict=True):
        request.begin_turn(prompt, TurnOptions(6))
    engine.run(8)
    for _ in range(50):
        decoder.fail_next = lambda: error("again")
        assert [event.request_id for event in engine.run(8)] == [None]
        engine.check_integrity()
    run_out(engine)
    assert [r.tokens for r in requests] == [[5, 9, 13, *solo([5, 9, 13], 6)], [7, 2, 20, 4, *solo([7, 2, 20, 4], 6)]]


# -- fatal ------------------------------------------------------------------------------------------------------------


def in_reserve(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(PagedCache, "reserve", raising(OutOfBlocks("injected")))


def in_reserve_for_want_of_memory(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(PagedCache, "reserve", raising(MemoryError("injected")))


def in_decode(_: pytest.MonkeyPatch, decoder: ForcedDecoder) -> None:
    decoder.fail_next = lambda: RuntimeError("injected")


def in_prepare(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(Reservation, "validate", raising(ContractViolation("injected")))


def in_prepare_for_want_of_memory(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(StepTransaction, ADD_EVENTS, raising(MemoryError("injected")))


def in_rollback_restore(patched: pytest.MonkeyPatch, decoder: ForcedDecoder) -> None:
    decoder.fail_next = lambda: RetryableStepError("first")
    patched.setattr(TokenHistory, "unstage", raising(RuntimeError("injected")))


def in_rollback_release(patched: pytest.MonkeyPatch, decoder: ForcedDecoder) -> None:
    decoder.fail_next = lambda: RetryableStepError("first")
    patched.setattr(Reservation, "release", raising(RuntimeError("injected")))


def in_rollback_after_prepare(patched: pytest.MonkeyPatch, decoder: ForcedDecoder) -> None:
    in_prepare(patched, decoder)
    patched.setattr(TokenHistory, "unstage", raising(RuntimeError("injected")))


def in_commit_before_anything(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(Reservation, "commit", raising(RuntimeError("injected")))


def in_commit_half_way(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(TokenHistory, "publish", raising(RuntimeError("injected")))


def after_commit(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(Scheduler, "note_committed", raising(RuntimeError("injected")))


def in_planning(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(Scheduler, "plan", raising(ContractViolation("injected")))


def with_an_invalid_plan(patched: pytest.MonkeyPatch, _: ForcedDecoder) -> None:
    patched.setattr(Scheduler, "plan", lambda _, number: StepPlan(number, StepOutcome.COMMITTED))


FATAL = [
    in_reserve,
    in_reserve_for_want_of_memory,
    in_decode,
    in_prepare,
    in_prepare_for_want_of_memory,
    in_rollback_restore,
    in_rollback_release,
    in_rollback_after_prepare,
    in_commit_before_anything,
    in_commit_half_way,
    after_commit,
    in_planning,
    with_an_invalid_plan,
]


@pytest.mark.parity("F078", "F153", "F163", "F173", "F174", "F175", "F176", "F177", "F179", scenario="FA-02, FA-18")
@pytest.mark.parametrize("fault", FATAL)
def test_a_fatal_failure_ends_what_runs_or_waits_and_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch, ForcedDecoder], None]
) -> None:
    decoder = ForcedDecoder()
    engine, (x, y, z) = mixed_engine(decoder)
    with monkeypatch.context() as patched:
        fault(patched, decoder)
        events = list(engine.run(1))
    for _ in range(4):
        if engine.has_pending_requests():
            events += engine.run(1)
    failures = [event for event in events if EventFlags.FAILED in event.flags]
    assert sorted(event.request_id or 0 for event in failures) == [x.id, y.id]
    for event, request in zip(sorted(failures, key=lambda e: e.request_id or 0), (x, y), strict=True):
        assert (event.flags, event.turn_id, event.finish_reason) == (FAILED, 1, FinishReason.FAILED)
        assert event.error_code == ErrorCode.FATAL and event.usage == request.usage
        assert "in transaction" in event.message and "Cause: " in event.message
        assert request.status is RequestStatus.IDLE and request.finish_reason is FinishReason.FAILED
    assert z.finish_reason is FinishReason.MAX_GENERATED_TOKENS
    assert engine.metrics.fatal_execution_failures == 1
    expect_stopped(engine, decoder, "injected" if fault is not with_an_invalid_plan else "claims to be executable")
    for request in (x, y, z):
        with pytest.raises((EngineUnhealthy, InvalidCall)):
            request.begin_turn([4])
        request.close()
        assert request.status is RequestStatus.CLOSED
    stats = engine.stats()
    assert (stats["requests"], stats["residents"], stats["blocks_free"]) == (0, 0, 128)
    view(engine).cache.check_integrity()


@pytest.mark.parity("F163", "F176")
@pytest.mark.parametrize("fault", [in_decode, in_prepare, in_rollback_restore])
def test_a_failure_before_commit_leaves_committed_state_intact(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch, ForcedDecoder], None]
) -> None:
    decoder = ForcedDecoder()
    engine, (x, y, z) = mixed_engine(decoder)
    before = [(r.tokens, r.num_computed_tokens, engine.blocks_of(r)) for r in (x, y, z)]
    free = engine.stats()["blocks_free"]
    with monkeypatch.context() as patched:
        fault(patched, decoder)
        engine.run(8)
    assert [(r.tokens, r.num_computed_tokens, engine.blocks_of(r)) for r in (x, y, z)] == before
    assert engine.stats()["blocks_free"] == free


@pytest.mark.parity("F163", "F144")
@pytest.mark.parametrize("decoder", [ForcedDecoder(), RecurrentDecoder(), WindowedDecoder()])
def test_a_rollback_that_cannot_restore_a_sequence_still_gives_the_memory_of_its_step_back(
    monkeypatch: pytest.MonkeyPatch, decoder: SyntheticDecoder
) -> None:
    engine = build_engine(decoder, chunk_size=8)
    running, new = (engine.create_request() for _ in range(2))
    running.begin_turn([4] * 8)
    engine.run(8)  # the next token of it needs a block
    new.begin_turn([6] * 10)
    before = memory_of(engine)
    decoder.fail_next = lambda: RetryableStepError("first")
    with monkeypatch.context() as patched:
        patched.setattr(TokenHistory, "unstage", raising(RuntimeError("injected")))
        engine.run(8)
    assert engine.fatal_error is not None
    assert memory_of(engine) == before
    view(engine).cache.check_integrity()
    running.close()
    new.close()
    view(engine).cache.check_integrity()


@pytest.mark.parity("F163", "F144", "F176")
@pytest.mark.parametrize(
    ("decoder", "failing"),
    [(RecurrentDecoder(), Reservation), (RecurrentDecoder(), StateReservation), (WindowedDecoder(), WindowReservation)],
)
def test_one_kind_of_memory_that_cannot_be_given_back_keeps_no_other(
    monkeypatch: pytest.MonkeyPatch, decoder: SyntheticDecoder, failing: type
) -> None:
    engine = build_engine(decoder, chunk_size=8)
    request = engine.create_request()
    request.begin_turn([4] * 10)
    before = memory_of(engine)
    decoder.fail_next = lambda: RetryableStepError("first")
    with monkeypatch.context() as patched:
        patched.setattr(failing, "release", raising(RuntimeError("injected")))
        engine.run(8)
    assert engine.fatal_error is not None
    kept = [now != free for now, free in zip(memory_of(engine), before, strict=True)]
    assert kept == [failing is Reservation, failing is StateReservation, failing is WindowReservation]
    request.close()
    assert memory_of(engine) == before
    view(engine).cache.check_integrity()


@pytest.mark.parity("F178", scenario="FA-16")
def test_what_a_failing_commit_has_published_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    requests = [engine.create_request() for _ in range(2)]
    for request in requests:
        request.begin_turn(P10)
    published: list[int] = []
    real = getattr(StepTransaction, PUBLISH_ROW)

    def second_fails(self: StepTransaction, staged: Any) -> None:
        if published:
            raise RuntimeError("half way")
        published.append(staged.row.record.id)
        real(self, staged)

    with monkeypatch.context() as patched:
        patched.setattr(StepTransaction, PUBLISH_ROW, second_fails)
        patched.setattr(StepTransaction, "roll_back", raising(AssertionError("must not be called")))
        engine.run(8)
    assert requests[0].tokens == [*P10, 5] and requests[0].num_computed_tokens == 3
    assert requests[1].tokens == P10
    assert engine.blocks_of(requests[0]) == 1
    expect_stopped(engine, decoder, "half way")


@pytest.mark.parity("F078", "F124", scenario="FA-15")
def test_a_fatal_failure_without_work_is_one_event_about_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(1))
    engine.run(8)
    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "plan", raising(ContractViolation("two owners")))
        [event] = engine.run(8)
    assert (event.flags, event.request_id, event.error_code) == (EventFlags.FAILED, None, ErrorCode.FATAL)
    assert event.outcome is StepOutcome.EXECUTION_CONTRACT_FAILURE is engine.last_report.outcome
    assert request.finish_reason is FinishReason.MAX_GENERATED_TOKENS
    expect_stopped(engine, decoder, "two owners")


@pytest.mark.parity("F124", "F173")
def test_ownership_that_disagrees_with_the_plan_is_fatal() -> None:
    decoder = ForcedDecoder()
    engine, (x, _, _) = mixed_engine(decoder)
    table = view(engine).cache.table(x.id)
    assert table is not None
    table.num_computed_tokens -= 1
    events = engine.run(8)
    assert {event.finish_reason for event in events} == {FinishReason.FAILED}
    expect_stopped(engine, decoder, "plan says 3, table 2")


@pytest.mark.parity("F123", scenario="FA-17")
def test_no_memory_while_planning_is_not_the_engines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(SyntheticDecoder())
    request = engine.create_request()
    request.begin_turn([5, 9, 13], TurnOptions(6))
    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "plan", raising(MemoryError("plan")))
        for _ in range(3):
            with pytest.raises(MemoryError, match="plan"):
                engine.run(8)
    assert engine.fatal_error is None
    engine.check_integrity()
    assert tokens_of(run_out(engine), request) == solo([5, 9, 13], 6)


@pytest.mark.parity("F175", scenario="FA-13")
def test_a_dormant_request_cannot_go_on_after_the_engine_stopped() -> None:
    decoder = ForcedDecoder()
    engine, (_, _, z) = mixed_engine(decoder)
    decoder.fail_next = lambda: RuntimeError("gone")
    engine.run(8)
    before = (z.tokens, z.status, z.turn_id, z.usage)
    with pytest.raises(EngineUnhealthy, match="gone"):
        z.begin_turn([4])
    assert (z.tokens, z.status, z.turn_id, z.usage) == before


@pytest.mark.parity("F175")
def test_the_first_fatal_error_is_the_one_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(ForcedDecoder())
    view(engine).lifecycle.stop(EngineUnhealthy("first"))
    view(engine).lifecycle.stop(EngineUnhealthy("second"))
    with pytest.raises(EngineUnhealthy, match="first"):
        engine.run(8)


@pytest.mark.parity("F117", "F119", scenario="FA-09")
def test_work_that_waits_for_memory_is_said_to_be_blocked() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, num_blocks=4)
    dormant, waiting = engine.create_request(), engine.create_request()
    dormant.begin_turn([4] * 12, TurnOptions(1))
    run_out(engine)
    waiting.begin_turn([4] * 8)
    calls = decoder.decode_calls
    for _ in range(3):
        [event] = engine.run(8)
        assert (event.flags, event.error_code) == (EventFlags.CAPACITY_BLOCKED, ErrorCode.DEFERRED)
        assert waiting.status is RequestStatus.WAITING and engine.has_pending_requests()
        assert engine.last_report.outcome is StepOutcome.CAPACITY_DEFERRED
        [deferral] = engine.last_report.deferrals
        assert (deferral.request_id, deferral.missing_blocks) == (waiting.id, 1)
    assert decoder.decode_calls == calls and engine.blocks_of(dormant) == 3
    dormant.close()
    assert tokens_of(list(engine.run(8)), waiting) == [5]


# -- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_in_a_step_leaves_nothing_of_it(late: bool) -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn([5, 9, 13], TurnOptions(6))
    engine.run(8)
    setattr(decoder, "fail_next" if late else "fail_before", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.run(8)
    engine.check_integrity()
    assert engine.fatal_error is None
    assert tokens_of(run_out(engine), request) == solo([5, 9, 13], 6)[1:]


def test_ctrl_c_while_publishing_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ForcedDecoder()
    engine, requests = mixed_engine(decoder)
    with monkeypatch.context() as patched:
        patched.setattr(TokenHistory, "publish", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.run(8)
    assert {event.finish_reason for event in engine.run(8)} == {FinishReason.FAILED}
    expect_stopped(engine, decoder, "KeyboardInterrupt")
    for request in requests:
        request.close()
    assert engine.stats()["blocks_free"] == 128
