"""How long a step may take, for machines of any pace."""

from __future__ import annotations

import pytest

from engine_actor.actor.step_bound import FIRST_STEPS, LEAST_BOUND_SECONDS, TIMES_THE_PACE, StepBound
from engine_actor.requests.outcomes import StepOutcome, StepReport

MOST, FULL = 300.0, 2048


def report(tokens: int, seconds: float, outcome: StepOutcome = StepOutcome.COMMITTED) -> StepReport:
    return StepReport(transaction_id=1, outcome=outcome, tokens=tokens, step_seconds=seconds)


def warm(full_step_seconds: float = 0.0, tokens: int = FULL) -> StepBound:
    bound = StepBound(MOST, FULL)
    for _ in range(FIRST_STEPS):
        bound.note(report(1, 30.0))
    bound.note(report(tokens, full_step_seconds))
    return bound


def test_the_first_steps_have_all_the_time_that_the_operator_gives() -> None:
    bound = StepBound(MOST, FULL)
    for _ in range(FIRST_STEPS):
        assert bound.seconds == MOST
        bound.note(report(FULL, 0.1))
    assert bound.seconds == MOST
    bound.note(report(FULL, 0.1))
    assert bound.seconds == LEAST_BOUND_SECONDS, "and how slow they were does not count"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.05, LEAST_BOUND_SECONDS), (2.0, 2.0 * TIMES_THE_PACE), (8.0, 8.0 * TIMES_THE_PACE), (100.0, MOST)],
)
def test_a_machine_has_many_times_what_a_full_step_takes_it(seconds: float, expected: float) -> None:
    assert warm(seconds).seconds == pytest.approx(expected)
    assert warm(seconds / 4, FULL // 4).seconds == pytest.approx(expected), "a part of one says as much"


def test_the_most_is_the_operators_however_short() -> None:
    bound = StepBound(1.0, FULL)
    for _ in range(20):
        bound.note(report(FULL, 0.01))
        assert bound.seconds == 1.0


def test_small_steps_say_nothing_once_there_was_a_large_one_and_all_there_is_before() -> None:
    bound = warm(0.03, tokens=1)
    assert bound.seconds == MOST, "a decode step of a slow machine, or a slow decode step"
    bound.note(report(500, 0.5))
    known = bound.seconds
    assert known == pytest.approx(TIMES_THE_PACE * 0.5 * FULL / 500)
    for _ in range(100):
        bound.note(report(1, 0.03))
        bound.note(report(32, 0.06))
    assert bound.seconds == known


def test_it_follows_a_pace_that_falls_at_once_and_one_that_rises_slowly() -> None:
    bound = warm(2.0)
    bound.note(report(FULL, 6.0))
    assert bound.seconds == pytest.approx(60.0)
    bound.note(report(FULL, 2.0))
    assert 50.0 < bound.seconds < 60.0
    for _ in range(50):
        bound.note(report(FULL, 2.0))
    assert bound.seconds == pytest.approx(20.0)


@pytest.mark.parametrize("outcome", [outcome for outcome in StepOutcome if outcome is not StepOutcome.COMMITTED])
def test_steps_that_were_not_made_do_not_count(outcome: StepOutcome) -> None:
    bound = warm(2.0)
    bound.note(report(FULL, 0.001, outcome))
    bound.note(report(0, 100.0, outcome))
    assert bound.seconds == pytest.approx(20.0)
