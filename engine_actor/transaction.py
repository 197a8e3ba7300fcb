"""One step of the engine: everything between a plan and its published results.

    reserve      all blocks of the step; committed tables do not change
    checkpoint   a place for each token that may be added, so that publishing grows nothing
    pack         rows -> one PackedStep
    decode       the only model call
    sample       the next token of each row whose sequence is complete; after drafts, as many as agree with it
    prepare      what each row becomes, its event, and the proof that publishing will succeed
    commit       publishes: tables, sequences, states. Only integers and references are assigned

Up to and including `prepare` nothing that others can see has changed, and `roll_back` undoes the rest. An error inside
`commit` is a bug: the engine stops instead of guessing (F178).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine_actor.decoding.decoder import Decoder
from engine_actor.decoding.packing import StepPacker
from engine_actor.errors import ContractViolation
from engine_actor.events import EngineEvent, ErrorCode, EventFlags
from engine_actor.lifecycle import Lifecycle
from engine_actor.memory.step_reservation import StepReservation
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
    """What a row becomes. `appended` are the tokens that join the sequence: none after a partial prefill, one after a
    decode, more where drafts were accepted; never EOS and stop tokens (F028). `boundary`: positions then valid.

        positions   [0 .. whole)[whole .. boundary)[boundary .. target)
                     sequence    accepted drafts     rejected, to be written again (C30)
    """

    row: PlannedRow
    boundary: int
    appended: Sequence[int] = ()
    finish: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] = ()


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
        self._reservation: StepReservation | None = None
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
                row.record.history.stage(1 + len(row.drafts))

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
        rows: list[SampleRow] = []
        for row in self.plan.rows:
            if row.samples:
                record, length = row.record, row.record.history.length
                params, context = record.turn_options.sampling, self._context(record)
                rows.append(SampleRow(params, length, context))
                for i in range(len(row.drafts)):
                    rows.append(SampleRow(params, length + 1 + i, context))
        tokens = self._sampler.sample(self._logits, rows)
        at = 0
        for row in self.plan.rows:
            if row.samples:
                following = at + len(row.drafts) + 1
                staged = self._stage(row, tokens[at:following])
                wanted = row.record.turn_options.logprobs
                if wanted is not None:
                    staged.logprobs = self._logprobs(staged, at, wanted)
                at = following
            else:
                staged = StagedRow(row, row.demand.target)
            self._staged.append(staged)

    def prepare(self) -> None:
        self._begin(Phase.PREPARE)
        assert self._reservation is not None
        self._events = [event for staged in self._staged for event in self._events_of(staged)]
        self._queue_after = self._lifecycle.events.stage(self._events)
        self._reservation.validate(self._boundaries())

    def commit(self) -> None:
        self._begin(Phase.COMMIT)
        assert self._reservation is not None
        self._reservation.commit(self._boundaries())
        for staged in self._staged:
            self._publish(staged)

    @property
    def accepted_drafts(self) -> int:
        return sum(staged.boundary + len(staged.row.drafts) - staged.row.demand.target for staged in self._staged)

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
        return [staged.boundary for staged in self._staged]

    def _context(self, record: RequestRecord) -> RowContext | None:
        """What changes this row's logits; None for most rows."""
        options = record.turn_options
        too_short = record.turn_generated < options.min_generated_tokens
        if not too_short and not options.sampling.reshapes:
            return None
        ends = options.stop_token_ids if options.ignore_eos else options.stop_token_ids | self._eos
        banned = ends if too_short else frozenset()
        return RowContext(record.history.ids[: record.history.length], record.turn_generated, banned)

    def _logprobs(self, staged: StagedRow, at: int, wanted: int) -> list[TokenLogprob]:
        """Of each appended token; the row's logits start at index `at` of the step's."""
        logits = to_host(self._logits[at : at + len(staged.appended)])
        return [logprob_of(row, token, wanted) for row, token in zip(logits, staged.appended, strict=True)]

    def _stage(self, row: PlannedRow, tokens: Sequence[int | None]) -> StagedRow:
        """`tokens`: the one that follows the sequence, then the one that follows each draft. The first that is not the
        next draft ends the row, and so do the first that ends the turn and the first at a limit (F298, F305, F306)."""
        drafts, record, finish = row.drafts, row.record, None
        appended: list[int] = []
        accepted = 0
        for token in tokens:
            finish = self._end_before(record, token)
            if token is None or finish is not None:
                break
            appended.append(token)
            agrees = accepted < len(drafts) and token == drafts[accepted]
            accepted += agrees
            finish = self._end_after(record, len(appended))
            if finish is not None or not agrees:
                break
        return StagedRow(row, row.demand.target - len(drafts) + accepted, appended, finish)

    def _end_before(self, record: RequestRecord, token: int | None) -> FinishReason | None:
        """Why this token ends the turn without being part of it."""
        options = record.turn_options
        if token is None:
            return FinishReason.FAILED
        if token in self._eos and not options.ignore_eos:
            return FinishReason.EOS
        return FinishReason.STOP_SEQUENCE if token in options.stop_token_ids else None

    def _end_after(self, record: RequestRecord, added: int) -> FinishReason | None:
        """Which limit the turn reaches with `added` tokens of this step."""
        limit = record.turn_options.max_generated_tokens
        if record.history.length + added >= record.max_total:
            return FinishReason.MAX_SESSION_TOKENS
        return FinishReason.MAX_GENERATED_TOKENS if limit and record.turn_generated + added >= limit else None

    def _events_of(self, staged: StagedRow) -> list[EngineEvent]:
        """One event a token, in order; how the turn ended joins the last one (F068, F080)."""
        record = staged.row.record
        events = [EngineEvent(EventFlags.TOKEN, record, record.turn_id, token) for token in staged.appended]
        if staged.logprobs:
            for event, logprob in zip(events, staged.logprobs, strict=True):
                event.logprob = logprob
        if staged.finish is None:
            return events
        if not events:
            events.append(EngineEvent(NO_FLAGS, record, record.turn_id))
        last = events[-1]
        last.flags |= EventFlags.TURN_FINISHED
        last.finish_reason = staged.finish
        generated = record.turn_generated + len(staged.appended)
        last.usage = Usage(record.turn_prompt_tokens, generated, self._cached_tokens(staged.row))
        if staged.finish is FinishReason.FAILED:
            last.flags |= EventFlags.FAILED
            last.error_code = ErrorCode.NOT_FINITE
            last.message = "the model gave no finite number for the next token"
        return events

    def _cached_tokens(self, row: PlannedRow) -> int:
        """Input positions of this turn that were found in the cache; fixed by the turn's first step."""
        return row.record.cached_tokens if row.record.admitted else row.demand.committed

    def _publish(self, staged: StagedRow) -> None:
        row, record = staged.row, staged.row.record
        record.cached_tokens = self._cached_tokens(row)
        record.admitted = True
        record.processed = staged.boundary
        record.drafts = ()
        for token in staged.appended:
            record.history.publish(token)
            record.turn_generated += 1
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
