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
from dataclasses import dataclass, field

from engine_actor.conversation import Conversation
from engine_actor.engine import Engine
from engine_actor.errors import ContextLengthExceeded, EngineError, EngineUnhealthy
from engine_actor.events import EngineEvent, ErrorCode, EventFlags
from engine_actor.heartbeat import SNAPSHOT_SECONDS, Heartbeat, Snapshot
from engine_actor.outcomes import StepOutcome, StepReport
from engine_actor.request import FinishReason
from engine_actor.sessions import BegunTurn, SessionTable
from engine_actor.turns import (
    EndReason,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
)

logger = logging.getLogger("moorage.engine")

IDLE_TICK_SECONDS = 1.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.01, 1.0
MAX_EVENTS = 4096

_LENGTH = (FinishReason.MAX_GENERATED_TOKENS, FinishReason.MAX_SESSION_TOKENS)
_STOP = (FinishReason.EOS, FinishReason.STOP_SEQUENCE)
_ROLLED_BACK = (StepOutcome.RETRYABLE_BATCH_ABORT, StepOutcome.EXECUTION_CAPACITY_EXCEEDED)


@dataclass(eq=False, slots=True)
class Turn:
    """One call of `stream_turn`, from the owner's side. `receive` takes its deltas on the event loop. `choices` are
    those that run; before the turn is accepted, and after it is over, there are none."""

    request: TurnRequest
    receive: Callable[[list[TurnDelta | None]], None]
    conversation: Conversation | None = None
    choices: list[Choice] = field(default_factory=list)
    over: bool = False


@dataclass(eq=False, slots=True)
class Choice:
    """One answer of a turn. The first one computes the prompt; the others branch off when it is done."""

    turn: Turn
    index: int
    begun: BegunTurn
    branched: bool

    @property
    def stays(self) -> bool:
        """Its request stays resident for the next turn of a session."""
        return self.index == 0 and self.turn.conversation is not None


Delivery = list[tuple[Turn, list[TurnDelta | None]]]
"""Deltas by turn; None is what follows the last one."""


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    max_queued_turns: int
    max_turns_per_session: int
    retry_after: float = 1.0


class OwnerLoop:
    def __init__(
        self,
        engine: Engine,
        sessions: SessionTable,
        replica: str,
        limits: OwnerLimits,
        deliver: Callable[[Delivery], None],
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        self.engine = engine
        self.sessions = sessions
        self.heartbeat = Heartbeat()
        self._replica = replica
        self._limits = limits
        self._deliver = deliver
        self._on_step = on_step
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
                self._flush()  # whoever was accepted or refused hears of it before the step, which may be long
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
            tuple(self.sessions.resident_keys()),
            stats["running"],
            stats["waiting"] + self.sessions.waiting_turns(),
            self.engine.available_blocks,
        )
        beat.snapshot_taken = beat.last_round

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(self, turn: Turn) -> None:
        """Begins a turn, or lets it wait for the earlier turns of its session, or refuses it."""
        if self.heartbeat.failure is not None:
            self._refuse(turn, RefusalCode.UNAVAILABLE, f"the engine stopped: {self.heartbeat.failure}")
            return
        resumed = turn.request.resumed_tokens is not None  # accepted once: no limit of a queue may end it
        waiting = self.engine.stats()["waiting"] + self.sessions.waiting_turns()
        if waiting >= self._limits.max_queued_turns and not resumed:
            self._refuse(turn, RefusalCode.QUEUE_FULL, f"{waiting} turns are waiting already")
            return
        conversation = turn.conversation = self.sessions.open(turn.request)
        if conversation is not None and conversation.running:
            if len(conversation.waiting) + 1 >= self._limits.max_turns_per_session and not resumed:
                text = f"{len(conversation.waiting) + 1} turns of this session run or wait already"
                self._refuse(turn, RefusalCode.SESSION_BUSY, text)
            else:
                conversation.waiting.append(turn)
            return
        self._begin(turn)

    def cancel(self, turn: Turn) -> None:
        """The caller has gone: no further row is spent on the turn. Committed tokens of a session stay."""
        if turn.over:
            return
        turn.over = True
        if not turn.choices:
            assert turn.conversation is not None
            turn.conversation.waiting.remove(turn)
        for choice in list(turn.choices):
            if choice.stays:
                # Its terminal event is drained in the next round, which then starts the next turn of the session.
                choice.begun.request.cancel_turn(choice.begun.turn_id)
            else:
                self._drop(choice)

    def close_session(self, key: str) -> bool:
        """Drops a session. Its running turn ends as failed; turns that wait start anew, without its history."""
        conversation = self.sessions.close(key)
        if conversation is None:
            return False
        for turn in {choice.turn for choice in self._running.values() if choice.turn.conversation is conversation}:
            for choice in list(turn.choices):
                self._end(choice, EndReason.FAILED, 0, "the session was deleted")
        for waiting in conversation.waiting:
            assert isinstance(waiting, Turn)
            self.submit(waiting)
        return True

    # -- turns --------------------------------------------------------------------------------------------------------

    def _begin(self, turn: Turn) -> None:
        try:
            begun = self.sessions.begin(turn.request, turn.conversation)
        except ContextLengthExceeded as error:
            length = error.current + error.added
            self._refuse(turn, RefusalCode.CONTEXT_LENGTH, str(error), length, error.limit)
        except EngineUnhealthy as error:
            self._refuse(turn, RefusalCode.UNAVAILABLE, f"the engine stopped: {error}")
        except EngineError as error:
            self._refuse(turn, RefusalCode.INVALID, str(error))
        else:
            self._run_choice(Choice(turn, 0, begun, branched=turn.request.choices == 1))
            accepted = TurnAccepted(self._replica, begun.prompt_tokens, begun.cached_tokens, begun.own_tokens)
            self._send(turn, accepted)
            return
        if turn.conversation is not None:
            self.sessions.forget_if_empty(turn.conversation)
            self._begin_next(turn.conversation)

    def _begin_next(self, conversation: Conversation) -> None:
        if conversation.waiting:
            turn = conversation.waiting.popleft()
            assert isinstance(turn, Turn)
            self._begin(turn)

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
        conversation, usage = choice.turn.conversation, event.usage
        reason = EndReason.FAILED
        if event.finish_reason in _STOP:
            reason = EndReason.STOP
        elif event.finish_reason in _LENGTH:
            reason = EndReason.LENGTH
        gone = event.error_code == ErrorCode.FATAL
        cached = min(usage.cached_tokens, choice.begun.prompt_tokens)  # of a resumed turn, part of the answer may be
        self._end(choice, reason, usage.generated_tokens, event.message, cached, resumable=gone)
        if choice.stays:
            assert conversation is not None
            self.sessions.ended(conversation)
            self._begin_next(conversation)

    def _end(
        self,
        choice: Choice,
        reason: EndReason,
        generated: int,
        message: str,
        cached: int = 0,
        *,
        resumable: bool = False,
    ) -> None:
        """The last delta of a choice, and of its turn if no other choice runs."""
        prompt = choice.begun.prompt_tokens
        ended = TurnEnded(reason, prompt, cached, generated, message, choice.index, resumable)
        self._send(choice.turn, ended)
        self._drop(choice)
        if not choice.turn.choices:
            self._close(choice.turn)

    def _drop(self, choice: Choice) -> None:
        choice.turn.choices.remove(choice)
        del self._running[choice.begun.request.id]
        if not choice.stays:
            choice.begun.request.close()

    def _refuse(self, turn: Turn, code: RefusalCode, message: str, prompt_tokens: int = 0, limit: int = 0) -> None:
        temporary = code not in (RefusalCode.CONTEXT_LENGTH, RefusalCode.INVALID)
        retry_after = self._limits.retry_after if temporary else 0.0
        self._send(turn, TurnRefused(code, message, prompt_tokens, limit, retry_after))
        self._close(turn)

    def _end_all(self, message: str) -> None:
        for choice in list(self._running.values()):
            self._end(choice, EndReason.FAILED, 0, message, resumable=True)
        for waiting in self.sessions.take_waiting():
            assert isinstance(waiting, Turn)
            self._refuse(waiting, RefusalCode.UNAVAILABLE, message)

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
