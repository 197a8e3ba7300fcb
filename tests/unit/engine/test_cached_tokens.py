"""What usage calls cached and what the model was given add up to what is computed, whatever was shared or rewound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.options import TurnOptions
from engine_actor.requests.request import Request
from tests.support.doubles import SyntheticDecoder, build_engine, run_out

SHARED = [2, 3, 2, 2, 3, 3, 2, 3, 2, 2, 3, 2, 3, 3]  # beginnings that prompts have in common

# Of one conversation: (tokens of the shared beginning, tokens of its own) at first, later (rewound by, new tokens).
turns = st.lists(st.tuples(st.integers(0, 14), st.integers(1, 5)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(turns, min_size=1, max_size=3), st.sampled_from([0, 1, 3]), st.sampled_from([2, 5, 2048]))
def test_every_position_of_a_turn_is_either_cached_or_computed(
    conversations: list[list[tuple[int, int]]], chunk_size: int, budget: int
) -> None:
    decoder = SyntheticDecoder()
    engine = build_engine(decoder, prefix_reuse=True, chunk_size=chunk_size, max_scheduled_tokens=budget)
    requests = [engine.create_request() for _ in conversations]
    for turn in range(max(map(len, conversations))):
        asked: list[Request] = []
        for number, (request, planned) in enumerate(zip(requests, conversations, strict=True)):
            if turn >= len(planned):
                continue
            earlier, new = planned[turn]
            if turn:
                request.rewind(max(0, request.current_length - earlier))
            prompt = [] if turn else SHARED[:earlier]
            request.begin_turn([*prompt, *[4 + number] * new], TurnOptions(2))
            asked.append(request)
        steps = len(decoder.steps)
        events = run_out(engine)
        computed = sum(len(step.input_ids) for step in decoder.steps[steps:])
        assert computed == sum(r.num_computed_tokens - r.usage.cached_tokens for r in asked)
        ended = {event.request_id: event.usage for event in events if event.usage is not None}
        assert ended == {request.id: request.usage for request in asked}


def test_a_turn_that_ends_before_its_first_step_was_cached_as_far_as_it_was_computed() -> None:
    engine = build_engine(SyntheticDecoder())
    request = engine.create_request()
    request.begin_turn([5, 9, 13], TurnOptions(2))
    run_out(engine)
    request.begin_turn([7, 8])
    assert request.cancel_turn(2)
    [event] = engine.run(8)
    assert event.usage is not None and (event.usage.prompt_tokens, event.usage.cached_tokens) == (2, 4)
