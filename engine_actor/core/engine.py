"""The engine: continuous batching over paged memory, one transaction a call.

`run` either drains events that were committed before, or executes one transaction:

    plan -> reserve -> checkpoint -> pack -> launch -> collect -> stage -> prepare -> commit -> publish

One thread owns the engine and makes every call; it starts no thread of its own and never waits. Waiting belongs to the
caller, who learns from `last_report` what blocked work is waiting for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine_actor.core.invariants import check_requests
from engine_actor.core.lifecycle import Lifecycle
from engine_actor.core.moving import Mover
from engine_actor.core.step import Phase, StepTransaction
from engine_actor.decoding.decoder import Decoder
from engine_actor.decoding.packing import StepPacker
from engine_actor.errors import (
    ContractViolation,
    EngineUnhealthy,
    ExecutionMemoryExceeded,
    InvalidOption,
    RetryableStepError,
    SamplingFailed,
)
from engine_actor.limits import EngineLimits, Numerics
from engine_actor.memory.block_pool import Capacity
from engine_actor.memory.block_table import blocks_for
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.kv_blocks import KvBlocks
from engine_actor.memory.layout import PoolLayout
from engine_actor.options import RequestOptions, require_integer
from engine_actor.requests.event_buffer import EventBuffer
from engine_actor.requests.events import EngineEvent, ErrorCode, EventFlags, EventQueue
from engine_actor.requests.outcomes import StepMetrics, StepOutcome, StepReport
from engine_actor.requests.record import FinishReason, RequestStatus
from engine_actor.requests.request import Request
from engine_actor.sampling.grammars import Grammars
from engine_actor.sampling.vocabulary import Vocabulary
from engine_actor.scheduling.preemption import choose_victim
from engine_actor.scheduling.scheduler import Scheduler
from engine_actor.scheduling.step_plan import StepPlan


class Engine:
    """Owns one decoder and its pools. Raises InvalidOption where the limits do not suit the decoder."""

    def __init__(
        self,
        decoder: Decoder,
        limits: EngineLimits,
        pools: PoolLayout,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        """`pools`: as `plan_pools` lays them out for this decoder's manifest and these limits. `vocabulary` is asked
        for when the first turn comes whose answer follows a grammar."""
        manifest = decoder.manifest
        if limits.numerics is Numerics.EXACT and not decoder.row_invariant:
            raise InvalidOption("numerics", "exact", "'auto' or 'fast': this decoder's rows depend on their batch")
        self.limits = limits
        self.pools = pools
        self.metrics = StepMetrics()
        self.last_report = StepReport(transaction_id=0, outcome=StepOutcome.NO_WORK)
        self._decoder = decoder
        self._cache = CacheManager.of_layout(pools, block_order=limits.block_order, prefix_reuse=limits.prefix_reuse)
        self._events = EventQueue()
        self.grammars = Grammars(vocabulary, manifest.vocab_size, manifest.eos_token_ids)
        self._lifecycle = Lifecycle(
            cache=self._cache,
            events=self._events,
            max_length=pools.max_length,
            vocab_size=manifest.vocab_size,
            eos_token_ids=manifest.eos_token_ids,
            max_draft_tokens=manifest.max_draft_tokens,
            grammars=self.grammars,
        )
        self._mover = Mover(decoder, self._lifecycle)
        self._scheduler = Scheduler(self._lifecycle.requests, self._cache, limits)
        self._packer = StepPacker(self._cache, blocks_for(pools.max_length, pools.block_size))
        self._transaction_id = 0
        decoder.allocate(pools.geometry)

    @property
    def max_length(self) -> int:
        """Longest sequence of a request, answer included."""
        return self.pools.max_length

    # -- requests -----------------------------------------------------------------------------------------------------

    def create_request(self, options: RequestOptions | None = None) -> Request:
        return self._lifecycle.create(options or RequestOptions())

    def get_request(self, request_id: int) -> Request | None:
        return self._lifecycle.get(request_id)

    def read_cache(self, request: Request, most_bytes: int) -> KvBlocks | None:
        """A copy of what is cached of a dormant request, for `restore_request` of another engine. None if nothing is,
        if it is more than `most_bytes`, or if the model keeps more of a request than blocks."""
        return self._mover.read(request._record, most_bytes)

    def restore_request(
        self, tokens: Sequence[int], kv: KvBlocks, options: RequestOptions | None = None
    ) -> Request | None:
        """A dormant request of these tokens, the first `kv.positions` of which are cached. None where the cache comes
        from another model, type or block size, or where it finds no room: nothing gives way for it."""
        return self._mover.restore(tokens, kv, options or RequestOptions())

    @property
    def fatal_error(self) -> EngineUnhealthy | None:
        """The error that stopped this engine; every later `run` raises it."""
        return self._lifecycle.fatal

    @property
    def available_blocks(self) -> int:
        """Blocks that a step could take now: free ones, and those that only the prefix index holds."""
        return self._cache.available

    def could_allocate(self, blocks: int) -> Capacity:
        """Whether a step could take so many blocks: now, later, or never (F327)."""
        return self._cache.pool.can_allocate(blocks)

    def blocks_of(self, request: Request) -> int:
        """Blocks in a request's table, shared ones included."""
        table = self._cache.table(request.id)
        return 0 if table is None else table.count

    def create_event_buffer(self, capacity: int) -> EventBuffer:
        self._lifecycle.check_call()
        return EventBuffer(self, capacity)

    def has_pending_requests(self) -> bool:
        """Events wait to be drained, or some request can make progress or waits to (F075)."""
        self._lifecycle.check_call()
        self._lifecycle.reclaim_abandoned()
        return len(self._events) > 0 or self._lifecycle.requests.has_work

    def __del__(self) -> None:
        if hasattr(self, "_lifecycle"):
            self._lifecycle.detach_all()

    # -- progress -----------------------------------------------------------------------------------------------------

    def run(self, max_events: int | EventBuffer) -> Sequence[EngineEvent]:
        """Drains committed events, else executes one transaction and drains its events; at most `max_events` of them,
        the rest is kept for the next calls. With a buffer, whose capacity is then the limit, the events are also lent
        out through it (F061 to F066).

        Raises EngineUnhealthy after a fatal error, once its events are drained.
        """
        self._lifecycle.check_call()
        buffer = max_events if isinstance(max_events, EventBuffer) else None
        if buffer is not None:
            buffer.check_bound_to(self)
            buffer.invalidate()
        capacity = buffer.capacity if buffer is not None else max_events
        require_integer("max_events", capacity, 0)
        assert isinstance(capacity, int)
        if capacity == 0:
            self._raise_if_unhealthy()
            return []
        self._lifecycle.reclaim_abandoned()
        if not len(self._events):
            self._raise_if_unhealthy()
            self._transact()
        events = self._events.drain(capacity)
        if buffer is not None:
            buffer.refill(events)
        return events

    def _transact(self) -> None:
        started = time.perf_counter()
        try:
            plan = self._plan()
        except MemoryError:  # nothing has changed, and a later call may succeed (F123)
            raise
        except Exception as cause:
            plan = StepPlan(self._transaction_id, self._stop(StepOutcome.EXECUTION_CONTRACT_FAILURE, cause))
        if not plan.executable:
            self._report(plan, plan.outcome, started)
            return
        step = StepTransaction(plan, self._lifecycle, self._decoder, self._packer)
        self._lifecycle.in_step = True
        try:
            outcome = self._execute(step)
        finally:
            self._lifecycle.in_step = False
        self._report(plan, outcome, started, step.decoder_seconds)

    def _plan(self) -> StepPlan:
        """The next step. Ends turns that can never fit; preempts where nothing else could ever free memory."""
        while True:
            self._transaction_id += 1
            plan = self._scheduler.plan(self._transaction_id)
            for record in plan.unserviceable:
                reason = self._cache.why_never(record.history.length)
                self._lifecycle.finish_turn(record, FinishReason.FAILED, ErrorCode.UNSERVICEABLE, reason)
            if plan.executable or plan.outcome is not StepOutcome.CAPACITY_DEFERRED:
                if not plan.executable and plan.outcome is StepOutcome.COMMITTED:
                    raise ContractViolation("a plan without rows claims to be executable")
                self.metrics.capacity_deferrals += bool(plan.deferrals)
                return plan
            if not self._preempt():
                self.metrics.capacity_deferrals += 1
                self._block(plan)
                return plan

    def _preempt(self) -> bool:
        """Dormant residents are the caller's to close; only when there are none, a running one has to give way."""
        requests = self._lifecycle.requests
        if not self.limits.preemption or requests.running_count < self._cache.resident_count:
            return False
        victim = choose_victim(requests.running(), self.limits.max_preemptions)
        if victim is None:
            return False
        self._lifecycle.preempt(victim)
        self.metrics.preemptions += 1
        return True

    def _execute(self, step: StepTransaction) -> StepOutcome:
        try:
            step.reserve()
        except Exception as cause:
            self.metrics.reservation_failures += 1
            return self._stop(StepOutcome.EXECUTION_CONTRACT_FAILURE, cause)
        try:
            step.checkpoint()
            step.launch()
            step.collect()
            step.stage()
            step.prepare()
        except BaseException as cause:
            outcome = self._abort(step, cause)
            if not isinstance(cause, Exception):
                raise
            return outcome
        try:
            step.commit()
            self._count(step)
            step.publish_events()
            self._scheduler.note_committed(step.plan)
            step.share_full_blocks()
        except BaseException as cause:
            outcome = self._stop(StepOutcome.FATAL_EXECUTION_FAILURE, cause)
            step.abandon()
            if not isinstance(cause, Exception):
                raise
            return outcome
        return StepOutcome.COMMITTED

    # -- when a step does not commit ---------------------------------------------------------------------------------

    def _abort(self, step: StepTransaction, cause: BaseException) -> StepOutcome:
        """Rolls a step back. What comes next depends on the cause: try again, wait for memory, or stop."""
        failed_in = step.phase
        self.metrics.rollbacks += 1
        try:
            step.roll_back()
        except Exception as second:
            outcome = self._stop(StepOutcome.FATAL_EXECUTION_FAILURE, second)
            step.abandon()
            return outcome
        if not isinstance(cause, Exception):  # Ctrl-C on the owner thread: nothing of the step remains
            return StepOutcome.RETRYABLE_BATCH_ABORT
        if failed_in is Phase.PREPARE:
            return self._stop(StepOutcome.EXECUTION_CONTRACT_FAILURE, cause)
        if isinstance(cause, MemoryError | ExecutionMemoryExceeded):
            self.metrics.capacity_aborts += 1
            outcome = StepOutcome.EXECUTION_CAPACITY_EXCEEDED
            return self._report_abort(EventFlags.CAPACITY_BLOCKED, ErrorCode.EXECUTION_MEMORY, outcome, cause)
        if isinstance(cause, RetryableStepError) or failed_in is Phase.STAGE:
            self.metrics.retryable_aborts += 1
            self.metrics.post_processing_aborts += isinstance(cause, SamplingFailed) or failed_in is Phase.STAGE
            outcome = StepOutcome.RETRYABLE_BATCH_ABORT
            return self._report_abort(EventFlags.RETRYABLE, ErrorCode.RETRYABLE, outcome, cause)
        return self._stop(StepOutcome.FATAL_EXECUTION_FAILURE, cause)

    def _block(self, plan: StepPlan) -> None:
        """All work waits for memory that dormant requests hold: said once a call, never mistaken for no work (F117)."""
        blocks = max(deferral.missing_blocks for deferral in plan.deferrals)
        slots = max(deferral.missing_slots for deferral in plan.deferrals)
        self._events.append(
            EngineEvent(
                EventFlags.CAPACITY_BLOCKED,
                error_code=ErrorCode.DEFERRED,
                message=f"{len(plan.deferrals)} requests wait; {blocks} blocks and {slots} places are missing",
                outcome=StepOutcome.CAPACITY_DEFERRED,
            )
        )

    def _stop(self, outcome: StepOutcome, cause: BaseException) -> StepOutcome:
        """Fail-stop: every running or waiting turn ends as failed, and the error is kept for every later call."""
        self.metrics.fatal_execution_failures += 1
        message = f"{outcome.value} in transaction {self._transaction_id}. Cause: {type(cause).__name__}: {cause}"
        error = EngineUnhealthy(message)
        error.__cause__ = cause
        if not self._lifecycle.stop(error):
            self._events.append(
                EngineEvent(EventFlags.FAILED, error_code=ErrorCode.FATAL, message=message, outcome=outcome)
            )
        return outcome

    def _report_abort(self, flags: EventFlags, code: int, outcome: StepOutcome, cause: BaseException) -> StepOutcome:
        message = f"{outcome.value} in transaction {self._transaction_id}. Cause: {type(cause).__name__}: {cause}"
        self._events.append(EngineEvent(flags, error_code=code, message=message, outcome=outcome))
        return outcome

    def _raise_if_unhealthy(self) -> None:
        if self._lifecycle.fatal is not None:
            raise self._lifecycle.fatal.with_traceback(None)  # the same error each time, and nothing piles up

    # -- what happened ------------------------------------------------------------------------------------------------

    def _count(self, step: StepTransaction) -> None:
        plan, prefill = step.plan, step.plan.prefill_tokens
        self.metrics.committed_steps += 1
        self.metrics.prefill_tokens += prefill
        self.metrics.decode_tokens += plan.token_count - prefill - plan.draft_tokens
        self.metrics.draft_tokens += plan.draft_tokens
        self.metrics.accepted_draft_tokens += step.accepted_drafts
        self.metrics.adopted_tokens += sum(row.demand.num_computed_tokens for row in plan.rows if row.demand.new)

    def _report(self, plan: StepPlan, outcome: StepOutcome, started: float, decoder_seconds: float = 0.0) -> None:
        self.last_report = StepReport(
            transaction_id=plan.transaction_id,
            outcome=outcome,
            deferrals=tuple(plan.deferrals),
            rows=len(plan.rows),
            tokens=plan.token_count,
            prefill_tokens=plan.prefill_tokens,
            decoder_seconds=decoder_seconds,
            step_seconds=time.perf_counter() - started,
        )

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the memory and requests of this moment, derived from the live objects."""
        self._lifecycle.check_call()
        cache = self._cache.stats()
        requests = self._lifecycle.requests
        with_turns = requests.with_turns()
        return {
            **self.metrics.as_dict(),
            "blocks_usable": cache.usable,
            "blocks_free": cache.free,
            "blocks_idle": cache.idle,
            "residents": cache.residents,
            "requests": len(requests.records),
            "running": sum(record.status is RequestStatus.RUNNING for record in with_turns),
            "waiting": sum(record.status is RequestStatus.WAITING for record in with_turns),
            "tokens_due": sum(record.history.length - record.num_computed_tokens for record in with_turns),
            "pending_events": len(self._events),
            "grammars_compiled": self.grammars.compiled,
            "grammars_reused": self.grammars.reused,
        }

    def active_blocks(self) -> int:
        """Blocks that running requests hold, shared ones counted once; those of dormant requests are only a cache."""
        active = (record for record in self._lifecycle.requests.running() if record.status is RequestStatus.RUNNING)
        tables = (self._cache.table(record.id) for record in active)
        return len({block for table in tables if table is not None for block in table.blocks})

    def check_integrity(self) -> None:
        """Raises ContractViolation if any part of the engine's state contradicts another. Linear."""
        self._cache.check_integrity()
        check_requests(self._lifecycle.requests, self._cache)
