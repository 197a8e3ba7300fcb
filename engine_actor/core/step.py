"""One step of the engine: everything between a plan and its published results.

    reserve      all blocks of the step; committed tables do not change
    checkpoint   a place for each token that may be added, so that publishing grows nothing
    pack         rows -> one PackedStep
    launch       the only model call: the decoder begins to compute the step and to choose the next token of each row
                 whose sequence is complete
    collect      waits for the tokens
    stage        what each row becomes by its token; after drafts, by as many as agree with theirs
    prepare      the rows' events, and the proof that publishing will succeed
    commit       publishes: tables, sequences, states. Only integers and references are assigned

Up to and including `prepare` nothing that others can see has changed, and `roll_back` undoes the rest. An error inside
`commit` is a bug: the engine stops instead of guessing (F178).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from engine_actor.core.lifecycle import Lifecycle
from engine_actor.decoding.decoder import Decoder, Launched, SampledStep
from engine_actor.decoding.packing import StepPacker
from engine_actor.errors import ContractViolation, GrammarFailed
from engine_actor.memory.step_reservation import StepReservation
from engine_actor.requests.events import EngineEvent, ErrorCode, EventFlags
from engine_actor.requests.record import FinishReason, RequestRecord, RequestStatus, Usage
from engine_actor.sampling.grammar_cursor import Cursor
from engine_actor.sampling.logits_processors import bytes_of_bits
from engine_actor.sampling.logprobs import TokenLogprob
from engine_actor.sampling.sample_row import Bits, RowContext, SampleRow
from engine_actor.scheduling.step_plan import PlannedRow, StepPlan

NO_FLAGS = EventFlags(0)


class Phase(IntEnum):
    """The last phase that was begun. They come in this order, each once."""

    PLANNED = 0
    RESERVE = 1
    CHECKPOINT = 2
    LAUNCH = 3
    COLLECT = 4
    STAGE = 5
    PREPARE = 6
    COMMIT = 7
    ROLLED_BACK = 8


@dataclass(slots=True)
class StagedRow:
    """What a row becomes. `appended` are the tokens that join the sequence: none after a partial prefill, one after a
    decode, more where drafts were accepted; never EOS and stop tokens (F028). `num_computed_tokens`:
    positions then valid.

        positions   [0 .. length)[length .. num_computed)[num_computed .. target)
                     sequence    accepted drafts     rejected, to be written again (C30)
    """

    row: PlannedRow
    num_computed_tokens: int
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
    ) -> None:
        self.plan = plan
        self.phase = Phase.PLANNED
        self.decoder_seconds = 0.0
        self._lifecycle = lifecycle
        self._decoder = decoder
        self._packer = packer
        self._reservation: StepReservation | None = None
        self._launched: Launched | None = None
        self._sampled = SampledStep(())
        self._staged: list[StagedRow] = []
        self._unguided: dict[int, str] = {}  # rows whose grammar failed in this step, and why
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

    def launch(self) -> None:
        self._begin(Phase.LAUNCH)
        assert self._reservation is not None
        packed = self._packer.pack(self.plan, self._reservation)
        self._launched = self._decoder.launch(packed, self._sample_rows())

    def collect(self) -> None:
        self._begin(Phase.COLLECT)
        assert self._launched is not None
        self._sampled = self._launched.collect()
        self.decoder_seconds = self._sampled.decoder_seconds

    def stage(self) -> None:
        self._begin(Phase.STAGE)
        sampled, at = self._sampled, 0
        for row in self.plan.rows:
            if not row.samples:
                self._staged.append(StagedRow(row, row.demand.target))
                continue
            staged = self._stage(row, sampled.tokens, at)
            if row.record.turn_options.logprobs is not None:
                staged.logprobs = self._logprobs(staged, sampled, at)
            self._staged.append(staged)
            at += 1 + len(row.drafts)

    def prepare(self) -> None:
        self._begin(Phase.PREPARE)
        assert self._reservation is not None
        for staged in self._staged:
            self._add_events(staged)
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
        drafted = (staged for staged in self._staged if staged.row.drafts)
        return sum(staged.num_computed_tokens + len(staged.row.drafts) - staged.row.demand.target for staged in drafted)

    def publish_events(self) -> None:
        self._lifecycle.events.publish(self._queue_after, self._events)

    def roll_back(self) -> None:
        """Undoes checkpoint and reservation; both are tried even if the first fails (F163), and both do nothing the
        second time. A step that began to commit is never undone (F178)."""
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
        return [staged.num_computed_tokens for staged in self._staged]

    def _sample_rows(self) -> list[SampleRow]:
        """One for each of the step's logits rows."""
        rows: list[SampleRow] = []
        for row in self.plan.rows:
            if row.samples:
                record = row.record
                length, options = record.history.length, record.turn_options
                context = None if record.plain else self._context(record)
                rows.append(SampleRow(options.sampling, length, context, options.logprobs))
                for i in range(len(row.drafts)):
                    rows.append(SampleRow(options.sampling, length + 1 + i, context, options.logprobs))
        return rows

    def _context(self, record: RequestRecord) -> RowContext | None:
        """What changes this row's logits."""
        options = record.turn_options
        too_short = record.turn_generated < options.min_generated_tokens
        if not too_short and not options.sampling.reshapes and record.grammar_cursor is None:
            return None
        tokens, generated = record.history.ids[: record.history.length], record.turn_generated
        banned = record.end_tokens if too_short else frozenset()
        if record.grammar_cursor is None:
            return RowContext(tokens, generated, banned)
        cursor, answer = record.grammar_cursor, tokens[len(tokens) - generated :]
        return RowContext(tokens, generated, banned, lambda: self._mask(record, cursor, answer))

    def _mask(self, record: RequestRecord, cursor: Cursor, answer: list[int]) -> Bits | None:
        """What the row's grammar lets follow. Where it fails nothing may, so that this row ends alone."""
        try:
            return cursor.mask(answer)
        except GrammarFailed as error:
            self._unguided[record.id] = str(error)
            return np.zeros(bytes_of_bits(self._lifecycle.vocab_size), np.uint8)

    def _logprobs(self, staged: StagedRow, sampled: SampledStep, at: int) -> list[TokenLogprob]:
        """Of each appended token; the row's samples start at index `at` of the step's."""
        logprobs = sampled.logprobs[at : at + len(staged.appended)]
        assert all(logprob is not None for logprob in logprobs), "an appended token has no logprob"
        return [logprob for logprob in logprobs if logprob is not None]

    def _stage(self, row: PlannedRow, tokens: Sequence[int | None], at: int) -> StagedRow:
        """`tokens`: from index `at` on the one that follows the sequence, then the one that follows each draft. The
        first that is not the next draft ends the row, and so do the first that ends the turn and the first at a limit
        (F298, F305, F306)."""
        drafts, record = row.drafts, row.record
        token, goes_on = tokens[at], record.history.length + 1 < record.end_length
        if goes_on and not drafts and token is not None and token not in record.end_tokens:
            return StagedRow(row, row.demand.target, (token,))  # nearly always: one token more
        appended: list[int] = []
        accepted, finish = 0, None
        for token in tokens[at : at + 1 + len(drafts)]:
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
        if token is None:
            return FinishReason.FAILED
        if token not in record.end_tokens:
            return None
        is_eos = token in self._lifecycle.eos_token_ids and not record.turn_options.ignore_eos
        return FinishReason.EOS if is_eos else FinishReason.STOP_SEQUENCE

    def _end_after(self, record: RequestRecord, added: int) -> FinishReason | None:
        """Which limit the turn reaches with `added` tokens of this step."""
        length = record.history.length + added
        if length >= record.max_total:
            return FinishReason.MAX_SESSION_TOKENS
        return FinishReason.MAX_GENERATED_TOKENS if length >= record.end_length else None

    def _add_events(self, staged: StagedRow) -> None:
        """One event a token, in order; how the turn ended joins the last one (F068, F080)."""
        record, events = staged.row.record, self._events
        for token in staged.appended:
            events.append(EngineEvent(EventFlags.TOKEN, record, record.turn_id, token))
        if staged.logprobs:
            for event, logprob in zip(events[-len(staged.appended) :], staged.logprobs, strict=True):
                event.logprob = logprob
        if staged.finish is None:
            return
        if not staged.appended:
            events.append(EngineEvent(NO_FLAGS, record, record.turn_id))
        last = events[-1]
        last.flags |= EventFlags.TURN_FINISHED
        last.finish_reason = staged.finish
        generated = record.turn_generated + len(staged.appended)
        last.usage = Usage(record.turn_prompt_tokens, generated, self._cached_tokens(staged.row))
        if staged.finish is FinishReason.FAILED:
            last.flags |= EventFlags.FAILED
            last.error_code, last.message = self._why_failed(record)

    def _why_failed(self, record: RequestRecord) -> tuple[int, str]:
        """Of a row for which no token could be chosen."""
        if record.grammar_cursor is None:
            which = "any token that its options allow" if record.turn_options.sampling.reshapes else "the next token"
            return ErrorCode.NOT_FINITE, f"the model gave no finite number for {which}"
        reason = self._unguided.get(record.id, "nothing that it allows has a finite number from the model")
        return ErrorCode.GRAMMAR, f"the answer's grammar failed: {reason}"

    def _cached_tokens(self, row: PlannedRow) -> int:
        """Input positions of this turn that were found in the cache; fixed by the turn's first step."""
        return row.record.cached_tokens if row.record.admitted else row.demand.num_computed_tokens

    def _publish(self, staged: StagedRow) -> None:
        row, record = staged.row, staged.row.record
        if not record.admitted:
            record.cached_tokens = row.demand.num_computed_tokens
            record.admitted = True
        record.num_computed_tokens = staged.num_computed_tokens
        record.drafts = ()
        history = record.history
        for token in staged.appended:
            history.publish(token)
        record.turn_generated += len(staged.appended)
        if len(staged.appended) <= len(row.drafts):
            history.unstage()
        requests = self._lifecycle.requests
        if row.demand.new:
            requests.settle(record)
        record.finish_reason = staged.finish
        if staged.finish is None:
            record.status = RequestStatus.RUNNING
        else:
            requests.rest(record)
            record.status, record.grammar_cursor = RequestStatus.IDLE, None

    # -- after the step -----------------------------------------------------------------------------------------------

    def share_full_blocks(self) -> None:
        """Offers blocks that became full to the prefix index; a row of broken numbers gives up its memory instead."""
        cache = self._lifecycle.cache
        size = cache.block_size
        for staged in self._staged:
            record: RequestRecord = staged.row.record
            before = staged.row.demand.num_computed_tokens
            if staged.finish is FinishReason.FAILED:
                cache.remove(record.id)
                record.num_computed_tokens = 0
            elif staged.num_computed_tokens // size > before // size:
                cache.index_full_blocks(record.id, record.options.salt, record.history.ids, before)
