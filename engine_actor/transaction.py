"""One step of the engine: everything between a plan and its published results.

    reserve      all blocks of the step; committed tables do not change
    checkpoint   a place for each new token, so that publishing grows nothing
    pack         rows -> one PackedStep
    decode       the only model call
    sample       one token for each row whose sequence is complete
    prepare      what each row becomes, its event, and the proof that publishing will succeed
    commit       publishes: tables, sequences, states. Only integers and references are assigned

Up to and including `prepare` nothing that others can see has changed, and `roll_back` undoes the rest. An error inside
`commit` is a bug: the engine stops instead of guessing (F178).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine_actor.decoding.decoder import Decoder
from engine_actor.decoding.packing import StepPacker
from engine_actor.errors import ContractViolation
from engine_actor.events import EngineEvent, ErrorCode, EventFlags
from engine_actor.lifecycle import Lifecycle
from engine_actor.memory.reservation import Reservation
from engine_actor.request import FinishReason, RequestRecord, RequestStatus, Usage
from engine_actor.sampling.batched_sampler import BatchedSampler, SampleRow, to_host
from engine_actor.sampling.logits_processors import RowContext
from engine_actor.sampling.logprobs import TokenLogprob, logprob_of
from engine_actor.scheduling.step_plan import PlannedRow, StepPlan

NO_FLAGS = EventFlags(0)


class Phase(IntEnum):
    """The last phase that was begun. They come in this order, each once."""

    PLANNED = 0
    RESERVE = 1
    CHECKPOINT = 2
    DECODE = 3
    SAMPLE = 4
    PREPARE = 5
    COMMIT = 6
    ROLLED_BACK = 7


@dataclass(slots=True)
class StagedRow:
    """What a row becomes. `appended` is the token that joins the sequence: none after a partial prefill, and none
    for EOS and stop tokens (F028)."""

    row: PlannedRow
    appended: int | None = None
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None


class StepTransaction:
    def __init__(
        self,
        plan: StepPlan,
        lifecycle: Lifecycle,
        decoder: Decoder,
        packer: StepPacker,
        sampler: BatchedSampler,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.plan = plan
        self.phase = Phase.PLANNED
        self.decoder_seconds = 0.0
        self._lifecycle = lifecycle
        self._decoder = decoder
        self._packer = packer
        self._sampler = sampler
        self._eos = eos_token_ids
        self._reservation: Reservation | None = None
        self._logits: Any = None
        self._staged: list[StagedRow] = []
        self._events: list[EngineEvent] = []
        self._queue_after: deque[EngineEvent] = deque()

    # -- phases -------------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        self.plan.check()
        self._begin(Phase.RESERVE)
        self._reservation = self._lifecycle.cache.reserve([row.demand for row in self.plan.rows])

    def checkpoint(self) -> None:
        self._begin(Phase.CHECKPOINT)
        for row in self.plan.rows:
            if row.samples:
                row.record.history.stage()

    def execute(self) -> None:
        """pack, decode."""
        self._begin(Phase.DECODE)
        assert self._reservation is not None
        packed = self._packer.pack(self.plan, self._reservation)
        started = time.perf_counter()
        self._logits = self._decoder.forward(packed)
        self.decoder_seconds = time.perf_counter() - started

    def sample(self) -> None:
        self._begin(Phase.SAMPLE)
        sampling = [row for row in self.plan.rows if row.samples]
        rows = [
            SampleRow(r.record.turn_options.sampling, r.record.history.length, self._context(r.record))
            for r in sampling
        ]
        tokens = iter(self._sampler.sample(self._logits, rows))
        self._staged = [self._stage(row, next(tokens)) if row.samples else StagedRow(row) for row in self.plan.rows]
        self._add_logprobs()

    def prepare(self) -> None:
        self._begin(Phase.PREPARE)
        assert self._reservation is not None
        self._events = [event for event in map(self._event, self._staged) if event is not None]
        self._queue_after = self._lifecycle.events.stage(self._events)
        self._reservation.validate(self._boundaries())

    def commit(self) -> None:
        self._begin(Phase.COMMIT)
        assert self._reservation is not None
        self._reservation.commit(self._boundaries())
        for staged in self._staged:
            self._publish(staged)

    def publish_events(self) -> None:
        self._lifecycle.events.publish(self._queue_after, self._events)

    def roll_back(self) -> None:
        """Undoes checkpoint and reservation; both are tried even if the first fails (F163). Does nothing the second
        time; a step that began to commit is never undone (F178)."""
        if self.phase is Phase.ROLLED_BACK:
            return
        if self.phase is Phase.COMMIT:
            raise ContractViolation("a step that began to commit cannot be rolled back")
        self.phase = Phase.ROLLED_BACK
        try:
            for row in self.plan.rows:
                row.record.history.unstage()
        finally:
            if self._reservation is not None:
                self._reservation.release()

    def abandon(self) -> None:
        """After a failure inside commit or rollback: nothing more is undone, but what each row holds can still be given
        back by closing its request (F176)."""
        if self._reservation is not None:
            self._reservation.abandon()

    def _begin(self, phase: Phase) -> None:
        if phase != self.phase + 1:
            raise ContractViolation(f"{phase.name.lower()} cannot follow {self.phase.name.lower()} in a step")
        self.phase = phase

    # -- one row ------------------------------------------------------------------------------------------------------

    def _boundaries(self) -> list[int]:
        return [row.demand.target for row in self.plan.rows]

    def _context(self, record: RequestRecord) -> RowContext | None:
        """What changes this row's logits; None for most rows."""
        options, banned = record.turn_options, frozenset[int]()
        if record.turn_generated < options.min_generated_tokens:
            banned = options.stop_token_ids if options.ignore_eos else options.stop_token_ids | self._eos
        if not banned and not options.sampling.reshapes:
            return None
        return RowContext(record.history.ids[: record.history.length], record.turn_generated, banned)

    def _add_logprobs(self) -> None:
        at = 0
        for staged in self._staged:
            wanted = staged.row.record.turn_options.logprobs
            if wanted is not None and staged.appended is not None:
                staged.logprob = logprob_of(to_host(self._logits[at : at + 1])[0], staged.appended, wanted)
            at += staged.row.samples

    def _stage(self, row: PlannedRow, token: int | None) -> StagedRow:
        record, options = row.record, row.record.turn_options
        if token is None:
            return StagedRow(row, None, FinishReason.FAILED)
        if token in self._eos and not options.ignore_eos:
            return StagedRow(row, None, FinishReason.EOS)
        if token in options.stop_token_ids:
            return StagedRow(row, None, FinishReason.STOP_SEQUENCE)
        finish = None
        if record.history.length + 1 >= record.max_total:
            finish = FinishReason.MAX_SESSION_TOKENS
        elif options.max_generated_tokens and record.turn_generated + 1 >= options.max_generated_tokens:
            finish = FinishReason.MAX_GENERATED_TOKENS
        return StagedRow(row, token, finish)

    def _event(self, staged: StagedRow) -> EngineEvent | None:
        if staged.appended is None and staged.finish is None:
            return None
        record = staged.row.record
        flags = NO_FLAGS if staged.appended is None else EventFlags.TOKEN
        event = EngineEvent(flags, record, record.turn_id, staged.appended, logprob=staged.logprob)
        if staged.finish is not None:
            event.flags |= EventFlags.TURN_FINISHED
            event.finish_reason = staged.finish
            generated = record.turn_generated + (staged.appended is not None)
            event.usage = Usage(record.turn_prompt_tokens, generated, self._cached_tokens(staged.row))
        if staged.finish is FinishReason.FAILED:
            event.flags |= EventFlags.FAILED
            event.error_code = ErrorCode.NOT_FINITE
            event.message = "the model gave no finite number for the next token"
        return event

    def _cached_tokens(self, row: PlannedRow) -> int:
        """Input positions of this turn that were found in the cache; fixed by the turn's first step."""
        return row.record.cached_tokens if row.record.admitted else row.demand.committed

    def _publish(self, staged: StagedRow) -> None:
        row, record = staged.row, staged.row.record
        record.cached_tokens = self._cached_tokens(row)
        record.admitted = True
        record.processed = row.demand.target
        if staged.appended is not None:
            record.history.publish(staged.appended)
            record.turn_generated += 1
        else:
            record.history.unstage()
        if row.demand.new:
            self._lifecycle.queue.pop(record.id)
        record.finish_reason = staged.finish
        record.status = RequestStatus.ACTIVE if staged.finish is None else RequestStatus.TURN_COMPLETE

    # -- after the step -----------------------------------------------------------------------------------------------

    def share_full_blocks(self) -> None:
        """Offers blocks that became full to the prefix index; a row of broken numbers gives up its memory instead."""
        cache = self._lifecycle.cache
        for staged in self._staged:
            record: RequestRecord = staged.row.record
            if staged.finish is FinishReason.FAILED:
                cache.remove(record.id)
                record.processed = 0
            else:
                cache.index_full_blocks(record.id, record.options.salt, record.history.ids, staged.row.demand.committed)
