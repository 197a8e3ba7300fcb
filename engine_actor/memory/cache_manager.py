"""All memory of the engine behind one door: paged blocks, the prefix index that shares them, state slots, window rings.

The scheduler asks what fits, the engine reserves and publishes, the request's life removes and rewinds. Order of
giving up memory: idle blocks of the index here, dormant sessions by whoever owns them, then preemption by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.block_table import BlockTable, blocks_for
from engine_actor.memory.fixed_state import FixedStates
from engine_actor.memory.layout import PoolLayout
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.memory.prefix_index import NO_MATCH, PrefixIndex, PrefixMatch
from engine_actor.memory.reservation import RowDemand
from engine_actor.memory.step_reservation import StepReservation
from engine_actor.memory.window_ring import WindowRings, ring_blocks


@dataclass(frozen=True, slots=True)
class CacheStats:
    """usable = free + idle + owned blocks; `residents` hold tables."""

    usable: int
    free: int
    idle: int
    residents: int


class CacheManager:
    """num_blocks usable blocks of block_size positions; at most max_residents tables, of max_columns blocks each.
    state_slots: usable slots for fixed states; 0: the model has none. window, query_cap: of layers that see the last
    `window` positions, in steps of at most `query_cap` tokens a row; 0: no such layers. With either nothing is shared
    by prefix: a hit would need the state, or the window, at its end."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_residents: int,
        *,
        first_block_id: int = 1,
        block_order: str = "fifo",
        prefix_reuse: bool = True,
        max_columns: int | None = None,
        state_slots: int = 0,
        window: int = 0,
        query_cap: int = 0,
        rings: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_residents = max_residents
        self.max_columns = max_columns
        self.pool = BlockPool(num_blocks + first_block_id, first_block_id, block_order)
        self.states = FixedStates(BlockPool(state_slots + 1, 1, block_order)) if state_slots else None
        self.windows: WindowRings | None = None
        if window:
            # One ring for each resident, unless said otherwise.
            blocks = (max_residents if rings is None else rings) * ring_blocks(query_cap, window, block_size)
            ring_pool = BlockPool(blocks + first_block_id, first_block_id, block_order)
            self.windows = WindowRings(ring_pool, window, query_cap, block_size)
        shares = prefix_reuse and self.states is None and self.windows is None
        self.index = PrefixIndex(self.pool, block_size) if shares else None
        make_room = (lambda _: None) if self.index is None else self.index.make_room
        self.paged = PagedCache(self.pool, block_size, make_room)

    @staticmethod
    def of_layout(pools: PoolLayout, *, block_order: str, prefix_reuse: bool) -> CacheManager:
        return CacheManager(
            pools.num_blocks,
            pools.block_size,
            pools.max_residents,
            first_block_id=pools.first_block_id,
            block_order=block_order,
            prefix_reuse=prefix_reuse,
            max_columns=pools.max_columns,
            state_slots=pools.state_slots,
            window=pools.window,
            query_cap=pools.query_cap,
        )

    # -- questions of the planner, which change nothing -------------------------------------------------------------

    def table(self, request_id: int) -> BlockTable | None:
        return self.paged.table(request_id)

    def match(self, salt: bytes, tokens: Sequence[int], earlier: PrefixMatch | None = None) -> PrefixMatch:
        """Shared blocks that a new request of these tokens can adopt; `earlier` as in PrefixIndex.match."""
        return NO_MATCH if self.index is None else self.index.match(salt, tokens, earlier)

    @property
    def longest(self) -> int:
        """Positions that the empty pool and the widest table hold; a longer sequence can never be served (F113)."""
        blocks = self.pool.usable if self.max_columns is None else min(self.pool.usable, self.max_columns)
        return blocks * self.block_size

    def why_never(self, positions: int) -> str:
        """What a sequence longer than `longest` has too much of, in words."""
        need = blocks_for(positions, self.block_size)
        if need <= self.pool.usable:
            return f"{positions} tokens need {need} table columns, a captured graph has {self.max_columns}"
        return f"{positions} tokens need {need} blocks, the pool has {self.pool.usable}"

    def cost_of_new(self, length: int, adopted: Sequence[int]) -> int:
        """How far `available` falls if this row is reserved: blocks to issue, and idle ones that it adopts."""
        idle = sum(self.pool.is_idle(block) for block in adopted)
        return blocks_for(length, self.block_size) - len(adopted) + idle

    @property
    def available(self) -> int:
        return self.pool.available

    @property
    def available_slots(self) -> int | None:
        """State slots that a step could take; None where the model has no state."""
        return None if self.states is None else self.states.available

    @property
    def available_rings(self) -> int | None:
        """New requests that a step could give a window ring; None where the model has no windows."""
        return None if self.windows is None else self.windows.available

    @property
    def resident_count(self) -> int:
        return self.paged.resident_count

    def stats(self) -> CacheStats:
        pool = self.pool
        return CacheStats(pool.usable, pool.free_count, pool.idle_count, self.resident_count)

    def is_committed_row(self, request_id: int, position: int, *, windowed: bool = False) -> bool:
        """As PagedCache.is_committed_row; in a windowed layer also that the ring still has the position."""
        if windowed and (self.windows is None or not self.windows.keeps(request_id, position)):
            return False
        return self.paged.is_committed_row(request_id, position)

    # -- changes ------------------------------------------------------------------------------------------------------

    def reserve(self, demands: Sequence[RowDemand]) -> StepReservation:
        """Takes all memory of a step, or raises and changes nothing."""
        with ExitStack() as undo:
            paged = self.paged.reserve(demands)
            undo.callback(paged.release)
            states = None if self.states is None else self.states.reserve(demands)
            if states is not None:
                undo.callback(states.release)
            windows = None if self.windows is None else self.windows.reserve(demands)
            undo.pop_all()
        return StepReservation(paged, states, windows)

    def index_full_blocks(self, request_id: int, salt: bytes, tokens: Sequence[int], before: int) -> None:
        """Offers the blocks that became full since `before` positions were valid to the prefix index."""
        table = self.paged.table(request_id)
        if self.index is None or table is None:
            return
        first, full = before // self.block_size, table.num_computed_tokens // self.block_size
        if full > first:
            last = full * self.block_size - 1
            assert self.is_committed_row(request_id, last), f"position {last} of request {request_id} is not valid"
            table.indexed = self.index.insert(salt, tokens, table.blocks[:full], first, table.indexed)

    def owns_memory(self, request_id: int) -> bool:
        """A resident owns some of every kind; after a step that could not be undone in whole, a request may own only
        what that step failed to give back."""
        return any(kind.owns(request_id) for kind in self._kinds())

    def remove(self, request_id: int) -> None:
        """Releases what a request owns, of every kind (F176)."""
        assert self.owns_memory(request_id)
        for kind in self._kinds():
            if kind.owns(request_id):
                kind.remove(request_id)

    def _kinds(self) -> list[PagedCache | FixedStates | WindowRings]:
        return [kind for kind in (self.paged, self.states, self.windows) if kind is not None]

    def truncate(self, request_id: int, positions: int) -> int:
        """Keeps at most `positions` valid positions and returns how many stay valid. Of a model with a state that is
        all of them or, since there is no state at an earlier position, none: the request is then no resident. So it is
        of one with windows where a ring has moved on past what is seen from there."""
        if self.states is None:
            length = self.paged.truncate(request_id, positions)
            if self.windows is not None and not self.windows.holds(request_id, length):
                self.remove(request_id)
                return 0
            return length
        table = self.paged.table(request_id)
        assert table is not None
        if positions >= table.num_computed_tokens:
            return table.num_computed_tokens
        self.remove(request_id)
        return 0

    def fork(self, parent_id: int, child_id: int, positions: int) -> int:
        """The child shares the parent's first `positions`, as far as that is possible; returns how many are valid for
        it. A model with a state shares all that the parent has or nothing (0: the child is no resident), one with
        windows nothing."""
        if self.windows is not None:
            return 0
        if self.states is not None:
            table = self.paged.table(parent_id)
            assert table is not None
            if positions != table.num_computed_tokens:
                return 0
            self.states.fork(parent_id, child_id)
        return self.paged.fork(parent_id, child_id, positions)

    def check_integrity(self) -> None:
        self.paged.check_integrity()
        if self.states is not None:
            self.states.check_integrity()
            paged = {name: table.num_computed_tokens for name, table in self.paged.tables()}
            if paged != self.states.owners():
                raise ContractViolation(f"blocks are valid up to {paged}, states up to {self.states.owners()}")
        if self.windows is not None:
            self.windows.check_integrity()
            residents = set(self.paged.residents())
            if residents != self.windows.owners():
                raise ContractViolation(f"{sorted(residents)} own blocks, {sorted(self.windows.owners())} own rings")
        if self.index is not None:
            self.index.check_integrity()
