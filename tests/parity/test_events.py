"""Events and `run`: D (F061 to F083)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from engine_actor.core.engine import Engine
from engine_actor.errors import EngineUnhealthy, InvalidCall, InvalidOption, RetryableStepError, StaleView
from engine_actor.options import TurnOptions
from engine_actor.requests.events import EngineEvent, ErrorCode, EventFlags
from engine_actor.requests.record import FinishReason, RequestStatus
from engine_actor.requests.request import Request
from tests.support.doubles import P10, P20, P30, ForcedDecoder, build_engine, run_out, tokens_of
from tests.support.engine_view import record_of, view
from tests.support.requests import usage_of

EOS = 1
TOKEN, FINISHED = EventFlags.TOKEN, EventFlags.TURN_FINISHED


def three_requests(engine: Engine, limit: int = 2, keep: bool = True) -> list[Request]:
    requests = [engine.create_request() for _ in range(3)]
    for request, prompt in zip(requests, (P10, P20, P30), strict=True):
        request.begin_turn(prompt, TurnOptions(limit))
    if keep:
        keep_handles(engine, *requests)
    return requests


def keep_handles(engine: Engine, *requests: Request) -> None:
    """The handles live as long as the engine, so that nothing is abandoned."""
    engine.kept_handles = requests  # type: ignore[attr-defined]


def facts(event: EngineEvent) -> tuple[object, ...]:
    return event.request_id, event.turn_id, event.flags, event.token, event.finish_reason, event.usage


@pytest.mark.parity("F061", scenario="EV-05")
def test_a_buffer_belongs_to_one_living_engine() -> None:
    mine, other = build_engine(ForcedDecoder()), build_engine(ForcedDecoder())
    three_requests(mine)
    buffer = mine.create_event_buffer(4)
    mine.run(buffer)
    view = buffer[0]
    with pytest.raises(InvalidCall, match="another engine"):
        other.run(buffer)
    assert view.token == 5
    del mine
    gc.collect()
    with pytest.raises(InvalidCall, match="one that is gone"):
        other.run(buffer)


@pytest.mark.parity("F061")
@pytest.mark.parametrize("capacity", [-1, 1.5, True, None])
def test_capacities_are_checked_and_fixed(capacity: object) -> None:
    engine = build_engine(ForcedDecoder())
    with pytest.raises(InvalidCall, match="capacity"):
        engine.create_event_buffer(capacity)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="max_events"):
        engine.run(capacity)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        engine.create_event_buffer(2).capacity = 5  # type: ignore[misc]


@pytest.mark.parity("F062", "F071", "F082", scenario="EV-06")
def test_a_later_run_makes_borrowed_events_unreadable() -> None:
    engine = build_engine(ForcedDecoder())
    three_requests(engine)
    buffer = engine.create_event_buffer(2)
    assert len(buffer) == 0
    engine.run(buffer)
    assert [view.token for view in buffer] == [5, 5]
    view = buffer[0]
    assert view.request_id == 1
    engine.run(buffer)
    assert len(buffer) == 1
    for name in ("token", "usage", "request", "flags", "turn_id", "finish_reason"):
        with pytest.raises(StaleView, match=name):
            getattr(view, name)
    assert buffer[0].request_id == 3


@pytest.mark.parity("F062")
def test_a_refused_run_leaves_borrowed_events_readable() -> None:
    engine = build_engine(decoder := ForcedDecoder())
    three_requests(engine)
    buffer = engine.create_event_buffer(8)
    engine.run(buffer)
    view, errors = buffer[0], []

    def forced(_: list[int]) -> int:
        try:
            engine.run(buffer)
        except InvalidCall as error:
            errors.append(error)
        return 5

    decoder.choose = forced
    engine.run(8)
    assert len(errors) == 3 and view.token == 5


@pytest.mark.parity("F063", scenario="EV-04")
def test_a_run_for_nothing_does_nothing() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    requests = three_requests(engine, keep=False)
    engine.run(1)
    buffer = engine.create_event_buffer(0)
    requests.pop()
    before = engine.stats()
    for target in (0, buffer):
        assert list(engine.run(target)) == []
    assert len(buffer) == 0 and decoder.decode_calls == 1
    assert engine.stats() == before and before["requests"] == 3  # the orphan is not reclaimed, no event is drained
    while engine.stats()["pending_events"]:
        engine.run(8)
    decoder.fail_next = lambda: RuntimeError("broken")
    engine.run(1)  # fatal; one event is retained
    with pytest.raises(EngineUnhealthy, match="broken"):
        engine.run(0)


@pytest.mark.parity("F064", "F065", "F073")
def test_retained_events_are_drained_in_order_before_anything_runs() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    requests = three_requests(engine)
    assert [e.request_id for e in engine.run(2)] == [1, 2]
    states = [(r.tokens, r.num_computed_tokens, r.status) for r in requests]
    blocks = engine.stats()["blocks_free"]
    report = engine.last_report
    assert [e.request_id for e in engine.run(2)] == [3]  # a place is left, and still no step
    assert decoder.decode_calls == 1
    assert [(r.tokens, r.num_computed_tokens, r.status) for r in requests] == states
    assert engine.stats()["blocks_free"] == blocks and engine.last_report is report
    engine.run(2)
    assert decoder.decode_calls == 2


@pytest.mark.parity("F066", "F067", "F068", scenario="EV-03")
def test_capacity_changes_nothing_but_the_cuts() -> None:
    streams = []
    for capacity in (1, 2, 3, 8):
        decoder = ForcedDecoder()
        engine = build_engine(decoder)
        three_requests(engine)
        events = run_out(engine, capacity)
        assert decoder.decode_calls == 2
        streams.append([facts(event) for event in events])
    assert all(stream == streams[0] for stream in streams)
    assert [flags for _, _, flags, *_ in streams[0]] == [TOKEN] * 3 + [TOKEN | FINISHED] * 3
    assert [request for request, *_ in streams[0]] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parity("F066")
def test_enough_capacity_returns_a_whole_step_in_one_call() -> None:
    engine = build_engine(ForcedDecoder())
    three_requests(engine)
    assert len(engine.run(3)) == 3 and engine.stats()["pending_events"] == 0


@pytest.mark.parity("F067", "F070", scenario="EV-10")
def test_a_last_token_and_its_finish_are_one_event() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(1))
    [event] = run_out(engine)
    assert event.flags == TOKEN | FINISHED
    assert (event.token, event.finish_reason) == (5, FinishReason.MAX_GENERATED_TOKENS)
    assert (usage_of(event).prompt_tokens, usage_of(event).generated_tokens) == (3, 1)


@pytest.mark.parity("F068", "F070", "F016", scenario="EV-15")
def test_a_conversation_as_events() -> None:
    engine = build_engine(ForcedDecoder([5, 6, 7, EOS, 10, EOS]))
    request = engine.create_request()
    request.begin_turn(P10)
    first = run_out(engine)
    request.begin_turn([8, 9])
    second = run_out(engine)
    assert [(e.turn_id, e.token, e.flags) for e in first + second] == [
        (1, 5, TOKEN),
        (1, 6, TOKEN),
        (1, 7, TOKEN),
        (1, None, FINISHED),
        (2, 10, TOKEN),
        (2, None, FINISHED),
    ]
    assert request.current_length == 9
    for event in first + second:
        finished = FINISHED in event.flags
        assert (event.finish_reason is FinishReason.EOS) == (event.usage is not None) == finished
        assert event.request is request and event.request_id == request.id
        assert event.error_code == ErrorCode.NONE and event.message == ""


@pytest.mark.parity("F069")
def test_events_come_in_the_order_of_the_plan() -> None:
    """Two decodes go before a prefill that is resident for longer."""
    engine = build_engine(ForcedDecoder(), chunk_size=2)
    slow, *fast = (engine.create_request() for _ in range(3))
    slow.begin_turn([4, 5, 6, 7, 8, 9])
    for request in fast:
        request.begin_turn([4])
    assert [e.request_id for e in engine.run(8)] == [2, 3]
    engine.run(8)
    assert [e.request_id for e in engine.run(8)] == [2, 3, 1]


@pytest.mark.parity("F071")
def test_an_event_outlives_the_handle() -> None:
    engine = build_engine(ForcedDecoder())
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(1))
    [event] = engine.run(8)
    assert event.request is request
    del request
    gc.collect()
    assert event.request is None
    assert facts(event)[:4] == (1, 1, TOKEN | FINISHED, 5)


@pytest.mark.parity("F072", scenario="EV-07")
def test_part_of_a_prompt_is_a_run_without_events() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, chunk_size=2)
    request = engine.create_request()
    request.begin_turn([2, 3, 4, 5, 6])
    counts, processed = [], []
    for _ in range(3):
        counts.append(len(engine.run(8)))
        processed.append(request.num_computed_tokens)
        assert engine.has_pending_requests()
    assert (counts, processed) == ([0, 0, 1], [2, 4, 5])
    assert decoder.packed_counts() == [[2], [2], [1]]


@pytest.mark.parity("F075")
def test_what_counts_as_pending() -> None:
    engine = build_engine(ForcedDecoder())
    assert not engine.has_pending_requests()
    request = engine.create_request()
    assert not engine.has_pending_requests()
    request.begin_turn(P10, TurnOptions(2))
    assert engine.has_pending_requests()  # queued
    engine.run(1)
    assert engine.has_pending_requests()  # active
    engine.run(1)
    assert request.status is RequestStatus.IDLE and not engine.has_pending_requests()
    request.begin_turn([9])
    assert engine.has_pending_requests()
    request.cancel_turn(2)
    assert engine.has_pending_requests()  # an event waits
    engine.run(1)
    assert not engine.has_pending_requests()


@pytest.mark.parity("F076", "F098", scenario="EV-11")
def test_without_work_the_model_is_not_called() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    assert list(engine.run(4)) == [] and decoder.decode_calls == 0
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(1))
    engine.run(4)
    assert list(engine.run(4)) == [] and decoder.decode_calls == 1
    assert engine.last_report.outcome == "no_work"


def blocked(engine: Engine, decoder: ForcedDecoder) -> None:
    request = engine.create_request()
    request.begin_turn([4] * 30)
    dormant = engine.create_request()
    dormant.begin_turn([4] * 12, TurnOptions(1))
    request.cancel_turn(1)
    run_out(engine)
    request.begin_turn([4])
    keep_handles(engine, request, dormant)


def retryable(engine: Engine, decoder: ForcedDecoder) -> None:
    three_requests(engine)
    decoder.fail_before = lambda: RetryableStepError("busy")


def memory(engine: Engine, decoder: ForcedDecoder) -> None:
    three_requests(engine)
    decoder.fail_next = lambda: MemoryError("full")


def fatal_without_work(engine: Engine, decoder: ForcedDecoder) -> None:
    view(engine).scheduler.plan = lambda _: (_ for _ in ()).throw(RuntimeError("plan"))  # type: ignore[assignment]


@pytest.mark.parity("F070", "F077", "F083", "F117")
@pytest.mark.parametrize(
    ("cause", "flags", "code"),
    [
        (blocked, EventFlags.CAPACITY_BLOCKED, ErrorCode.DEFERRED),
        (retryable, EventFlags.RETRYABLE, ErrorCode.RETRYABLE),
        (memory, EventFlags.CAPACITY_BLOCKED, ErrorCode.EXECUTION_MEMORY),
        (fatal_without_work, EventFlags.FAILED, ErrorCode.FATAL),
    ],
)
def test_events_about_the_engine_itself(
    cause: Callable[[Engine, ForcedDecoder], None], flags: EventFlags, code: int
) -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, num_blocks=8, max_length=100)
    cause(engine, decoder)
    [event] = engine.run(8)
    assert (event.flags, event.error_code) == (flags, code) and code != 0
    assert (event.request, event.request_id, event.token, event.finish_reason, event.usage) == (None,) * 5
    assert event.message and event.outcome is engine.last_report.outcome
    engine.check_integrity()
    assert (engine.fatal_error is None) == (code != ErrorCode.FATAL)


@pytest.mark.parity("F079")
def test_events_of_the_last_good_step_come_before_a_later_failure() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    requests = three_requests(engine, limit=9)
    first = engine.run(1)
    decoder.fail_next = lambda: RuntimeError("broken")
    events = [*first, *(event for _ in range(5) for event in engine.run(1))]
    assert [(e.request_id, e.token) for e in events[:3]] == [(1, 5), (2, 5), (3, 5)]
    assert [(e.request_id, e.finish_reason) for e in events[3:]] == [(r.id, FinishReason.FAILED) for r in requests]
    with pytest.raises(EngineUnhealthy):
        engine.run(1)


@pytest.mark.parity("F074", "F175")
def test_a_stopped_engine_does_not_run_when_its_last_events_go_away_with_their_request() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10)
    decoder.fail_next = lambda: RuntimeError("broken")
    engine.run(8)
    view(engine).events.append(EngineEvent(FINISHED, record_of(request)))
    del request
    with pytest.raises(EngineUnhealthy):
        engine.run(8)
    assert decoder.decode_calls == 1


@pytest.mark.parity("F082")
def test_run_takes_a_number_or_a_buffer() -> None:
    engine = build_engine(ForcedDecoder())
    [request, *_] = three_requests(engine, limit=3)
    assert tokens_of(list(engine.run(max_events=3)), request) == [5]
    buffer = engine.create_event_buffer(3)
    result = engine.run(buffer)
    assert len(result) == len(buffer) == 3
    assert [view.request_id for view in buffer] == [event.request_id for event in result]


@pytest.mark.parity("F033", "F118", scenario="EV-16")
def test_closing_finished_requests_lets_the_next_ones_in() -> None:
    decoder = ForcedDecoder(EOS)
    engine = build_engine(decoder, max_batch_size=2, num_blocks=3)
    requests = three_requests(engine)
    events = list(engine.run(8))
    assert [(e.request_id, e.finish_reason) for e in events] == [(1, FinishReason.EOS), (2, FinishReason.EOS)]
    assert engine.stats()["blocks_free"] == 1
    assert [e.error_code for e in engine.run(8)] == [ErrorCode.DEFERRED]
    requests[0].close()
    assert engine.stats()["blocks_free"] == 2
    assert [(e.request_id, e.finish_reason) for e in engine.run(8)] == [(3, FinishReason.EOS)]
    requests[1].close()
    requests[2].close()
    assert engine.stats()["blocks_free"] == 3
    assert decoder.packed_counts() == [[3, 3], [3]]


@pytest.mark.parity("F066", "F116")
@pytest.mark.parametrize("capacity", [1, 8])
def test_a_refusal_and_a_step_in_one_run_are_both_told(capacity: int) -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, num_blocks=3, max_length=100)
    huge, small = engine.create_request(), engine.create_request()
    huge.begin_turn([4] * 13)
    small.begin_turn(P10, TurnOptions(1))
    events = run_out(engine, capacity)
    assert [(e.request_id, e.token, e.error_code) for e in events] == [
        (huge.id, None, ErrorCode.UNSERVICEABLE),
        (small.id, 5, ErrorCode.NONE),
    ]
    assert decoder.decode_calls == 1
    assert huge.begin_turn([4]) == small.begin_turn([4]) == 2  # nothing of either is left undrained
