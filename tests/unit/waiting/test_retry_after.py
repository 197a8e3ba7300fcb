"""What a refused turn is told of the time: from the turns that ended here, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_actor.actor.owner_loop import OwnerLoop
from engine_actor.messages import RefusalCode, TurnDelta, TurnRefused, TurnRequest
from engine_actor.options import SamplingParams
from engine_actor.sessions.table import SessionTable
from engine_actor.turns.turn import Turn
from engine_actor.turns.waiting_room import TurnLimits
from tests.support.actor_view import LoopView
from tests.support.doubles import SyntheticDecoder
from tests.support.engines import engine_of


class Desk:
    """Two places, four in the queue, two of a session; each step takes a second."""

    def __init__(self) -> None:
        self.now = 100.0
        engine = engine_of(SyntheticDecoder(vocab=1000, eos=5000), num_blocks=200, block_size=4, max_batch_size=2)
        table = SessionTable(engine, "r", 4, 0.0, clock=lambda: self.now)
        self.loop = OwnerLoop(engine, table, "r", TurnLimits(2, 4, 2), lambda _: None, clock=lambda: self.now)

    def ask(self, tokens: int, session: str | None = None, choices: int = 1) -> Turn:
        told: list[TurnDelta | None] = []
        request = TurnRequest("test", "o", session, (5, 6, 7), SamplingParams(), tokens)
        turn = Turn(replace(request, choices=choices), told.extend)
        self.loop.submit(turn)
        return turn

    def steps(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            LoopView(self.loop).round()

    def refused(self, turn: Turn) -> TurnRefused:
        [refusal, end] = LoopView(self.loop).take(turn)
        assert end is None and isinstance(refusal, TurnRefused)
        return refusal


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_nothing_has_ended_yet(desk: Desk) -> None:
    for _ in range(6):
        desk.ask(8)
    assert desk.refused(desk.ask(8)).retry_after == 1.0


def test_four_that_wait_for_two_places_take_two_rounds_of_what_one_took(desk: Desk) -> None:
    desk.ask(8)
    desk.steps(8)
    for _ in range(6):
        desk.ask(8)
    refusal = desk.refused(desk.ask(8))
    assert refusal.code is RefusalCode.QUEUE_FULL and refusal.retry_after == pytest.approx(2 * 8.0)
    # It is the truth: then all four have begun, and one who comes again finds a queue that has room.
    desk.steps(17)
    assert not len(desk.loop.waiting.queue)


def test_choices_count_as_the_places_they_take(desk: Desk) -> None:
    desk.ask(8)
    desk.steps(8)
    for choices in (1, 1, 2, 2, 1, 1):
        desk.ask(8, choices=choices)
    assert desk.refused(desk.ask(8)).retry_after == pytest.approx(3 * 8.0)


def test_a_turn_that_was_given_up_freed_its_place_too(desk: Desk) -> None:
    turn = desk.ask(50)
    desk.steps(4)
    desk.loop.cancel(turn)
    for _ in range(6):
        desk.ask(8)
    assert desk.refused(desk.ask(8)).retry_after == pytest.approx(2 * 4.0)


def test_however_long_it_takes_nobody_is_sent_away_for_more_than_a_minute(desk: Desk) -> None:
    desk.ask(300)
    desk.steps(300)
    for _ in range(6):
        desk.ask(8)
    assert desk.refused(desk.ask(8)).retry_after == 60.0


def test_a_busy_session_has_room_when_a_turn_has_ended(desk: Desk) -> None:
    desk.ask(8)
    desk.steps(8)
    desk.ask(8, "s")
    desk.ask(8, "s")
    refusal = desk.refused(desk.ask(8, "s"))
    assert refusal.code is RefusalCode.SESSION_BUSY and refusal.retry_after == pytest.approx(8.0)


def test_what_waiting_does_not_mend_names_no_time(desk: Desk) -> None:
    assert desk.refused(desk.ask(-1)).retry_after == 0.0
