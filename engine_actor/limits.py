"""What an operator chooses for one engine: the limits of its steps, its memory and its order. How large the pools are
comes from the memory that there is (`memory/layout.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine_actor.errors import InvalidOption
from engine_actor.options import UNBOUNDED, require_integer, require_number


class Numerics(StrEnum):
    """How much a token may depend on its company.

    `EXACT`: a token is the same alone, in any batch, for any chunking, on a hit or a miss and after a replay, bit
    for bit; needs a decoder that declares `row_invariant`. `FAST`: near ties may fall either way. `AUTO`: exact where
    the decoder declares it and a probe at the start finds it so (`core/exactness.py`), else fast.
    """

    AUTO = "auto"
    EXACT = "exact"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class FairnessBounds:
    """How long the plain order of a step may leave somebody out. `FairnessBounds.off()` is that order alone.

    max_passed_over     steps a runnable row may be left out for want of rows or tokens before it goes first
    min_prefill_share   share of the token budget kept for prefills while one waits, in [0, 1)
    max_overtakes       requests that may be admitted past a waiting prompt that lacks memory
    """

    max_passed_over: int = 8
    min_prefill_share: float = 0.25
    max_overtakes: int = 32

    def __post_init__(self) -> None:
        require_integer("fairness.max_passed_over", self.max_passed_over, 1)
        require_number("fairness.min_prefill_share", self.min_prefill_share, 0.0, 0.9)
        require_integer("fairness.max_overtakes", self.max_overtakes, 0)

    @staticmethod
    def off() -> FairnessBounds:
        return FairnessBounds(UNBOUNDED, 0.0, UNBOUNDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Frozen and checked: a value that cannot be used raises InvalidOption with its name.

    block_size            token positions in a block
    max_batch_size        rows in one step
    max_scheduled_tokens  tokens in one step (F003)
    chunk_size            longest part of a prompt in one step; 0: only the token budget bounds it (F092)
    preemption            when only running rows are left and none can grow, recompute one of them later
    max_preemptions       times one request is preempted before others are chosen first
    prefix_reuse          share full blocks of equal prefixes between the requests of one cache scope
    graph_capture         step graphs are captured for a fixed table width: see `PoolLayout.max_columns`
    first_block_id        0 or 1: whether block 0 is issued, or kept as the null block (C01)
    block_order           "fifo" issues the block that has been free for longest, "lowest" the smallest id (C02)
    """

    block_size: int = 16
    max_batch_size: int = 32
    max_scheduled_tokens: int = 2048
    chunk_size: int = 0
    numerics: Numerics = Numerics.AUTO
    preemption: bool = True
    max_preemptions: int = 4
    prefix_reuse: bool = True
    graph_capture: bool = False
    fairness: FairnessBounds = field(default_factory=FairnessBounds)
    first_block_id: int = 1
    block_order: str = "fifo"

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_size", "max_scheduled_tokens"):
            require_integer(name, getattr(self, name), 1)
        require_integer("chunk_size", self.chunk_size, 0)
        require_integer("max_preemptions", self.max_preemptions, 0)
        require_integer("first_block_id", self.first_block_id, 0, 1)
        if self.block_order not in ("fifo", "lowest"):
            raise InvalidOption("block_order", self.block_order, "'fifo' or 'lowest'")
