"""States, close, abandonment, threads: B (F012 to F051)."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from engine_actor.core.engine import Engine
from engine_actor.errors import InvalidCall, InvalidOption, WrongThread
from engine_actor.options import RequestOptions, SamplingParams, TurnOptions
from engine_actor.requests.record import RequestStatus
from engine_actor.requests.request import Request
from tests.support.doubles import P10, P20, ForcedDecoder, build_engine, run_out, tokens_of
from tests.support.engine_view import record_of, view
from tests.support.requests import STATES, free_blocks, request_in, visible

# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F012", "F018")
@pytest.mark.parametrize("state", STATES)
def test_begin_turn_is_allowed_in_two_states_only(state: RequestStatus) -> None:
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    before = visible(request)
    if state in (RequestStatus.NEW, RequestStatus.IDLE):
        request.begin_turn([9])
        assert request.status is RequestStatus.WAITING
    else:
        with pytest.raises(InvalidCall):
            request.begin_turn([9])
        assert visible(request) == before
    engine.check_integrity()


@pytest.mark.parity("F012", "F034", "F035", scenario="LC-06")
@pytest.mark.parametrize("state", STATES)
def test_cancel_ends_a_running_turn_only(state: RequestStatus) -> None:
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, state)
    before = visible(request)
    if state in (RequestStatus.WAITING, RequestStatus.RUNNING):
        assert not request.cancel_turn(0)
        assert not request.cancel_turn(99)
        assert visible(request) == before
        assert request.cancel_turn(1)
        assert request.status is RequestStatus.IDLE
        assert not request.cancel_turn(1)
    elif state is RequestStatus.IDLE:
        assert not any(request.cancel_turn(turn) for turn in (0, 1, 99))
        assert visible(request) == before
    else:
        with pytest.raises(InvalidCall):
            request.cancel_turn(1)
        assert visible(request) == before
    engine.check_integrity()


@pytest.mark.parity("F012", "F039", scenario="LC-07")
@pytest.mark.parametrize("state", STATES)
def test_close_is_legal_in_every_state_and_gives_everything_back_once(state: RequestStatus) -> None:
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
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = request_in(engine, state)
    calls = decoder.decode_calls
    before = visible(request)
    engine.run(8)
    ran = decoder.decode_calls - calls
    if state in (RequestStatus.WAITING, RequestStatus.RUNNING):
        assert ran == 1 and request.status is RequestStatus.RUNNING
    else:
        assert ran == 0 and visible(request) == before


@pytest.mark.parity("F013")
@pytest.mark.parametrize("beams", [0, 2])
def test_beams_are_refused_by_name(beams: int) -> None:
    with pytest.raises(InvalidOption, match=r"num_beams must be 1 \(beam search"):
        RequestOptions(num_beams=beams)


# -- close, abandonment, the engine's end -----------------------------------------------------------------------------


@pytest.mark.parity("F039", "F074", scenario="EV-08")
def test_close_purges_its_own_events_only() -> None:
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


@pytest.mark.parity("F040", scenario="LC-08")
def test_a_request_belongs_to_one_engine() -> None:
    """A handle knows its own engine; the guard behind it refuses another's request."""
    mine, other = build_engine(ForcedDecoder()), build_engine(ForcedDecoder())
    request = mine.create_request()
    request.begin_turn(P10)
    before = visible(request)
    with pytest.raises(InvalidCall, match="does not belong"):
        view(other).lifecycle.close(record_of(request))
    assert visible(request) == before
    request.close()
    view(other).lifecycle.close(record_of(request))
    assert request.status is RequestStatus.CLOSED
    assert other.get_request(request.id) is None


def drop_elsewhere(handles: list[Request]) -> None:
    """Releases the last reference on another thread."""
    thread = threading.Thread(target=handles.clear)
    thread.start()
    thread.join()


@pytest.mark.parity("F041", "F044", scenario="LC-11")
@pytest.mark.parametrize("boundary", ["run", "has_pending_requests", "begin_turn"])
@pytest.mark.parametrize("state", STATES)
def test_a_dropped_request_is_reclaimed_at_the_next_call_of_the_owner(boundary: str, state: RequestStatus) -> None:
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


@pytest.mark.parity("F042", scenario="EV-13")
def test_taking_a_handle_again_cancels_abandonment() -> None:
    engine = build_engine(ForcedDecoder(), max_batch_size=1)
    handles = [request_in(engine, RequestStatus.IDLE)]
    request_id, free = handles[0].id, free_blocks(engine)
    drop_elsewhere(handles)
    again = engine.get_request(request_id)
    engine.run(8)
    assert again is not None and again.status is RequestStatus.IDLE
    assert free_blocks(engine) == free and engine.stats()["residents"] == 1
    assert engine.get_request(request_id) is again
    again.begin_turn([9], TurnOptions(1))
    assert tokens_of(run_out(engine), again) == [5]


@pytest.mark.parity("F043")
def test_without_an_abandonment_the_boundary_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(ForcedDecoder())
    requests = [request_in(engine, RequestStatus.IDLE) for _ in range(5)]
    requests.pop()
    reclaim = view(engine).lifecycle.reclaim_abandoned
    reclaim()
    monkeypatch.setattr(view(engine).requests, "records", None)  # a flag is read, and nothing is looked through
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
    monkeypatch.undo()
    assert engine.stats()["requests"] == len(requests) == 4


@pytest.mark.parity("F044", "F071", scenario="EV-14")
def test_events_and_queued_work_of_an_orphan_are_dropped() -> None:
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


@pytest.mark.parity("F045", scenario="LC-12")
@pytest.mark.parametrize("state", [RequestStatus.RUNNING, RequestStatus.IDLE, RequestStatus.WAITING])
def test_handles_outlive_their_engine_as_tombstones(state: RequestStatus) -> None:
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
    handles = [request_in(engine, RequestStatus.RUNNING)]
    held = free_blocks(engine)
    record = record_of(handles[0])
    drop_elsewhere(handles)
    gc.collect()
    states = [(record.status, free_blocks(engine))]
    engine.run(1)
    states.append((record.status, free_blocks(engine)))
    assert states == [(RequestStatus.RUNNING, held), (RequestStatus.CLOSED, 128)]
    engine.check_integrity()


@pytest.mark.parity("F006")
def test_the_engine_keeps_its_decoder_alive() -> None:
    decoder = ForcedDecoder([5, 6, 1])
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


@pytest.mark.parity("F047", scenario="LC-11")
@pytest.mark.parametrize("state", [RequestStatus.RUNNING, RequestStatus.IDLE])
def test_every_call_from_another_thread_is_refused(state: RequestStatus) -> None:
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
    request_in(engine, RequestStatus.IDLE)
    assert threading.active_count() == before


@pytest.mark.parity("F048")
def test_no_call_is_allowed_from_inside_a_step() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    active = request_in(engine, RequestStatus.RUNNING)
    dormant = request_in(engine, RequestStatus.IDLE)
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
