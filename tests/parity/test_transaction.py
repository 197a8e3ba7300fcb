"""One step as a transaction: I (F156 to F168)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_actor.core.engine import Engine
from engine_actor.core.step import StepTransaction
from engine_actor.decoding.packing import StepPacker
from engine_actor.errors import ContractViolation, RetryableStepError
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.memory.reservation import Reservation
from engine_actor.options import SamplingParams, TurnOptions
from engine_actor.requests.events import EngineEvent, EventQueue
from engine_actor.requests.outcomes import StepOutcome
from engine_actor.requests.record import RequestStatus, TokenHistory
from engine_actor.sampling.batched_sampler import BatchedSampler
from engine_actor.scheduling.scheduler import Scheduler
from tests.support.doubles import (
    P10,
    P20,
    P30,
    ForcedDecoder,
    MixingDecoder,
    build_engine,
    run_out,
    solo,
    tokens_of,
)
from tests.support.engine_view import (
    STAGE_ROW,
    entries_of,
    idle_blocks,
    owners_of,
    queue_after,
    queue_of,
    tables_of,
    turns_of,
    view,
)


def traced(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[str]:
    trace: list[str] = []

    def watch(owner: object, name: str, label: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            trace.append(label)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    watch(Scheduler, "plan", "plan")
    watch(PagedCache, "reserve", "reserve")
    watch(TokenHistory, "stage", "checkpoint")
    watch(StepPacker, "pack", "pack")
    watch(view(engine).decoder, "forward", "decode")
    watch(BatchedSampler, "sample", "sample")
    watch(EventQueue, "stage", "stage events")
    watch(StepTransaction, "prepare", "prepare")
    watch(Reservation, "commit", "commit blocks")
    watch(TokenHistory, "publish", "commit token")
    watch(EventQueue, "publish", "publish events")
    watch(StepTransaction, "share_full_blocks", "share blocks")
    return trace


@pytest.mark.parity("F156", "F157")
def test_phases_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(ForcedDecoder())
    requests = [engine.create_request(), engine.create_request()]
    for request in requests:
        request.begin_turn(P10)
    trace = traced(monkeypatch, engine)
    for _ in range(3):
        trace.clear()
        engine.run(8)
        assert trace == [
            "plan",
            "reserve",
            "checkpoint",
            "checkpoint",
            "pack",
            "decode",
            "sample",
            "prepare",
            "stage events",
            "commit blocks",
            "commit token",
            "commit token",
            "publish events",
            "share blocks",
        ]


@pytest.mark.parity("F157")
def test_one_model_call_a_transaction() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, chunk_size=2)
    requests = [engine.create_request() for _ in range(3)]
    for request, prompt in zip(requests, (P10, [4] * 7, P30), strict=True):
        request.begin_turn(prompt, TurnOptions(3))
    while engine.has_pending_requests():
        calls = decoder.decode_calls
        engine.run(8)
        assert decoder.decode_calls == calls + 1


def everything(engine: Engine) -> dict[str, object]:
    """All state of an engine that a step may change, its counters of events apart."""
    cache, life = view(engine).cache, view(engine).lifecycle
    tables = tables_of(cache.paged)
    return {
        "tables": {i: (list(t.blocks), t.count, t.num_computed_tokens, t.resident) for i, t in tables.items()},
        "table order": list(tables),
        "free": sorted(cache.pool.free_ids()),
        "idle": idle_blocks(cache.pool),
        "owners": list(owners_of(cache.pool)),
        "index": set(entries_of(cache.index)) if cache.index else None,
        "queue": list(life.requests.queue),
        "records": {
            r.id: (
                list(r.history.ids),
                r.history.length,
                r.num_computed_tokens,
                r.status,
                r.turn_id,
                r.turn_generated,
                r.turn_prompt_tokens,
                r.cached_tokens,
                r.prompt_boundary,
                r.finish_reason,
                r.admitted,
                r.passed_over,
                r.overtaken,
                r.preemptions,
            )
            for r in life.requests.records.values()
        },
    }


def busy_engine(decoder: MixingDecoder, **config: object) -> tuple[Engine, list[Any]]:
    """A step away from everything at once: a decode, a forked tail to copy, part of a prompt, an adopted prefix."""
    engine = build_engine(decoder, prefix_reuse=True, chunk_size=4, num_blocks=40, **config)
    sampled = TurnOptions(9, SamplingParams(1.0, seed=1234))
    first = engine.create_request()
    first.begin_turn([2, 3, 2, 3, 2, 3, 2, 3, 2, 2], TurnOptions(1))
    run_out(engine)
    fork = first.fork()
    decode = engine.create_request()
    decode.begin_turn([9, 9], sampled)
    engine.run(8)
    fork.begin_turn([5], sampled)
    prompt, adopting = engine.create_request(), engine.create_request()
    prompt.begin_turn([4] * 11, sampled)
    adopting.begin_turn([2, 3, 2, 3, 2, 3, 2, 3, 7, 7], sampled)
    return engine, [first, fork, decode, prompt, adopting]


def fail_decoder_before(engine: Engine, _: pytest.MonkeyPatch) -> None:
    view(engine).decoder.fail_before = lambda: RetryableStepError("before")  # type: ignore[attr-defined]


def fail_decoder_after(engine: Engine, _: pytest.MonkeyPatch) -> None:
    view(engine).decoder.fail_next = lambda: RetryableStepError("after its writes")  # type: ignore[attr-defined]


def fail_memory(engine: Engine, _: pytest.MonkeyPatch) -> None:
    view(engine).decoder.fail_next = lambda: MemoryError("full")  # type: ignore[attr-defined]


def fail_sampler(engine: Engine, patched: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("sampler")

    patched.setattr(BatchedSampler, "sample", broken)


def fail_second_stage(engine: Engine, patched: pytest.MonkeyPatch) -> None:
    """The first row is staged, then one fails (F160)."""
    real, calls = getattr(StepTransaction, STAGE_ROW), []

    def broken(self: StepTransaction, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("second row")
        return real(self, *args)

    patched.setattr(StepTransaction, STAGE_ROW, broken)


def fail_checkpoint(engine: Engine, patched: pytest.MonkeyPatch) -> None:
    real, calls = TokenHistory.stage, []

    def broken(self: TokenHistory, places: int) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError("checkpoint")
        real(self, places)

    patched.setattr(TokenHistory, "stage", broken)


FAULTS = [
    fail_decoder_before,
    fail_decoder_after,
    fail_memory,
    fail_sampler,
    fail_second_stage,
    fail_checkpoint,
]


@pytest.mark.parity("F158", "F160", "F161", "F162", "F155", "F344")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_step_leaves_no_trace_and_its_retry_is_the_undisturbed_step(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Engine, pytest.MonkeyPatch], None]
) -> None:
    clean, clean_requests = busy_engine(MixingDecoder(vocab=12))
    run_out(clean)
    engine, requests = busy_engine(decoder := MixingDecoder(vocab=12))
    before = everything(engine)
    for _ in range(3):
        with monkeypatch.context() as patched:
            fault(engine, patched)
            [event] = engine.run(8)
            assert event.request_id is None
        assert everything(engine) == before
        engine.check_integrity()
    run_out(engine)
    assert any(step.block_copies for step in decoder.steps)
    assert [r.tokens for r in requests] == [r.tokens for r in clean_requests]
    assert [r.usage for r in requests] == [r.usage for r in clean_requests]


@pytest.mark.parity("F155")
def test_what_a_rolled_back_step_wrote_is_never_read() -> None:
    decoder = MixingDecoder(vocab=12)
    engine = build_engine(decoder, num_blocks=6)
    request = engine.create_request()
    request.begin_turn([2, 3, 4, 5, 6], TurnOptions(9))
    for fails in (True, False, True, True, False, False):
        if fails:
            decoder.fail_next = lambda: RetryableStepError("poison")
        engine.run(8)
        # Whatever is not committed is overwritten with nonsense.
        table = view(engine).cache.table(request.id)
        valid = {table.slot(p) for p in range(table.num_computed_tokens)} if table else set()
        flat = decoder.cache.reshape(-1)
        flat[[slot for slot in range(len(flat)) if slot not in valid]] = 11
    run_out(engine)
    undisturbed = build_engine(MixingDecoder(vocab=12))
    twin = undisturbed.create_request()
    twin.begin_turn([2, 3, 4, 5, 6], TurnOptions(9))
    run_out(undisturbed)
    assert request.tokens == twin.tokens


@pytest.mark.parity("F159")
def test_without_room_for_its_output_a_step_does_not_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10)
    with monkeypatch.context() as patched:
        fail_checkpoint(engine, patched)
        patched.setattr(TokenHistory, "stage", lambda _, places: (_ for _ in ()).throw(MemoryError("places")))
        [event] = engine.run(8)
    assert "places" in event.message and decoder.decode_calls == 0
    assert engine.stats()["blocks_free"] == 128 and request.status is RequestStatus.WAITING
    engine.check_integrity()


@pytest.mark.parity("F164", scenario="FA-06")
def test_a_failure_leaves_earlier_steps_alone() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, max_batch_size=1)
    request = engine.create_request()
    request.begin_turn(P10)
    engine.run(8)
    before = everything(engine)
    decoder.fail_next = lambda: RetryableStepError("later")
    engine.run(8)
    assert everything(engine) == before and engine.stats()["residents"] == 1
    assert (request.tokens, request.num_computed_tokens) == ([*P10, 5], 3)


@pytest.mark.parity("F165")
def test_publishing_grows_no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists, dicts and deques of the engine are as large after commit and publication as before, or smaller. The staged
    queue becomes the queue."""
    engine, requests = busy_engine(MixingDecoder(vocab=12))
    sizes: dict[str, dict[str, int]] = {}

    def measure() -> dict[str, int]:
        life, cache = view(engine).lifecycle, view(engine).cache
        sized: dict[str, Any] = {
            "records": life.requests.records,
            "queue": life.requests.queue,
            "turns": turns_of(life.requests),
            "tables": tables_of(cache.paged),
            "owners": owners_of(cache.pool),
        }
        for record in life.requests.records.values():
            sized[f"history {record.id}"] = record.history.ids
        for request_id, table in tables_of(cache.paged).items():
            sized[f"table {request_id}"] = table.blocks
        return {name: len(container) for name, container in sized.items()}

    real_commit, real_publish = StepTransaction.commit, StepTransaction.publish_events

    def commit(self: StepTransaction) -> None:
        sizes["before"] = measure()
        staged = len(queue_after(self))
        real_commit(self)
        assert len(queue_after(self)) == staged

    def publish(self: StepTransaction) -> None:
        real_publish(self)
        sizes["after"] = measure()
        assert queue_of(view(engine).events) is queue_after(self)

    monkeypatch.setattr(StepTransaction, "commit", commit)
    monkeypatch.setattr(StepTransaction, "publish_events", publish)
    for _ in range(12):
        engine.run(64)
        assert sizes["after"].keys() == sizes["before"].keys()
        assert all(sizes["after"][name] <= sizes["before"][name] for name in sizes["after"])
    assert any(request.status is RequestStatus.IDLE for request in requests)


@pytest.mark.parity("F165")
def test_publishing_an_ordinary_step_leaves_no_new_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that hold others: integers and short-lived lists come and go."""
    engine = build_engine(ForcedDecoder())
    requests = [engine.create_request() for _ in range(4)]
    for request in requests:
        request.begin_turn([4, 5, 6, 7])
    engine.run(8)
    grown: list[int] = []
    real = StepTransaction.commit

    def commit(self: StepTransaction) -> None:
        before = len(gc.get_objects())
        real(self)
        grown.append(len(gc.get_objects()) - before)

    monkeypatch.setattr(StepTransaction, "commit", commit)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            engine.run(8)
    finally:
        gc.enable()
    assert sorted(grown)[len(grown) // 2] == 0  # another thread of this process may make an object at any time


@pytest.mark.parity("F166")
def test_a_first_step_can_end_the_turn_at_once() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    requests = [engine.create_request() for _ in range(2)]
    requests[0].begin_turn(P10, TurnOptions(1))
    requests[1].begin_turn(P20)
    seen: list[RequestStatus] = []
    decoder.choose = lambda _: seen.extend(r.status for r in requests) or 5  # type: ignore[func-returns-value]
    engine.run(8)
    assert set(seen) == {RequestStatus.WAITING}
    assert [r.status for r in requests] == [RequestStatus.IDLE, RequestStatus.RUNNING]


@pytest.mark.parity("F167")
def test_transactions_are_numbered_and_failures_name_theirs() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10)
    ids = []
    for n in range(6):
        if n == 3:
            decoder.fail_next = lambda: RetryableStepError("now")
        events = engine.run(8)
        ids.append(engine.last_report.transaction_id)
        if n == 3:
            assert f"in transaction {ids[-1]}. Cause: RetryableStepError: now" in events[0].message
    assert ids == list(range(ids[0], ids[0] + 6))


@pytest.mark.parity("F168")
def test_counters_of_a_scripted_history(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, num_blocks=4, max_batch_size=4)
    first, second = engine.create_request(), engine.create_request()
    first.begin_turn([4] * 8, TurnOptions(2))
    engine.run(8)
    decoder.fail_next = lambda: RetryableStepError("one")
    engine.run(8)
    decoder.fail_before = lambda: RetryableStepError("two")
    engine.run(8)
    decoder.fail_next = lambda: MemoryError("three")
    engine.run(8)
    with monkeypatch.context() as patched:
        fail_sampler(engine, patched)
        engine.run(8)
    engine.run(8)
    second.begin_turn([4] * 12)
    engine.run(8)  # blocked: the first keeps three of four blocks
    first.close()
    with monkeypatch.context() as patched:
        patched.setattr(PagedCache, "reserve", lambda *_: (_ for _ in ()).throw(ContractViolation("four")))
        engine.run(8)
    metrics = engine.metrics.as_dict()
    assert metrics == {
        "committed_steps": 2,
        "capacity_deferrals": 1,
        "reservation_failures": 1,
        "rollbacks": 4,
        "retryable_aborts": 3,
        "capacity_aborts": 1,
        "post_processing_aborts": 1,
        "fatal_execution_failures": 1,
        "preemptions": 0,
        "prefill_tokens": 8,
        "decode_tokens": 1,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "adopted_tokens": 0,
    }
    assert engine.last_report.outcome is StepOutcome.EXECUTION_CONTRACT_FAILURE


@pytest.mark.parity("F156", scenario="FA-19")
def test_phases_out_of_order_are_refused() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    request.begin_turn(P10)

    step = view(engine).new_step()
    before = everything(engine)
    for phase in (step.checkpoint, step.launch, step.collect, step.stage, step.prepare, step.commit):
        with pytest.raises(ContractViolation, match="cannot follow planned"):
            phase()
    step.reserve()
    with pytest.raises(ContractViolation, match="commit cannot follow reserve"):
        step.commit()
    with pytest.raises(ContractViolation, match="reserve cannot follow reserve"):
        step.reserve()
    step.checkpoint()
    step.roll_back()
    step.roll_back()
    assert everything(engine) == before
    with pytest.raises(ContractViolation, match="cannot follow rolled_back"):
        step.launch()

    step = view(engine).new_step()
    phases = (step.reserve, step.checkpoint, step.launch, step.collect, step.stage, step.prepare, step.commit)
    for phase in phases:
        phase()
    with pytest.raises(ContractViolation, match="cannot be rolled back"):
        step.roll_back()
    assert request.tokens == [*P10, 5]
    engine.check_integrity()


@pytest.mark.parity("F161", scenario="FA-14")
@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_sampled_tokens_are_the_same_after_a_failure(fails: int) -> None:
    """Equal logits on three tokens; only seed and position choose."""
    flat = np.zeros(32, np.float32)
    flat[[2, 3, 4]] = 9.0

    def run(fail_at: int) -> list[list[int]]:
        decoder = ForcedDecoder()
        decoder.row_logits = lambda sequence: flat  # type: ignore[method-assign]
        engine = build_engine(decoder)
        requests = [engine.create_request(), engine.create_request()]
        for request, seed in zip(requests, (1234, 5678), strict=True):
            request.begin_turn(P10, TurnOptions(4, SamplingParams(1.0, 3, seed=seed)))
        for step in range(4):
            if step == fail_at:
                decoder.fail_next = lambda: RetryableStepError("once")
                engine.run(8)
            engine.run(8)
        assert not engine.has_pending_requests()
        return [request.tokens[3:] for request in requests]

    undisturbed = run(-1)
    assert run(fails) == undisturbed
    assert undisturbed[0] != undisturbed[1] and len(set(undisturbed[0])) > 1


def test_the_synthetic_tokens_of_a_failing_engine() -> None:
    """Every step fails once in one way or another; the stream does not show it."""
    from tests.support.doubles import SyntheticDecoder

    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn([5, 9, 13], TurnOptions(16))
    events: list[EngineEvent] = []
    for turn in range(16):
        if turn % 2:
            decoder.fail_before = lambda: RetryableStepError("before")
        else:
            decoder.fail_next = lambda: MemoryError("after")
        assert all(e.request_id is None for e in engine.run(8))
        events += engine.run(8)
        engine.check_integrity()
    assert tokens_of(events, request) == solo([5, 9, 13], 16)
