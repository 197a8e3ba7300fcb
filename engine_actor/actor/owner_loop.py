"""The owner thread's side of an EngineActor: commands in, one engine transaction, a step's deltas out.

Everything here but `post` and `stop` runs on one thread, the owner of the engine. It reaches the event loop through
`deliver`, once a round, and before its step if commands have accepted or refused somebody. Whenever nothing can move it
sleeps on the command condition, and wakes once a second to show that it lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine_actor.actor.heartbeat import SNAPSHOT_SECONDS, Heartbeat, Snapshot
from engine_actor.core.engine import Engine
from engine_actor.errors import ContextLengthExceeded, EngineError, EngineUnhealthy, UnusableGrammar
from engine_actor.messages import (
    EndReason,
    Failure,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnTokens,
)
from engine_actor.requests.events import EngineEvent, ErrorCode, EventFlags
from engine_actor.requests.outcomes import StepOutcome, StepReport
from engine_actor.requests.record import FinishReason
from engine_actor.sessions.table import SessionTable
from engine_actor.turns.turn import Choice, Delivery, Turn
from engine_actor.turns.waiting_room import TurnLimits, WaitingRoom

logger = logging.getLogger("moorage.engine")

IDLE_TICK_SECONDS = 1.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.01, 1.0
MAX_EVENTS = 4096

_LENGTH = (FinishReason.MAX_GENERATED_TOKENS, FinishReason.MAX_SESSION_TOKENS)
_STOP = (FinishReason.EOS, FinishReason.STOP_SEQUENCE)
_FAILURES = {
    ErrorCode.FATAL: Failure.UNAVAILABLE,
    ErrorCode.GRAMMAR: Failure.GRAMMAR,
    ErrorCode.UNSERVICEABLE: Failure.CONTEXT_LENGTH,
}
_ROLLED_BACK = (StepOutcome.RETRYABLE_BATCH_ABORT, StepOutcome.EXECUTION_CAPACITY_EXCEEDED)


class OwnerLoop:
    def __init__(
        self,
        engine: Engine,
        sessions: SessionTable,
        replica: str,
        limits: TurnLimits,
        deliver: Callable[[Delivery], None],
        on_step: Callable[[StepReport], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.sessions = sessions
        self.waiting = WaitingRoom(limits)
        self.heartbeat = Heartbeat()
        self._replica = replica
        self._deliver = deliver
        self._on_step = on_step
        self._clock = clock
        self._commands: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self._running: dict[int, Choice] = {}  # by engine request
        self._outbox: dict[Turn, list[TurnDelta | None]] = {}
        self._retry_seconds = 0.0
        self._last_transaction = 0

    # -- any thread ---------------------------------------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> bool:
        """Runs `command` on the owner thread, before its next step; False if the thread is stopping."""
        with self._condition:
            if self._stopping:
                return False
            self._commands.append(command)
            self._condition.notify()
            return True

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `stop`. If the engine fails, every open turn ends with the reason, so that another replica can go on
        with it, and later ones are refused."""
        pause = 0.0
        while True:
            try:
                if not self._take_commands(pause):
                    break
                self.heartbeat.last_round = time.monotonic()
                pause = IDLE_TICK_SECONDS if self.heartbeat.failure else self._round()
            except BaseException as failure:
                logger.exception("the engine of %s stopped", self._replica)
                self.heartbeat.failure = self.heartbeat.failure or failure
                self._end_all(f"the engine stopped: {failure}")
            self._flush()
            self._take_snapshot(now=pause > 0)
        self._end_all("the replica is shutting down")
        self._flush()

    def _take_commands(self, pause: float) -> bool:
        with self._condition:
            if pause and not self._commands and not self._stopping:
                self._condition.wait(pause)
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not self._stopping

    def _round(self) -> float:
        """One transaction, if there is work. Returns how long to sleep before the next one, unless a command comes."""
        self._raise_if_stopped()
        self._begin_waiting()
        self._flush()  # whoever was accepted or refused hears of it before the step, which may be long
        if not self.engine.has_pending_requests():
            self.sessions.expire()
            return IDLE_TICK_SECONDS
        try:
            events = self.engine.run(MAX_EVENTS)
        except MemoryError as error:  # while planning: nothing has changed (F123)
            logger.warning("no memory to plan a step: %s", error)
            return self._longer_pause()
        self._collect(events)
        self._raise_if_stopped()  # before the ends that it caused go out: who hears them must find the replica failed
        report = self.engine.last_report
        if report.transaction_id == self._last_transaction:
            return 0.0  # older events were drained, and no step was made
        self._last_transaction = report.transaction_id
        if self._on_step is not None:
            self._on_step(report)
        evicted = self.sessions.relieve(report.deferrals)
        if report.outcome in _ROLLED_BACK:
            return self._longer_pause()
        self._retry_seconds = 0.0
        blocked = report.outcome is StepOutcome.CAPACITY_DEFERRED and not evicted
        return IDLE_TICK_SECONDS if blocked else 0.0

    def _raise_if_stopped(self) -> None:
        if self.engine.fatal_error is not None:
            raise self.engine.fatal_error

    def _longer_pause(self) -> float:
        """Before a step that could not be made is tried again: each time twice as long, so that nothing spins."""
        self._retry_seconds = min(max(FIRST_RETRY_SECONDS, 2 * self._retry_seconds), LONGEST_RETRY_SECONDS)
        return self._retry_seconds

    def _take_snapshot(self, now: bool) -> None:
        beat = self.heartbeat
        if not now and beat.last_round - beat.snapshot_taken < SNAPSHOT_SECONDS:
            return
        stats = self.engine.stats()
        beat.snapshot = Snapshot(
            self.sessions.residents(),
            self.sessions.open_keys(),
            stats["running"],
            stats["waiting"] + len(self.waiting.queue),
            self.engine.available_blocks,
        )
        beat.snapshot_taken = beat.last_round

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(self, turn: Turn) -> None:
        """Begins a turn, or lets it wait for a place or for the earlier turns of its session, or refuses it."""
        if self.heartbeat.failure is not None:
            self._refuse(turn, RefusalCode.UNAVAILABLE, f"the engine stopped: {self.heartbeat.failure}")
            return
        self._begin_waiting()  # a command before this one may have made room
        of_session = self.sessions.open_turns(turn.request)
        if (refusal := self.waiting.refusal(turn, self._sequences_running(), of_session)) is not None:
            self._refuse(turn, *refusal)
            return
        self.waiting.enter(turn, self.sessions.open(turn.request))
        self._begin_waiting()

    def cancel(self, turn: Turn) -> None:
        """The caller has gone: no further row is spent on the turn. Committed tokens of a session stay."""
        if turn.over:
            return
        turn.over = True
        if not turn.choices:
            self.waiting.leave(turn)
            if turn.session is not None:
                self.sessions.forget_if_empty(turn.session)
        for choice in list(turn.choices):
            if choice.stays:
                # Its terminal event is drained in the next round, which then starts the next turn of the session.
                choice.begun.request.cancel_turn(choice.begun.turn_id)
            else:
                self._drop(choice)

    def close_session(self, key: str) -> bool:
        """Drops a session. Its running turn ends as failed; turns that wait start anew, without its history, and keep
        their places."""
        session = self.sessions.close(key)
        if session is None:
            return False
        for turn in {choice.turn for choice in self._running.values() if choice.turn.session is session}:
            for choice in list(turn.choices):
                self._end(choice, EndReason.FAILED, 0, "the session was deleted", failure=Failure.SESSION_DELETED)
        for waiting in self.waiting.of_session(session):
            self.waiting.follow(waiting, self.sessions.open(waiting.request))
        return True

    def stats(self) -> dict[str, int]:
        """Of the engine, its sessions and the turns that wait for it."""
        engine = self.engine.stats()
        return {
            **engine,
            **self.sessions.evictions,
            "tokens_due": engine["tokens_due"] + sum(turn.tokens_due for turn in self.waiting.queue),
            "blocks_active": self.engine.active_blocks(),
            "sessions": len(self.sessions.residents()),
            "waiting_turns": len(self.waiting.queue),
            "waiting_sequences": self.waiting.queue.sequences,
        }

    # -- turns --------------------------------------------------------------------------------------------------------

    def _begin_waiting(self) -> None:
        """In their order, while there are places."""
        while (turn := self.waiting.next(self._sequences_running())) is not None:
            self._begin(turn)

    def _sequences_running(self) -> int:
        return sum(choice.sequences for choice in self._running.values())

    def _begin(self, turn: Turn) -> None:
        try:
            begun = self.sessions.begin(turn.request, turn.session)
        except ContextLengthExceeded as error:
            length = error.current + error.added
            self._refuse(turn, RefusalCode.CONTEXT_LENGTH, str(error), length, error.limit)
        except EngineUnhealthy as error:
            self._refuse(turn, RefusalCode.UNAVAILABLE, f"the engine stopped: {error}")
        except UnusableGrammar as error:
            self._refuse(turn, RefusalCode.GRAMMAR, str(error))
        except EngineError as error:
            self._refuse(turn, RefusalCode.INVALID, str(error))
        except BaseException as error:  # ours, and the end of this engine: its caller must hear of it, too
            self._refuse(turn, RefusalCode.UNAVAILABLE, f"the engine stopped: {error}")
            raise
        else:
            turn.begun_at = self._clock()
            self._run_choice(Choice(turn, 0, begun, branched=turn.request.choices == 1))
            accepted = TurnAccepted(self._replica, begun.prompt_tokens, begun.cached_tokens, begun.own_tokens)
            self._send(turn, accepted)
            return
        if turn.session is not None:
            self.sessions.forget_if_empty(turn.session)

    def _run_choice(self, choice: Choice) -> None:
        choice.turn.choices.append(choice)
        self._running[choice.begun.request.id] = choice

    def _branch(self, first: Choice) -> None:
        """The prompt is computed: the other choices start from it."""
        first.branched = True
        for index in range(1, first.turn.request.choices):
            begun = self.sessions.branch(first.turn.request, first.begun, index)
            self._run_choice(Choice(first.turn, index, begun, branched=True))

    def _collect(self, events: Sequence[EngineEvent]) -> None:
        """Sorts a step's events by choice: tokens of one choice leave as one delta."""
        tokens: dict[Choice, list[EngineEvent]] = {}
        for event in events:
            if event.record is None:
                logger.warning("%s", event.message)
                continue
            choice = self._running.get(event.record.id)
            if choice is None:
                continue
            if not choice.branched and not choice.turn.over and not event.flags & EventFlags.FAILED:
                self._branch(choice)
            if event.token is not None:
                tokens.setdefault(choice, []).append(event)
            if event.flags & EventFlags.TURN_FINISHED:
                if choice in tokens:
                    self._send(choice.turn, _tokens_delta(choice, tokens.pop(choice)))
                self._finish(choice, event)
        for choice, several in tokens.items():
            self._send(choice.turn, _tokens_delta(choice, several))

    def _finish(self, choice: Choice, event: EngineEvent) -> None:
        assert event.usage is not None
        session, usage = choice.turn.session, event.usage
        reason = EndReason.FAILED
        if event.finish_reason in _STOP:
            reason = EndReason.STOP
        elif event.finish_reason in _LENGTH:
            reason = EndReason.LENGTH
        cached = min(usage.cached_tokens, choice.begun.prompt_tokens)  # of a resumed turn, part of the answer may be
        generated = usage.generated_tokens
        failure = _FAILURES.get(event.error_code, Failure.ENGINE)
        self._end(choice, reason, generated, event.message, cached, failure=failure)
        if choice.stays:
            assert session is not None
            self.sessions.ended(session)

    def _end(
        self,
        choice: Choice,
        reason: EndReason,
        generated: int,
        message: str,
        cached: int = 0,
        *,
        failure: Failure = Failure.ENGINE,
    ) -> None:
        """The last delta of a choice, and of its turn if no other choice runs."""
        prompt = choice.begun.prompt_tokens
        ended = TurnEnded(reason, prompt, cached, generated, message, choice.index, failure)
        self._send(choice.turn, ended)
        self._drop(choice)
        if not choice.turn.choices:
            self._close(choice.turn)

    def _drop(self, choice: Choice) -> None:
        choice.turn.choices.remove(choice)
        del self._running[choice.begun.request.id]
        self.waiting.note_hold(self._clock() - choice.turn.begun_at)
        if not choice.stays:
            choice.begun.request.close()

    def _refuse(self, turn: Turn, code: RefusalCode, message: str, prompt_tokens: int = 0, limit: int = 0) -> None:
        self._send(turn, TurnRefused(code, message, prompt_tokens, limit, self.waiting.retry_after(code)))
        self._close(turn)

    def _end_all(self, message: str) -> None:
        for choice in list(self._running.values()):
            self._end(choice, EndReason.FAILED, 0, message, failure=Failure.UNAVAILABLE)
        for turn in list(self.waiting.queue):
            self.waiting.leave(turn)
            self._refuse(turn, RefusalCode.UNAVAILABLE, message)

    # -- out ----------------------------------------------------------------------------------------------------------

    def _send(self, turn: Turn, delta: TurnDelta | None) -> None:
        if not turn.over:
            self._outbox.setdefault(turn, []).append(delta)

    def _close(self, turn: Turn) -> None:
        self._send(turn, None)
        turn.over = True

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            self._deliver(list(outbox.items()))


def _tokens_delta(choice: Choice, events: list[EngineEvent]) -> TurnTokens:
    return TurnTokens(
        tuple(event.token for event in events if event.token is not None),
        choice.index,
        tuple(event.logprob for event in events if event.logprob is not None),
    )
