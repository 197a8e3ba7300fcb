"""Counters of length: C (F052 to F060)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.decoding.decoder import PackedStep
from engine_actor.errors import RetryableStepError
from engine_actor.options import TurnOptions
from engine_actor.requests.record import RequestStatus
from tests.support.doubles import ForcedDecoder, SyntheticDecoder, build_engine, run_out, solo, tokens_of
from tests.support.engine_view import record_of
from tests.support.requests import usage_of

PROMPT = [4, 5, 6, 7, 8]


def written(decoder: SyntheticDecoder) -> list[int]:
    """Positions in the order in which they were written."""
    return [int(position) for step in decoder.steps for position in step.position_ids]


@pytest.mark.parity("F053", scenario="LC-17")
def test_every_position_is_written_once_behind_the_past_length_of_its_step() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(PROMPT, TurnOptions(4))
    run_out(engine)
    assert [int(step.past_sequence_lengths[0]) for step in decoder.steps] == [0, 5, 6, 7]
    assert written(decoder) == list(range(8))
    assert [step.input_ids.tolist() for step in decoder.steps] == [PROMPT, [5], [5], [5]]


@pytest.mark.parity("F052", "F054")
@settings(max_examples=80, deadline=None)
@given(
    prompt=st.lists(st.integers(2, 63), min_size=1, max_size=20),
    chunk=st.integers(0, 21),
    budget=st.integers(1, 21),
    count=st.integers(1, 12),
)
def test_every_position_is_written_once_whatever_the_chunks(
    prompt: list[int], chunk: int, budget: int, count: int
) -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder, chunk_size=chunk, max_scheduled_tokens=budget)
    request = engine.create_request()
    request.begin_turn(prompt, TurnOptions(count))
    while engine.has_pending_requests():
        waiting = request.current_length - request.num_computed_tokens
        steps = len(decoder.steps)
        engine.run(8)
        engine.check_integrity()
        if len(decoder.steps) > steps:
            assert 1 <= len(decoder.steps[-1].input_ids) <= min(waiting, budget)
            assert decoder.steps[-1].past_sequence_lengths.tolist() == [
                written(decoder)[-1] + 1 - len(decoder.steps[-1].input_ids)
            ]
    assert written(decoder) == list(range(request.num_computed_tokens))
    answer = solo(prompt, count)
    assert request.tokens == prompt + answer
    assert request.num_computed_tokens == len(prompt) + (len(answer) if len(answer) < count else count - 1)


@pytest.mark.parity("F055", "F058")
def test_counters_move_only_at_commit() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(PROMPT)
    seen = []

    def watch(_: list[int]) -> int:
        record = record_of(request)
        seen.append(
            (request.status, request.tokens, request.num_computed_tokens, record.is_prefill, record.turn_generated)
        )
        return 5

    decoder.choose = watch
    engine.run(8)
    assert seen == [(RequestStatus.WAITING, PROMPT, 0, True, 0)]
    assert (request.status, request.tokens, request.num_computed_tokens) == (RequestStatus.RUNNING, [*PROMPT, 5], 5)
    assert not record_of(request).is_prefill
    decoder.fail_next = lambda: RetryableStepError("not now")
    engine.run(8)
    assert (request.tokens, request.num_computed_tokens) == ([*PROMPT, 5], 5)
    engine.run(8)
    assert seen[1] == (RequestStatus.RUNNING, [*PROMPT, 5], 5, False, 1)


@pytest.mark.parity("F056")
def test_part_of_a_prompt_says_nothing() -> None:
    engine = build_engine(ForcedDecoder(), chunk_size=2)
    request = engine.create_request()
    request.begin_turn([4, 5, 6])
    assert list(engine.run(8)) == []
    assert (request.status, request.num_computed_tokens, request.current_length) == (RequestStatus.RUNNING, 2, 3)
    assert record_of(request).is_prefill and request.usage.generated_tokens == 0
    assert [event.token for event in engine.run(8)] == [5]
    assert not record_of(request).is_prefill


@pytest.mark.parity("F057")
def test_a_continuation_is_a_prefill_again() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder, chunk_size=2)
    request = engine.create_request()
    request.begin_turn([4, 5], TurnOptions(3))
    run_out(engine)
    before = engine.metrics.prefill_tokens
    request.begin_turn(PROMPT, TurnOptions(1))
    assert record_of(request).is_prefill
    run_out(engine)
    assert decoder.packed_counts()[3:] == [[2], [2], [2]]  # the replayed token and five of input
    assert engine.metrics.prefill_tokens - before == 6


@pytest.mark.parity("F058")
def test_the_mirror_is_prompt_output_and_input_in_order_and_only_grows() -> None:
    engine = build_engine(SyntheticDecoder())
    request = engine.create_request()
    history: list[int] = []
    for tokens in ([5, 9, 13], [7], [2, 2, 2]):
        request.begin_turn(tokens, TurnOptions(5))
        history += tokens
        while engine.has_pending_requests():
            before = request.tokens
            history += tokens_of(list(engine.run(8)), request)
            assert request.tokens[: len(before)] == before
            assert request.tokens == history
            engine.check_integrity()


@pytest.mark.parity("F059")
def test_what_a_decoder_is_given_is_its_own() -> None:
    decoder = ForcedDecoder()
    engine = build_engine(decoder)
    request = engine.create_request()
    request.begin_turn(PROMPT)

    def arrays(step: PackedStep) -> list[np.ndarray]:
        return [step.input_ids, step.block_table, step.past_sequence_lengths]

    copies = []
    for _ in range(6):
        engine.run(8)
        copies.append([np.copy(array) for array in arrays(decoder.steps[-1])])
    for step, copy in zip(decoder.steps, copies, strict=True):
        assert all(map(np.array_equal, arrays(step), copy))
    decoder.steps[0].input_ids[:] = 0
    assert request.tokens[:5] == PROMPT


@pytest.mark.parity("F060")
@pytest.mark.parametrize("count", [0, 1, 4])
def test_only_appended_tokens_count_as_generated(count: int) -> None:
    engine = build_engine(ForcedDecoder([5] * count + [1]))
    request = engine.create_request()
    request.begin_turn(PROMPT, TurnOptions(9))
    events = run_out(engine)
    assert len(tokens_of(events, request)) == request.usage.generated_tokens == count
    assert usage_of(events[-1]).generated_tokens == count
