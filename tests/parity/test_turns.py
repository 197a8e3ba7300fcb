"""What a turn accepts, where it ends and what it reports: B (F013 to F032)."""

from __future__ import annotations

import numpy as np
import pytest

from engine_actor.core.lifecycle import LAST_TURN_ID
from engine_actor.errors import ContextLengthExceeded, EngineUnhealthy, InvalidCall, InvalidOption
from engine_actor.options import RequestOptions, TurnOptions
from engine_actor.requests.record import FinishReason, RequestStatus
from tests.support.doubles import P10, P20, ForcedDecoder, SyntheticDecoder, build_engine, run_out, solo, tokens_of
from tests.support.engine_view import record_of, view
from tests.support.requests import free_blocks, request_in, usage_of, visible

EOS = 1


# -- input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parity("F014", "F016", scenario="LC-14")
def test_a_refused_turn_changes_nothing_and_uses_no_id() -> None:
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


@pytest.mark.parity("F017", scenario="LC-10")
def test_the_last_turn_id_is_never_passed() -> None:
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, RequestStatus.IDLE)
    record_of(request).turn_id = LAST_TURN_ID
    before = visible(request)
    with pytest.raises(InvalidCall, match="turn ids"):
        request.begin_turn([9])
    assert visible(request) == before
    record_of(request).turn_id = LAST_TURN_ID - 1
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


@pytest.mark.parity("F020", "F021", scenario="LC-09")
@pytest.mark.parametrize("fault", ["append_before", "append_after", "queue"])
def test_a_first_turn_is_taken_in_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Device memory and sampler state are taken in the step, where a failure is a rollback."""
    engine = build_engine(SyntheticDecoder())
    request = engine.create_request()
    record = record_of(request)
    before = visible(request)
    with monkeypatch.context() as patched:
        if fault == "queue":
            patched.setattr(view(engine).requests, "queue", FailingQueue())
        else:
            real = type(record.history).extend

            def broken(history: object, tokens: object) -> None:
                if fault == "append_after":
                    real(history, tokens)  # type: ignore[arg-type]
                raise MemoryError("append")

            patched.setattr(type(record.history), "extend", broken)
        with pytest.raises(MemoryError):
            request.begin_turn([5, 9, 13], TurnOptions(12))
    assert visible(request) == before and request.status is RequestStatus.NEW
    assert not engine.has_pending_requests()
    engine.check_integrity()
    assert request.begin_turn([5, 9, 13], TurnOptions(12)) == 1
    assert tokens_of(run_out(engine), request) == solo([5, 9, 13], 12)


@pytest.mark.parity("F025", "F046", scenario="LC-16")
def test_a_continuation_whose_append_fails_keeps_the_last_turn_and_can_be_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, RequestStatus.IDLE)
    before = visible(request)
    with monkeypatch.context() as patched:
        patched.setattr(type(record_of(request).history), "extend", Failing(MemoryError("append")))
        with pytest.raises(MemoryError):
            request.begin_turn([7, 8])
    assert visible(request) == before
    assert request.usage.generated_tokens == 1 and request.finish_reason is FinishReason.MAX_GENERATED_TOKENS
    engine.check_integrity()
    assert request.begin_turn([7, 8], TurnOptions(1)) == 2
    assert [event.token for event in run_out(engine)] == [5]
    assert request.tokens == [*P10, 5, 7, 8, 5]


@pytest.mark.parity("F046", scenario="LC-15")
def test_a_continuation_that_cannot_be_undone_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(ForcedDecoder())
    request = request_in(engine, RequestStatus.IDLE)
    other = request_in(engine, RequestStatus.RUNNING)
    engine.run(8)
    with monkeypatch.context() as patched:
        patched.setattr(type(record_of(request).history), "extend", Failing(MemoryError("append")))
        patched.setattr(type(record_of(request).history), "truncate", Failing(RuntimeError("restore")))
        with pytest.raises(EngineUnhealthy, match="restore"):
            request.begin_turn([7, 8])
    assert request.status is RequestStatus.CLOSED
    assert engine.blocks_of(other) == engine.stats()["blocks_usable"] - free_blocks(engine)
    [event] = engine.run(8)
    assert (event.request_id, event.finish_reason) == (other.id, FinishReason.FAILED)
    with pytest.raises(EngineUnhealthy, match="restore"):
        engine.run(8)
    engine.check_integrity()


@pytest.mark.parity("F022", "F023", scenario="LC-01")
def test_input_must_leave_room_for_one_token() -> None:
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


@pytest.mark.parity("F022", "F050", scenario="LC-13")
def test_a_prompt_of_the_whole_context_is_refused() -> None:
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
    request = request_in(engine, RequestStatus.RUNNING)
    request.cancel_turn(1)
    seen.append(request.finish_reason)
    engine = build_engine(decoder := ForcedDecoder())
    request = request_in(engine, RequestStatus.RUNNING)
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


@pytest.mark.parity("F027")
def test_a_stop_token_is_one_even_where_it_is_an_eos_that_the_turn_ignores() -> None:
    engine = build_engine(ForcedDecoder(EOS))
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(9, ignore_eos=True, stop_token_ids=frozenset({EOS})))
    [event] = run_out(engine)
    assert (event.token, event.finish_reason) == (None, FinishReason.STOP_SEQUENCE)


@pytest.mark.parity("F028", "F029", "F030", "F031", scenario="LC-03")
def test_eos_is_neither_appended_nor_emitted_nor_replayed() -> None:
    decoder = ForcedDecoder([5, 6, EOS, 7, EOS])
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10)
    events = run_out(engine)
    assert [event.token for event in events] == [5, 6, None]
    assert (request.current_length, request.num_computed_tokens) == (5, 5)
    assert events[-1].finish_reason is FinishReason.EOS
    assert (usage_of(events[-1]).prompt_tokens, usage_of(events[-1]).generated_tokens) == (3, 2)
    request.begin_turn([10, 11])
    assert request.finish_reason is None
    events = run_out(engine)
    assert decoder.packed_counts()[3] == [2] and decoder.steps[3].past_sequence_lengths.tolist() == [5]
    assert (usage_of(events[-1]).prompt_tokens, usage_of(events[-1]).generated_tokens) == (2, 1)
    assert request.tokens == [4, 5, 6, 5, 6, 10, 11, 7]


@pytest.mark.parity("F028")
def test_ignored_eos_is_a_token_like_any_other() -> None:
    engine = build_engine(ForcedDecoder(EOS))
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(2, ignore_eos=True))
    assert tokens_of(run_out(engine), request) == [EOS, EOS]
    assert request.tokens == [*P10, EOS, EOS]


@pytest.mark.parity("F278")
@pytest.mark.parametrize("least", [0, 1, 3])
def test_nothing_that_would_end_a_turn_is_chosen_before_its_minimum(least: int) -> None:
    """C12: per turn. EOS is the model's choice, the next one is a stop token, the one after it is neither."""
    decoder = ForcedDecoder()
    decoder.row_logits = lambda sequence: np.array([0.0, 9.0, 8.0, 7.0] + [0.0] * 28, np.float32)  # type: ignore[method-assign]
    engine = build_engine(decoder)
    request = engine.create_request()
    for _ in range(2):
        request.begin_turn(P10, TurnOptions(9, min_generated_tokens=least, stop_token_ids=frozenset({2})))
        events = run_out(engine)
        assert tokens_of(events, request) == [3] * least and events[-1].finish_reason is FinishReason.EOS


@pytest.mark.parity("F029", "F030", "F031")
def test_after_a_length_finish_the_last_token_is_replayed_and_counts_nowhere() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(P10, TurnOptions(2))
    run_out(engine)
    assert (request.current_length, request.num_computed_tokens) == (5, 4)
    request.begin_turn([10, 11], TurnOptions(1))
    events = run_out(engine)
    assert decoder.packed_counts()[-1] == [3] and decoder.steps[-1].past_sequence_lengths.tolist() == [4]
    usage = usage_of(events[-1])
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
