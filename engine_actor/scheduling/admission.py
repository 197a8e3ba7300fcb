"""Which candidates fit into one step, taken in order: rows, residents and blocks are counted down as each is selected.

A candidate that does not fit is passed, and later ones are still considered (F108). It is *deferred* if it could fit
once others give something back, *unserviceable* if not even an empty pool could hold its whole sequence (F113, F114).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.reservation import RowDemand
from engine_actor.options import UNBOUNDED
from engine_actor.requests.outcomes import Deferral, DeferralReason
from engine_actor.requests.record import RequestRecord


@dataclass(slots=True)
class Selection:
    """`rows` carry one provisional token each (F088); the budget is shared out later. `blocks_left` could be taken
    beside all of them."""

    rows: list[tuple[RequestRecord, RowDemand]] = field(default_factory=list)
    deferrals: list[Deferral] = field(default_factory=list)
    unserviceable: list[RequestRecord] = field(default_factory=list)
    blocks_left: int = 0


class Admission:
    """One pass over candidates; `running` residents are executable. Reads the cache, changes nothing in it."""

    def __init__(self, cache: CacheManager, row_limit: int, max_overtakes: int, running: int) -> None:
        self._cache = cache
        self._table, self._growth = cache.paged.table, cache.paged.growth
        self._longest = cache.longest
        self._rows_left = row_limit
        self._residents_left = cache.max_residents - cache.resident_count
        slots, rings = cache.available_slots, cache.available_rings
        self._slots_left = UNBOUNDED if slots is None else slots
        self._rings_left = UNBOUNDED if rings is None else rings
        self._max_overtakes = max_overtakes
        self._overtakes_left = UNBOUNDED  # the fewest that a blocked candidate met so far has left
        self._running = running
        self.selection = Selection(blocks_left=cache.available)

    def consider(self, record: RequestRecord) -> None:
        table = self._table(record.id)
        length = record.history.length
        if length > self._longest:
            self.selection.unserviceable.append(record)
        elif table is None and self._overtakes_left < 1:
            self.defer(record, DeferralReason.TURN)
        elif self._rows_left < 1:
            self.defer(record, DeferralReason.ROWS)
        elif self._slots_left < 1:
            self.defer(record, DeferralReason.STATES)
        elif table is None:
            self._consider_new(record, length)
        else:
            cost = self._growth(table, length)
            if cost > self.selection.blocks_left:
                self._block(record, cost)
            else:
                self._take(record, _demand(record, record.num_computed_tokens, length), cost)

    def defer(self, record: RequestRecord, reason: DeferralReason) -> None:
        self.selection.deferrals.append(Deferral(record.id, reason))

    def _consider_new(self, record: RequestRecord, length: int) -> None:
        if self._residents_left < 1:
            self.selection.deferrals.append(Deferral(record.id, DeferralReason.RESIDENTS, missing_slots=1))
            return
        if self._rings_left < 1:
            self.defer(record, DeferralReason.WINDOWS)
            return
        adopted = self._match(record)
        cost = self._cache.cost_of_new(length, adopted)
        # A preempted request comes back only where the running ones can grow beside it, else it would be preempted
        # again at once; the more often it happened, the more room is asked for.
        headroom = record.preemptions * self._running
        if cost + headroom > self.selection.blocks_left:
            self._block(record, cost + headroom)
            return
        start = len(adopted) * self._cache.block_size
        self._take(record, _demand(record, start, length, adopted, new=True), cost)
        self._residents_left -= 1
        self._rings_left -= 1
        self._overtakes_left -= 1

    def _take(self, record: RequestRecord, demand: RowDemand, cost: int) -> None:
        self.selection.rows.append((record, demand))
        self._rows_left -= 1
        self._slots_left -= 1
        self.selection.blocks_left -= cost

    def _block(self, record: RequestRecord, blocks: int) -> None:
        """Once it has been overtaken often enough, what is freed is kept for it. Newer requests that this step took
        before it came to this one count too: a preempted one stands before older ones that wait."""
        just_now = sum(demand.new and selected.submitted > record.submitted for selected, demand in self.selection.rows)
        self._overtakes_left = min(self._overtakes_left, self._max_overtakes - record.overtaken - just_now)
        missing = blocks - self.selection.blocks_left
        self.selection.deferrals.append(Deferral(record.id, DeferralReason.BLOCKS, missing_blocks=missing))

    def _match(self, record: RequestRecord) -> tuple[int, ...]:
        """The shared prefix, looked up again only when the index or the sequence has changed."""
        index, history = self._cache.index, record.history
        if index is None:
            return ()
        cached = record.match_cache
        if cached is None or cached[0] != index.generation or cached[1] != history.length:
            earlier = cached[2] if cached is not None and cached[1] == history.length else None
            cached = (index.generation, history.length, self._cache.match(record.options.salt, history.ids, earlier))
            record.match_cache = cached
        return cached[2].blocks


def _demand(
    record: RequestRecord, computed: int, length: int, adopted: tuple[int, ...] = (), *, new: bool = False
) -> RowDemand:
    """Of one provisional token (F088)."""
    return RowDemand(
        request_id=record.id,
        new=new,
        num_computed_tokens=computed,
        target=computed + 1,
        length=length,
        adopted=adopted,
    )
