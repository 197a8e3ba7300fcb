"""How a step ended (F169), why work was put off (F120), and the engine's counters (F168)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class StepOutcome(StrEnum):
    NO_WORK = "no_work"
    CAPACITY_DEFERRED = "capacity_deferred"
    UNSERVICEABLE_REQUEST = "unserviceable_request"
    COMMITTED = "committed"
    RETRYABLE_BATCH_ABORT = "retryable_batch_abort"
    EXECUTION_CAPACITY_EXCEEDED = "execution_capacity_exceeded"
    EXECUTION_CONTRACT_FAILURE = "execution_contract_failure"
    FATAL_EXECUTION_FAILURE = "fatal_execution_failure"


class DeferralReason(StrEnum):
    """What a request waits for."""

    ROWS = "rows"  # the step is full: max_batch_size, or max_scheduled_tokens
    RESIDENTS = "residents"  # max_residents requests own memory already
    BLOCKS = "blocks"  # free blocks
    STATES = "states"  # a free state slot
    WINDOWS = "windows"  # a free window ring
    TURN = "turn"  # an overtaken prompt goes first


@dataclass(frozen=True, slots=True)
class Deferral:
    """One request that could run later. `missing_blocks` and `missing_slots` say what has to be given back first."""

    request_id: int
    reason: DeferralReason
    missing_blocks: int = 0
    missing_slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What the last transaction did; drives eviction of dormant sessions and every metric of a step."""

    transaction_id: int
    outcome: StepOutcome
    deferrals: tuple[Deferral, ...] = ()
    rows: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    decoder_seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(slots=True)
class StepMetrics:
    """Events counted since the start. They describe history, so they are counted, not derived."""

    committed_steps: int = 0
    capacity_deferrals: int = 0
    reservation_failures: int = 0
    rollbacks: int = 0
    retryable_aborts: int = 0
    capacity_aborts: int = 0
    post_processing_aborts: int = 0
    fatal_execution_failures: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    adopted_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
