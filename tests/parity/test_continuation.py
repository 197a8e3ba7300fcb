"""Cancelled turns, rewinds, and every way in which one turn follows another: B (F029 to F038)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine_actor.core.engine import Engine
from engine_actor.errors import InvalidCall, InvalidOption
from engine_actor.options import TurnOptions
from engine_actor.requests.events import ErrorCode, EventFlags
from engine_actor.requests.record import FinishReason, RequestStatus
from engine_actor.requests.request import Request
from tests.support.doubles import P10, ForcedDecoder, SyntheticDecoder, build_engine, run_out, solo, tokens_of
from tests.support.engine_view import view
from tests.support.requests import free_blocks, usage_of, visible

# -- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F034", "F036", scenario="LC-04")
def test_cancel_keeps_what_was_committed_and_says_so_once() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    turn = request.begin_turn(P10)
    engine.run(8)
    engine.run(8)
    free = free_blocks(engine)
    assert request.cancel_turn(turn)
    assert (request.current_length, request.num_computed_tokens, free_blocks(engine)) == (5, 4, free)
    assert not request.cancel_turn(turn)
    events = run_out(engine)
    assert [(e.flags, e.finish_reason) for e in events] == [(EventFlags.TURN_FINISHED, FinishReason.CANCELLED)]
    assert usage_of(events[0]).generated_tokens == 2
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
    assert free_blocks(engine) == 128 and request.num_computed_tokens == 0
    assert [e.finish_reason for e in run_out(engine)] == [FinishReason.CANCELLED]
    request.begin_turn([7, 8], TurnOptions(1))
    events = run_out(engine)
    assert decoder.packed_counts() == [[5]]
    assert decoder.steps[0].input_ids.tolist() == [4, 5, 6, 7, 8]
    assert usage_of(events[-1]).prompt_tokens == 2


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
    view(engine).preempt(request)
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
    request.rewind(0)
    request.begin_turn(old, TurnOptions(8))
    assert tokens_of(run_out(engine), request) == solo(old, 8)
    assert request.usage.cached_tokens == 8


@pytest.mark.parity("F038")
def test_a_row_without_numbers_fails_alone_and_can_be_asked_again() -> None:
    """F038 in this design: state that is gone is computed again from the history, never refused."""
    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    broken, fine = engine.create_request(), engine.create_request()
    broken.begin_turn([5, 9, 13], TurnOptions(6))
    fine.begin_turn([7, 2, 20, 4], TurnOptions(6))
    engine.run(8)
    real = decoder.row_logits
    decoder.row_logits = lambda sequence: real(sequence) * (np.nan if sequence[0] == 5 else 1)  # type: ignore[method-assign]
    events = engine.run(8)
    assert [(e.request_id, e.finish_reason) for e in events] == [(1, FinishReason.FAILED), (2, None)]
    assert [e.error_code for e in events] == [ErrorCode.NOT_FINITE, ErrorCode.NONE]
    assert EventFlags.FAILED in events[0].flags and "no finite number" in events[0].message
    engine.check_integrity()
    decoder.row_logits = real  # type: ignore[method-assign]
    assert tokens_of(run_out(engine), fine) == solo([7, 2, 20, 4], 6)[2:]
    assert (broken.tokens, broken.num_computed_tokens) == ([5, 9, 13, 21], 0)
    broken.begin_turn([11], TurnOptions(4))
    assert tokens_of(run_out(engine), broken) == solo([5, 9, 13, 21, 11], 4)


@pytest.mark.parity("F019")
def test_a_rewind_needs_a_complete_turn_whose_events_are_drained() -> None:
    engine = build_engine(ForcedDecoder())
    request, other = engine.create_request(), engine.create_request()
    with pytest.raises(InvalidCall):
        request.rewind(0)
    other.begin_turn(P10, TurnOptions(2))
    request.begin_turn(P10, TurnOptions(2))
    for _ in range(2):
        engine.run(1)
        before = visible(request)
        with pytest.raises(InvalidCall, match="drained"):
            request.rewind(1)
        assert visible(request) == before
        engine.run(1)
    for length in (-1, 6, 1.5, True):
        with pytest.raises(InvalidOption, match="length"):
            request.rewind(length)  # type: ignore[arg-type]
    request.rewind(5)
    assert request.tokens == [*P10, 5, 5]


@pytest.mark.parametrize("length", range(0, 15))
@pytest.mark.parametrize("shared", ["alone", "indexed", "forked"])
def test_a_rewound_turn_equals_a_fresh_one(length: int, shared: str) -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder, prefix_reuse=shared == "indexed")
    request = engine.create_request()
    request.begin_turn(LONG, TurnOptions(6))
    run_out(engine)
    fork = request.fork() if shared == "forked" else None
    request.rewind(length)
    engine.check_integrity()
    assert length - 4 < request.num_computed_tokens <= length or request.num_computed_tokens == length == 0
    history = [*(LONG + solo(LONG, 6))[:length], 33]
    request.begin_turn([33], TurnOptions(5))
    assert tokens_of(run_out(engine), request) == solo(history, 5)
    if fork is not None:
        fork.begin_turn([44], TurnOptions(5))
        assert tokens_of(run_out(engine), fork) == solo([*LONG, *solo(LONG, 6), 44], 5)


@pytest.mark.parity("F365")
def test_a_preempted_turn_computes_its_whole_history_again_as_input() -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    first, second = engine.create_request(), engine.create_request()
    first.begin_turn(LONG, TurnOptions(9))
    for _ in range(4):
        engine.run(8)
    second.begin_turn([7, 2], TurnOptions(9))
    view(engine).preempt(first)
    engine.check_integrity()
    assert (first.num_computed_tokens, first.status, engine.blocks_of(first)) == (0, RequestStatus.WAITING, 0)
    events = run_out(engine)
    assert decoder.packed_counts()[4] == [len(LONG) + 4, 2]  # in one piece, and before what was queued later
    assert tokens_of(events, first) == solo(LONG, 9)[4:]
    assert first.usage.generated_tokens == 9 and first.usage.prompt_tokens == len(LONG)
