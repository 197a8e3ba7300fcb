"""The owner's side of many turns under random calls, one round at a time: who runs, who waits, and what they say.

The loop runs on the thread of the test, so nothing depends on a clock. Pools and limits are tiny, so that turns wait
for places, for memory and for their sessions, and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_actor.actor.owner_loop import OwnerLoop
from engine_actor.messages import (
    EndReason,
    ForkOutcome,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
    session_key,
)
from engine_actor.options import SamplingParams
from engine_actor.sessions.table import SessionTable
from engine_actor.turns.turn import Delivery, Turn
from engine_actor.turns.waiting_room import TurnLimits
from tests.support.actor_view import LoopView, sessions_of
from tests.support.doubles import SyntheticDecoder, solo
from tests.support.engines import engine_of

VOCAB, EOS, CONTEXT = 60, 1, 40
ROUNDS_TO_FINISH = 2000
SESSIONS = ["s", "t", "u"]


@dataclass(eq=False)
class Caller:
    """Who asked, and what he was told."""

    request: TurnRequest
    number: int
    turn: Turn = field(init=False)
    told: list[TurnDelta | None] = field(default_factory=list)
    left: bool = False
    deleted: bool = False

    def __post_init__(self) -> None:
        self.turn = Turn(self.request, self.told.extend)

    @property
    def accepted(self) -> bool:
        return any(isinstance(delta, TurnAccepted) for delta in self.told)

    @property
    def over(self) -> bool:
        return self.left or None in self.told

    def check(self) -> None:
        """Of one whose turn is over: either refused, or every choice has said what it says alone."""
        assert self.told.count(None) == 1 and self.told[-1] is None
        if isinstance(self.told[0], TurnRefused):
            assert len(self.told) == 2 and self.request.resumed_tokens is None
            return
        assert isinstance(self.told[0], TurnAccepted)
        tokens: dict[int, list[int]] = {choice: [] for choice in range(self.request.choices)}
        ended = {delta.choice: delta for delta in self.told if isinstance(delta, TurnEnded)}
        for delta in self.told:
            if isinstance(delta, TurnTokens):
                tokens[delta.choice] += delta.token_ids
        expected = solo(list(self.request.prompt_ids), self.request.max_generated_tokens, VOCAB, EOS)
        for choice, end in ended.items():
            if end.reason is EndReason.FAILED:
                assert self.deleted and tokens[choice] == expected[: len(tokens[choice])]
            else:
                assert tokens[choice] == expected
                assert end.reason is (EndReason.LENGTH if len(expected) == self.limit else EndReason.STOP)
        assert self.deleted or len(ended) == self.request.choices

    @property
    def limit(self) -> int:
        return self.request.max_generated_tokens


class OwnerLoopMachine(RuleBasedStateMachine):
    @initialize(
        running=st.integers(1, 4),
        queued=st.integers(1, 5),
        rows=st.integers(1, 4),
        blocks=st.integers(10, 30),
        sessions=st.integers(1, 3),
    )
    def build(self, running: int, queued: int, rows: int, blocks: int, sessions: int) -> None:
        self.now = 0.0
        self.engine = engine_of(
            SyntheticDecoder(VOCAB, EOS, CONTEXT),
            num_blocks=blocks,
            block_size=4,
            max_batch_size=rows,
            max_residents=sessions + rows,
            max_length=CONTEXT,
        )
        self.table = SessionTable(self.engine, "r", sessions, 0.0, clock=lambda: self.now)
        self.limits = TurnLimits(running, queued, 3)
        self.loop = OwnerLoop(self.engine, self.table, "r", self.limits, self._deliver, clock=lambda: self.now)
        self.behind = LoopView(self.loop)
        self.callers: list[Caller] = []
        self.asked = 0

    @staticmethod
    def _deliver(delivery: Delivery) -> None:
        for turn, deltas in delivery:
            turn.receive(deltas)

    # -- calls --------------------------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=9),
        limit=st.integers(1, 12),
        session=st.sampled_from([None, None, *SESSIONS]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        resumed=st.sampled_from([False, False, False, True]),
        times=st.integers(1, 3),
    )
    def ask(
        self, prompt: list[int], limit: int, session: str | None, priority: int, choices: int, resumed: bool, times: int
    ) -> None:
        for _ in range(times):
            request = TurnRequest("test", "o", session, tuple(prompt), SamplingParams(), limit, priority=priority)
            request = request.resumed(()) if resumed else replace(request, choices=choices)
            caller = Caller(request, self.asked)
            self.asked += 1
            self.callers.append(caller)
            full = len(self.loop.waiting.queue) >= self.limits.max_queued_turns
            places_left = self._places() < self.limits.max_running_sequences
            self.loop.submit(caller.turn)
            self.behind.flush()
            first = caller.told[0] if caller.told else None
            if isinstance(first, TurnRefused) and first.code is RefusalCode.QUEUE_FULL:
                assert full and not resumed
                assert 1.0 <= first.retry_after <= 60.0
            elif isinstance(first, TurnRefused):
                assert first.code is RefusalCode.SESSION_BUSY and session is not None and not resumed
            elif first is None and not resumed:
                assert not full or places_left, "it waits although the queue was full"

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(self._open()))
        caller.left = True
        self.loop.cancel(caller.turn)

    @rule(session=st.sampled_from(SESSIONS))
    def delete(self, session: str) -> None:
        for caller in self._open():
            caller.deleted |= caller.request.session_id == session and bool(caller.turn.choices)
        self.loop.close_session(session_key("o", session))
        self.behind.flush()

    @rule(session=st.sampled_from(SESSIONS))
    def fork(self, session: str) -> None:
        turns = [c.turn for c in self._open() if c.request.session_id == session]
        busy = any(not turn.choices or any(choice.stays for choice in turn.choices) for turn in turns)
        outcome = self.table.fork("o", session, f"{session}-{self.asked}")
        assert not busy or outcome is not ForkOutcome.FORKED

    @rule(rounds=st.integers(1, 8), seconds=st.floats(0.0, 40.0))
    def rounds(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            self.now += seconds
            self._round()

    def _round(self) -> None:
        self.behind.round()
        self.behind.flush()

    def _open(self) -> list[Caller]:
        return [caller for caller in self.callers if not caller.over]

    def _places(self) -> int:
        return sum(choice.sequences for choice in self.behind.running.values())

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def places_are_not_exceeded(self) -> None:
        turns = {choice.turn for choice in self.behind.running.values()}
        assert self._places() <= self.limits.max_running_sequences or len(turns) == 1
        for turn in turns:
            assert len([c for c in self.behind.running.values() if c.turn is turn]) == len(turn.choices)

    @invariant()
    def each_open_turn_is_in_one_place(self) -> None:
        queued, running = set(self.loop.waiting.queue), {choice.turn for choice in self.behind.running.values()}
        assert not queued & running
        assert {caller.turn for caller in self._open()} <= queued | running
        assert all(not turn.over and not turn.choices for turn in queued)
        new = [turn for turn in queued if not turn.resumed]
        assert len(new) <= self.limits.max_queued_turns

    @invariant()
    def sessions_know_their_turns(self) -> None:
        queued = list(self.loop.waiting.queue)
        running = [
            choice.turn for choice in self.behind.running.values() if choice.stays
        ]  # others leave no trace in it
        for session in sessions_of(self.table).values():
            mine = [turn for turn in queued if turn.session is session]
            assert set(session.waiting) == set(mine) and len(session.waiting) == len(mine)
            now = [turn for turn in running if turn.session is session]
            assert len(now) == session.running
            assert session.open_turns or session.sequence(), "nothing is known of it"
            assert self.table.open_turns(_named(session.session_id)) == session.running + len(mine)
        known = set(map(id, sessions_of(self.table).values()))
        assert all(turn.session is None or id(turn.session) in known for turn in queued)

    @invariant()
    def nobody_waits_for_a_place_that_is_free(self) -> None:
        first = self.loop.waiting.queue.first()
        self.behind.begin_waiting()  # commands may have made room; the next round looks before its step
        self.behind.flush()
        following = self.loop.waiting.queue.first()
        if following is not None:
            assert self._places() + following.request.choices > self.limits.max_running_sequences
        assert first is None or first is following or first.choices or first.over
        if not self.behind.running:
            assert not len(self.loop.waiting.queue)

    @invariant()
    def the_engine_agrees(self) -> None:
        self.engine.check_integrity()
        stats = self.loop.stats()
        assert stats["waiting_turns"] == len(self.loop.waiting.queue)
        assert stats["waiting_sequences"] == sum(turn.request.choices for turn in self.loop.waiting.queue)
        assert stats["running"] + stats["waiting"] <= len(self.behind.running)

    @invariant()
    def what_is_over_was_right(self) -> None:
        for caller in self.callers:
            if not caller.left and caller.over:
                caller.check()
        self.callers = [caller for caller in self.callers if not caller.over]

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(ROUNDS_TO_FINISH):
            if not self._open():
                break
            self._round()
        assert not self._open(), "a turn never ended"
        self.what_is_over_was_right()
        self._round()
        assert not self.behind.running and not len(self.loop.waiting.queue)
        assert all(not c.running and not c.waiting for c in sessions_of(self.table).values())


def _named(session: str) -> TurnRequest:
    return TurnRequest("test", "o", session, (1,), SamplingParams())


TestOwnerLoop = pytest.mark.timeout(0)(OwnerLoopMachine.TestCase)
TestOwnerLoop.settings = settings(settings.get_profile("quick"), max_examples=150, stateful_step_count=25)
