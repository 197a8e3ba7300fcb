"""Which candidates fit into one step, taken in order: rows, residents and blocks are counted down as each is selected.

A candidate that does not fit is passed, and later ones are still considered (F108). It is *deferred* if it could fit
once others give something back, *unserviceable* if not even an empty pool could hold its whole sequence (F113, F114).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.reservation import RowDemand
from engine_actor.outcomes import Deferral, DeferralReason
from engine_actor.request import RequestRecord


@dataclass(slots=True)
class Selection:
    """`rows` carry one provisional token each (F088); the budget is shared out later."""

    rows: list[tuple[RequestRecord, RowDemand]] = field(default_factory=list)
    deferrals: list[Deferral] = field(default_factory=list)
    unserviceable: list[RequestRecord] = field(default_factory=list)


class Admission:
    """One pass over candidates; `running` residents are executable. Reads the cache, changes nothing in it."""

    def __init__(self, cache: CacheManager, row_limit: int, max_overtakes: int, running: int) -> None:
        self._cache = cache
        self._rows_left = row_limit
        self._residents_left = cache.max_residents - cache.resident_count
        self._blocks_left = cache.available
        self._max_overtakes = max_overtakes
        self._running = running
        self._closed_to_new = False
        self.selection = Selection()

    def consider(self, record: RequestRecord) -> None:
        demand = self._demand(record)
        if self._cache.never_fits(demand.whole):
            self.selection.unserviceable.append(record)
            return
        deferral = self._obstacle(record, demand)
        if deferral is not None:
            self.selection.deferrals.append(deferral)
            return
        self.selection.rows.append((record, demand))
        self._rows_left -= 1
        self._blocks_left -= self._cost(demand)
        self._residents_left -= demand.new

    def defer(self, record: RequestRecord, reason: DeferralReason) -> None:
        self.selection.deferrals.append(Deferral(record.id, reason))

    def _obstacle(self, record: RequestRecord, demand: RowDemand) -> Deferral | None:
        if demand.new and self._closed_to_new:
            return Deferral(record.id, DeferralReason.TURN)
        if self._rows_left < 1:
            return Deferral(record.id, DeferralReason.ROWS)
        if demand.new and self._residents_left < 1:
            return Deferral(record.id, DeferralReason.RESIDENTS, missing_slots=1)
        # A preempted request comes back only where the running ones can grow beside it, else it would be preempted
        # again at once; the more often it happened, the more room is asked for.
        headroom = record.preemptions * self._running if demand.new else 0
        missing = self._cost(demand) + headroom - self._blocks_left
        if missing > 0:
            if demand.new and record.overtaken >= self._max_overtakes:
                # It has been passed often enough: what is freed from now on is kept for it.
                self._closed_to_new = True
            return Deferral(record.id, DeferralReason.BLOCKS, missing_blocks=missing)
        return None

    def _cost(self, demand: RowDemand) -> int:
        return self._cache.cost(demand)

    def _demand(self, record: RequestRecord) -> RowDemand:
        whole = record.history.length
        if self._cache.table(record.id) is not None:
            return RowDemand(record.id, False, record.processed, record.processed + 1, whole)
        adopted = self._match(record)
        start = len(adopted) * self._cache.block_size
        return RowDemand(record.id, True, start, start + 1, whole, adopted)

    def _match(self, record: RequestRecord) -> tuple[int, ...]:
        """The shared prefix, looked up again only when the index or the sequence has changed."""
        index = self._cache.index
        if index is None:
            return ()
        cached = record.match_cache
        if cached is None or cached[:2] != (index.generation, record.history.length):
            tokens = record.history.ids[: record.history.length]
            cached = (index.generation, record.history.length, self._cache.match(record.options.salt, tokens))
            record.match_cache = cached
        return cached[2]
