"""The order in which turns begin, against a plain list that is searched anew each time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from engine_actor.messages import TurnRequest
from engine_actor.options import SamplingParams
from engine_actor.turns.queue import TurnQueue

REQUEST = TurnRequest("test", "public", None, (1, 2, 3), SamplingParams())


@dataclass(eq=False)
class Waiting:
    name: int
    request: TurnRequest
    may_begin: bool = True


arrivals = st.builds(
    lambda priority, resumed, choices: replace(
        REQUEST, priority=priority, resumed_tokens=resumed, choices=1 if resumed is not None else choices
    ),
    st.integers(-2, 2),
    st.sampled_from([None, None, 0, 3]),
    st.integers(1, 4),
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("put"), arrivals),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("first"), st.just(0)),
        st.tuples(st.just("switch"), st.integers(0, 30)),  # an earlier turn of its session is over, or runs
    ),
    max_size=40,
)


@given(calls)
def test_it_keeps_the_order_whatever_comes_and_goes(calls: list[tuple[str, object]]) -> None:
    queue: TurnQueue[Waiting] = TurnQueue()
    model: list[Waiting] = []  # in order of arrival
    for number, (call, value) in enumerate(calls):
        if call == "put":
            assert isinstance(value, TurnRequest)
            one = Waiting(number, value)
            queue.put(one)
            model.append(one)
        elif call == "first":
            able = [one for one in model if one.may_begin]
            for wanted in (True, False):
                group = [one for one in able if (one.request.resumed_tokens is not None) is wanted]
                if group:
                    least = min(one.request.priority for one in group)
                    expected = next(one for one in group if one.request.priority == least)
                    break
            else:
                assert queue.first() is None
                continue
            assert queue.first() is expected
            queue.remove(expected)
            model.remove(expected)
        elif model:
            assert isinstance(value, int)
            one = model[value % len(model)]
            if call == "remove":
                queue.remove(one)
                model.remove(one)
            else:
                one.may_begin = not one.may_begin
        assert sorted(one.name for one in queue) == [one.name for one in model]
        assert len(queue) == len(model)
        assert queue.sequences == sum(one.request.choices for one in model)
