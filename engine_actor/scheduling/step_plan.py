"""The work of one step, as decided by the scheduler and not yet begun.

Three orders meet in a step (C14): the plan's order is the rank, in which events are published; rows are packed in the
same order; every other order, such as that of wanted logits, goes through an index stored here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_actor.errors import ContractViolation
from engine_actor.memory.reservation import RowDemand
from engine_actor.requests.outcomes import Deferral, StepOutcome
from engine_actor.requests.record import RequestRecord


@dataclass(slots=True)
class PlannedRow:
    """One request's part: the next `count` tokens after `demand.num_computed_tokens` positions.

    offset       of its first token among the step's packed tokens (F093)
    prefill      its tokens are input, not the last sampled token
    samples      its last token is the last of the sequence, so its logits choose the next one
    drafts       guesses that follow the sequence's last token and are verified by this step; part of `count`
    """

    record: RequestRecord
    demand: RowDemand
    count: int
    offset: int
    prefill: bool
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def logits_rows(self) -> range:
        """Packed tokens whose logits are wanted: the last of the sequence, and each draft (F297)."""
        end = self.offset + self.count
        return range(end - 1 - len(self.drafts), end)


@dataclass(slots=True)
class StepPlan:
    """outcome is COMMITTED for a plan that can be executed, else why not. token_count is that of all rows; of these are
    prefill_tokens input, and draft_tokens guesses."""

    transaction_id: int
    outcome: StepOutcome
    rows: list[PlannedRow] = field(default_factory=list)
    deferrals: list[Deferral] = field(default_factory=list)
    unserviceable: list[RequestRecord] = field(default_factory=list)
    token_count: int = 0
    prefill_tokens: int = 0
    draft_tokens: int = 0

    @property
    def executable(self) -> bool:
        return bool(self.rows)

    def check(self) -> None:
        """Raises ContractViolation unless each row sends a non-empty head of what its request has not computed yet,
        once, and lies where the row before it ends (F095). Linear."""
        if len({row.record.id for row in self.rows}) != len(self.rows):
            raise ContractViolation(f"a request is twice in one step: {[row.record.id for row in self.rows]}")
        offset = 0
        for row in self.rows:
            record, demand, count = row.record, row.demand, row.count
            remaining = record.history.length - demand.num_computed_tokens
            if not record.has_turn:
                raise ContractViolation(f"request {record.id} is {record.status.value} and cannot run")
            if row.drafts:
                remaining += len(row.drafts)
                if row.prefill or count != remaining:
                    raise ContractViolation(f"request {record.id}: drafts do not follow the end of its sequence")
            if not 1 <= count <= remaining or demand.target != demand.num_computed_tokens + count:
                raise ContractViolation(f"request {record.id}: {count} tokens planned, {remaining} remain")
            if row.offset != offset:
                raise ContractViolation(f"request {record.id}: its tokens start at {row.offset}, not at {offset}")
            offset += count
        if offset != self.token_count:
            raise ContractViolation(f"{self.token_count} tokens planned, the rows have {offset}")

    @property
    def graph_capture_eligible(self) -> bool:
        """A pure decode step of one token each (F097)."""
        return bool(self.rows) and not any(row.prefill or row.drafts for row in self.rows)
