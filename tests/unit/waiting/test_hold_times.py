"""How long the next turns wait for a place, from how long the last ones kept theirs."""

from __future__ import annotations

from collections import deque

import pytest

from engine_actor.turns.hold_times import LEAST_WAIT_SECONDS, MOST_WAIT_SECONDS, HoldTimes


def test_where_nothing_is_known_it_is_the_least() -> None:
    times = HoldTimes(4)
    assert times.until_free(100) == times.until_over() == LEAST_WAIT_SECONDS


@pytest.mark.parametrize(
    ("seconds", "places", "expected"),
    [
        ([8.0], 4, 8.0),
        ([8.0], 1, 2.0),
        ([6.0, 10.0], 6, 12.0),
        ([8.0], 1000, MOST_WAIT_SECONDS),
        ([0.1], 4, LEAST_WAIT_SECONDS),
    ],
)
def test_so_many_rounds_of_what_one_takes_in_bounds(seconds: list[float], places: int, expected: float) -> None:
    times = HoldTimes(4)
    for one in seconds:
        times.note(one)
    assert times.until_free(places) == pytest.approx(expected)


def test_what_was_long_ago_is_forgotten() -> None:
    times = HoldTimes(4)
    for _ in range(100):
        times.note(50.0)
    for _ in range(64):
        times.note(2.0)
    assert times.until_over() == pytest.approx(2.0)


@pytest.mark.parametrize("place_count", [1, 2, 32])
@pytest.mark.parametrize("waiting", [1, 7, 64, 100])
@pytest.mark.parametrize("lengths", [[5.0], [1.0, 9.0], [2.0, 2.0, 2.0, 14.0]], ids=["equal", "two", "few are long"])
def test_it_is_when_those_that_wait_now_have_begun(place_count: int, waiting: int, lengths: list[float]) -> None:
    """A clock that a simulation moves: places that are always taken, and turns that take the next free one."""
    times = HoldTimes(place_count)
    lasting = deque(lengths * 1000)
    now, ends = 0.0, [lasting.popleft() * (i + 1) / place_count for i in range(place_count)]

    def next_begins() -> None:
        nonlocal now
        ends.sort()
        now = ends.pop(0)
        seconds = lasting.popleft()
        ends.append(now + seconds)
        times.note(seconds)  # as noted at its end; in a long run that makes no difference

    for _ in range(500):
        next_begins()
    told, since = times.until_free(waiting), now
    for _ in range(waiting):
        next_begins()
    passed = now - since
    # To one turn more or less, and within the bounds.
    assert told == pytest.approx(min(max(passed, LEAST_WAIT_SECONDS), MOST_WAIT_SECONDS), abs=max(lengths), rel=0.2)
