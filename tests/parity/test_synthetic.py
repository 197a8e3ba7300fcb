"""The synthetic model end to end. Tokens travel through real block tables and packed inputs."""

from __future__ import annotations

import random

import pytest

from engine_actor.core.engine import Engine
from engine_actor.limits import FairnessBounds
from engine_actor.options import TurnOptions
from engine_actor.requests.events import EngineEvent
from engine_actor.requests.record import FinishReason, RequestStatus
from engine_actor.requests.request import Request
from tests.support.doubles import (
    RecurrentDecoder,
    SyntheticDecoder,
    WindowedDecoder,
    build_engine,
    run_out,
    solo,
    tokens_of,
)

A, BP, L = [5, 9, 13], [7, 2, 20, 4], [3, 8, 2, 15, 6, 11]
A16 = [21, 30, 40, 51, 63, 12, 26, 41, 57, 10, 28, 47, 3, 24, 46, 5]
B16 = [15, 27, 40, 54, 5, 21, 38, 56, 11, 31, 52, 10, 33, 57, 18, 44]
L16 = [20, 30, 41, 53, 2, 16, 31, 47, 0, 18, 37, 57, 14, 36, 59, 19]
L20 = [*L16, 44, 6, 33, 61]
SECOND = [46, 17, 53, 26, 0, 39, 15, 56, 34, 13, 57, 38, 20, 3, 51, 36, 22, 9, 61, 50, 40, 31, 23, 16, 10, 5]


def start(engine: Engine, prompt: list[int], limit: int) -> Request:
    request = engine.create_request()
    request.begin_turn(prompt, TurnOptions(limit))
    return request


@pytest.fixture(params=[SyntheticDecoder, RecurrentDecoder, WindowedDecoder])
def engine(request: pytest.FixtureRequest) -> Engine:
    chunk = {"chunk_size": 6} if request.param is WindowedDecoder else {}
    return build_engine(request.param(), max_length=128, **chunk)


def test_the_closed_form_says_the_same() -> None:
    assert (solo(A, 16), solo(BP, 16), solo(L, 20)) == (A16, B16, L20)


def test_one_request_is_answered_to_its_limit(engine: Engine) -> None:
    request = start(engine, A, 12)
    events = run_out(engine)
    assert tokens_of(events, request) == A16[:12]
    assert events[-1].finish_reason is FinishReason.MAX_GENERATED_TOKENS


def test_two_requests_together_say_what_each_says_alone(engine: Engine) -> None:
    a, b = start(engine, A, 16), start(engine, BP, 16)
    events = run_out(engine)
    assert (tokens_of(events, a), tokens_of(events, b)) == (A16, B16)


def test_a_request_that_joins_later_changes_no_answer(engine: Engine) -> None:
    a = start(engine, A, 16)
    events = [event for _ in range(3) for event in engine.run(8)]
    b = start(engine, BP, 16)
    events += run_out(engine)
    assert (tokens_of(events, a), tokens_of(events, b)) == (A16, B16)


def test_a_prompt_of_several_blocks_is_answered_as_any_other(engine: Engine) -> None:
    request = start(engine, L, 16)
    assert tokens_of(run_out(engine), request) == L16


def test_a_short_turn_ends_beside_a_long_one_that_goes_on(engine: Engine) -> None:
    a, long = start(engine, A, 5), start(engine, L, 20)
    events = run_out(engine)
    assert (tokens_of(events, a), tokens_of(events, long)) == (A16[:5], L20)


@pytest.mark.parity("F032", scenario="SY-05, SY-07")
@pytest.mark.parametrize("peer", [False, True])
def test_a_second_turn_with_eos_in_its_input(engine: Engine, peer: bool) -> None:
    """The first turn ends by EOS, the second goes on, with and without a peer."""
    first = start(engine, A, 60)
    long = start(engine, L, 100) if peer else None
    events: list[EngineEvent] = []
    while first.status is not RequestStatus.IDLE:
        events += engine.run(8)
    assert tokens_of(events, first) == solo(A, 60) and first.finish_reason is FinishReason.EOS
    first.begin_turn([1, 12], TurnOptions(60))
    events = run_out(engine)
    assert tokens_of(events, first) == SECOND == solo([*A, *solo(A, 60), 1, 12], 60)
    assert len(SECOND) == 26 and first.finish_reason is FinishReason.EOS
    if long is not None:
        assert long.tokens == L + solo(L, 100)


@pytest.mark.parity("F041", scenario="SY-08")
def test_dropped_requests_make_room(engine: Engine) -> None:
    requests = [start(engine, [5 + i, 9, 13], 1) for i in range(8)]
    run_out(engine)
    assert {request.status for request in requests} == {RequestStatus.IDLE}
    requests.clear()
    request = start(engine, A, 4)
    assert tokens_of(run_out(engine), request) == [21, 30, 40, 51]


@pytest.mark.parity("F039", scenario="SY-09")
def test_a_closed_request_falls_silent(engine: Engine) -> None:
    a, b = start(engine, A, 40), start(engine, BP, 16)
    events = [event for _ in range(4) for event in engine.run(8)]
    a.close()
    events += run_out(engine)
    assert (tokens_of(events, a), tokens_of(events, b)) == (A16[:4], B16)


@pytest.mark.parity("F045", scenario="SY-10")
def test_a_new_engine_knows_nothing_of_the_old_one() -> None:
    for _ in range(2):
        engine = build_engine(SyntheticDecoder(), max_length=128)
        assert not engine.has_pending_requests()
        request = start(engine, A, 16)
        assert tokens_of(run_out(engine), request) == A16
        del engine
        assert request.status is RequestStatus.CLOSED


@pytest.mark.parity("F089", "F101", scenario="SY-11")
@pytest.mark.parametrize(("chunk", "steps"), [(1, 21), (2, 18), (4, 17), (5, 17), (6, 16), (0, 16)])
@pytest.mark.parametrize("kind", [SyntheticDecoder, RecurrentDecoder])
def test_chunks_change_the_steps_and_not_the_tokens(kind: type[SyntheticDecoder], chunk: int, steps: int) -> None:
    decoder = kind()
    engine = build_engine(decoder, chunk_size=chunk)
    request = start(engine, L, 16)
    assert tokens_of(run_out(engine), request) == L16
    assert len(decoder.steps) == steps


@pytest.mark.parity("F128", "F141", scenario="SY-12")
def test_slots_and_blocks_grow_as_the_sequence_does(engine: Engine) -> None:
    request = start(engine, A, 16)
    slots, blocks = [], []
    while engine.has_pending_requests():
        engine.run(8)
        engine.check_integrity()
        slots.append(request.num_computed_tokens)
        blocks.append(engine.blocks_of(request))
    assert slots == list(range(3, 19))
    assert blocks == [-(-n // 4) for n in range(3, 19)]
    assert engine.stats()["blocks_free"] == 123
    request.close()
    assert engine.stats()["blocks_free"] == 128


@pytest.mark.parity("F030", scenario="SY-13")
def test_a_continuation_packs_only_what_is_new() -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder)
    request = start(engine, A, 4)
    assert tokens_of(run_out(engine), request) == [21, 30, 40, 51]
    request.begin_turn([12], TurnOptions(4))
    steps = len(decoder.steps)
    assert tokens_of(run_out(engine), request) == [25, 39, 54, 6]
    first = decoder.steps[steps]
    assert len(first.input_ids) == 2 and first.past_sequence_lengths.tolist() == [6]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("kind", [SyntheticDecoder, RecurrentDecoder])
def test_a_random_workload_equals_the_closed_form(kind: type[SyntheticDecoder], seed: int, small: bool) -> None:
    """Also in a pool that is too small for all, with fairness, prefix reuse and preemption switched on."""
    rng = random.Random(seed)
    decoder = kind()
    beyond = {"num_blocks": 14, "max_residents": 5, "prefix_reuse": True, "fairness": FairnessBounds(), "chunk_size": 3}
    engine = build_engine(decoder, max_length=40, **(beyond if small else {}))
    expected: dict[int, list[int]] = {}
    requests: dict[int, Request] = {}

    def run() -> None:
        for event in engine.run(8):
            if event.request_id is None:
                dormant = [r for r in requests.values() if r.status is RequestStatus.IDLE and r.num_computed_tokens]
                assert dormant, event.message
                close(dormant[0])
            elif event.token is not None:
                assert [event.token] == solo(expected[event.request_id], 1)
                expected[event.request_id].append(event.token)
        engine.check_integrity()

    def close(request: Request) -> None:
        requests.pop(request.id).close()

    for _ in range(200):
        action = rng.random()
        if action < 0.2 and len(requests) < 12:
            prompt = [rng.choice([2, 9]) for _ in range(rng.randint(1, 12))]
            request = engine.create_request()
            request.begin_turn(prompt, TurnOptions(rng.randint(1, 20)))
            requests[request.id], expected[request.id] = request, prompt
        elif action < 0.25 and requests:
            close(rng.choice(list(requests.values())))
        elif action < 0.3 and requests:
            request = rng.choice(list(requests.values()))
            if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING):
                request.cancel_turn(request.turn_id)
        elif action < 0.45 and requests and not engine.stats()["pending_events"]:
            request = rng.choice(list(requests.values()))
            if request.status is RequestStatus.IDLE and request.current_length < 35:
                request.begin_turn([12], TurnOptions(rng.randint(1, 9)))
                expected[request.id].append(12)
        run()
    for _ in range(2000):
        if not engine.has_pending_requests():
            break
        run()
    assert not engine.has_pending_requests()
    for request in list(requests.values()):
        assert request.tokens == expected[request.id]
        close(request)
    stats = engine.stats()
    assert stats["blocks_free"] + stats["blocks_idle"] == stats["blocks_usable"]
    assert stats["committed_steps"] > 100


@pytest.mark.parity("F365")
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("blocks", [6, 8, 11])
def test_preempted_turns_say_the_same(reuse: bool, blocks: int) -> None:
    engine = build_engine(SyntheticDecoder(), num_blocks=blocks, prefix_reuse=reuse)
    requests = [start(engine, prompt, 16) for prompt in (A, BP, L)]
    waiting = []
    for _ in range(300):
        if not engine.has_pending_requests():
            break
        for event in engine.run(8):
            if event.request_id is None:  # only dormant requests are in the way
                waiting.append(event)
                next(r for r in requests if r.status is RequestStatus.IDLE and r.num_computed_tokens).rewind(0)
        engine.check_integrity()
    assert engine.metrics.preemptions > 0
    assert all(request.finish_reason is FinishReason.MAX_GENERATED_TOKENS for request in requests)
    assert [r.usage.generated_tokens for r in requests] == [16, 16, 16]
