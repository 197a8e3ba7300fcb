"""Decides one step: who takes part, in which order, with how many tokens. Planning changes nothing (F096).

The plain order, without fairness bounds (F084, F086): residents in resident order, then the queue as it was submitted;
of these, decodes first, then prefills, both stable. With bounds (FairnessBounds):

    1. rows that were overtaken or passed over too often, then decodes (in turn, if not all fit), then prefills
    2. while a prefill runs, decodes leave it a minimum share of the tokens, as far as it can use them
    3. a request that was overtaken too often closes the door to newer ones until it is in

Budget: every selected row gets one token; what is left goes to prefills in order, each up to the rest of its sequence
and the chunk size (F089). Drafts that callers proposed share what is then left (draft_budget).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine_actor.limits import EngineLimits, FairnessBounds
from engine_actor.memory.block_table import blocks_for
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.reservation import RowDemand
from engine_actor.options import UNBOUNDED
from engine_actor.requests.outcomes import DeferralReason, StepOutcome
from engine_actor.requests.record import RequestRecord
from engine_actor.requests.table import RequestTable
from engine_actor.scheduling.admission import Admission, Selection
from engine_actor.scheduling.draft_budget import DraftWant, share_drafts
from engine_actor.scheduling.step_plan import PlannedRow, StepPlan


def row_limit(max_scheduled_tokens: int, max_batch_size: int) -> int:
    """Rows of one step (F087)."""
    if max_scheduled_tokens < 1 or max_batch_size < 1:
        raise ValueError(f"both limits must be positive: {max_scheduled_tokens} tokens, {max_batch_size} rows")
    return min(max_scheduled_tokens, max_batch_size)


def longest_part(chunk_size: int, query_cap: int) -> int:
    """Most tokens of one prompt in a step; chunk_size 0 leaves only the cap (F226)."""
    return min(chunk_size, query_cap) if chunk_size else query_cap


def share_budget(wants: Sequence[int], budget: int) -> list[int]:
    """Tokens for each row: one each, the rest greedily in order; `wants` is 1 for a decode, and for a prefill what
    its sequence and its caps leave. Raises ValueError if not even one each fits (F089)."""
    remaining = budget - len(wants)
    if remaining < 0:
        raise ValueError(f"{len(wants)} rows do not fit into a budget of {budget} tokens")
    counts = []
    for want in wants:
        extra = want - 1 if want <= remaining else remaining
        counts.append(1 + extra)
        remaining -= extra
    return counts


class Scheduler:
    def __init__(self, requests: RequestTable, cache: CacheManager, limits: EngineLimits) -> None:
        self._requests = requests
        self._cache = cache
        self._limits = limits
        self._row_limit = row_limit(limits.max_scheduled_tokens, limits.max_batch_size)
        bounds = limits.fairness
        self._services = 0
        windows = cache.windows
        self._most_queries = UNBOUNDED if windows is None else windows.cap  # of one row
        self._longest_part = longest_part(limits.chunk_size, self._most_queries)
        self._bounded = bounds != FairnessBounds.off()
        self._prefill_reserve = math.ceil(bounds.min_prefill_share * limits.max_scheduled_tokens)

    def plan(self, transaction_id: int) -> StepPlan:
        candidates = self._candidates()
        if not candidates:
            return StepPlan(transaction_id, StepOutcome.NO_WORK)
        selection = self._select(candidates)
        plan = StepPlan(
            transaction_id,
            StepOutcome.COMMITTED,
            deferrals=selection.deferrals,
            unserviceable=selection.unserviceable,
        )
        self._share_out(selection, plan)
        if not plan.rows:
            plan.outcome = StepOutcome.CAPACITY_DEFERRED if plan.deferrals else StepOutcome.UNSERVICEABLE_REQUEST
        return plan

    def note_committed(self, plan: StepPlan) -> None:
        """Keeps the fairness counters after a committed step: who took part, who was passed over or overtaken."""
        for row in plan.rows:
            self._services += 1
            row.record.served = self._services
            row.record.passed_over = row.record.overtaken = 0
        if not plan.deferrals:
            return
        admitted = [row.record.submitted for row in plan.rows if row.demand.new]
        for deferral in plan.deferrals:
            record = self._requests.records[deferral.request_id]
            if deferral.reason is DeferralReason.ROWS:
                record.passed_over += 1
                continue
            record.overtaken += sum(submitted > record.submitted for submitted in admitted)
            if self._cache.table(record.id) is not None:
                record.passed_over += 1  # a running row that lacks blocks comes earlier, to get the next free one

    def _candidates(self) -> list[RequestRecord]:
        candidates = self._requests.with_turns()
        if any(record.turn_options.priority for record in candidates):
            candidates.sort(key=lambda record: record.turn_options.priority)
        return candidates

    def _select(self, candidates: list[RequestRecord]) -> Selection:
        overdue: list[RequestRecord] = []
        decodes: list[RequestRecord] = []
        prefills: list[RequestRecord] = []
        bounds = self._limits.fairness
        most_passed, most_overtaken = bounds.max_passed_over, max(1, bounds.max_overtakes)
        for record in candidates:
            if record.passed_over >= most_passed or record.overtaken >= most_overtaken:
                overdue.append(record)
            elif record.num_computed_tokens < record.prompt_boundary:
                prefills.append(record)
            else:
                decodes.append(record)
        admission = Admission(self._cache, self._row_limit, bounds.max_overtakes, self._requests.running_count)
        overdue.sort(key=lambda record: (record.overtaken < most_overtaken, -record.passed_over))
        for record in overdue:
            admission.consider(record)
        share = self._decode_share() if prefills else UNBOUNDED
        if self._bounded and len(decodes) > min(share, self._row_limit):
            decodes.sort(key=lambda record: record.served)
        rows = admission.selection.rows
        decode_limit = len(rows) + share
        held_back: list[RequestRecord] = []
        for record in decodes:
            if len(rows) < decode_limit:
                admission.consider(record)
            else:
                held_back.append(record)
        for record in prefills:
            admission.consider(record)
        if held_back:
            # They get what the prefills cannot use.
            demanded = sum(self._want(record, demand) for record, demand in rows)
            last = len(rows) + self._limits.max_scheduled_tokens - demanded
            for record in held_back:
                if len(rows) < last:
                    admission.consider(record)
                else:
                    admission.defer(record, DeferralReason.ROWS)
        return admission.selection

    def _want(self, record: RequestRecord, demand: RowDemand) -> int:
        """Tokens that a row could use in this step."""
        if record.num_computed_tokens >= record.prompt_boundary:
            return 1
        return min(demand.length - demand.num_computed_tokens, self._longest_part)

    def _decode_share(self) -> int:
        """Decodes that may run beside a prefill: each takes one token of those that are not kept for prefills."""
        if not self._prefill_reserve:
            return UNBOUNDED
        return max(1, min(self._limits.max_scheduled_tokens - self._prefill_reserve, self._row_limit - 1))

    def _share_out(self, selection: Selection, plan: StepPlan) -> None:
        wants = [self._want(record, demand) for record, demand in selection.rows]
        counts = share_budget(wants, self._limits.max_scheduled_tokens)
        drafts = self._drafts(selection, self._limits.max_scheduled_tokens - sum(counts))
        offset = 0
        for (record, demand), count, guesses in zip(selection.rows, counts, drafts, strict=True):
            samples = demand.num_computed_tokens + count == demand.length
            prefill = record.num_computed_tokens < record.prompt_boundary
            if prefill:
                plan.prefill_tokens += count
            if guesses:
                plan.draft_tokens += len(guesses)
                count += len(guesses)
            demand.target = demand.num_computed_tokens + count
            plan.rows.append(PlannedRow(record, demand, count, offset, prefill, samples, guesses))
            offset += count
        plan.token_count = offset

    def _drafts(self, selection: Selection, tokens: int) -> list[tuple[int, ...]]:
        """Drafts that each row verifies."""
        if not any(record.drafts for record, _ in selection.rows):
            return [()] * len(selection.rows)
        cache, size = self._cache, self._limits.block_size
        wants = []
        for record, demand in selection.rows:
            table = cache.table(record.id)
            have = max(blocks_for(demand.length, size), 0 if table is None else table.count) * size
            room = cache.longest - demand.length
            usable = min(len(record.drafts), record.tokens_left, room, self._most_queries - 1)
            wants.append(DraftWant(usable, have - demand.length))
        shares = share_drafts(wants, tokens, selection.blocks_left, size)
        return [record.drafts[:count] for (record, _), count in zip(selection.rows, shares, strict=True)]
