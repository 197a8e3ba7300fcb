"""An engine over the synthetic model, opened up for tests that look into its scheduler and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_actor.limits import FairnessBounds
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.memory.reservation import Reservation, RowDemand
from engine_actor.options import RequestOptions, TurnOptions
from engine_actor.requests.events import EngineEvent
from engine_actor.requests.record import RequestRecord
from engine_actor.requests.request import Request
from engine_actor.scheduling.step_plan import StepPlan
from tests.support.doubles import SyntheticDecoder
from tests.support.engine_view import idle_blocks, owners_of, record_of, tables_of, view
from tests.support.engines import engine_of

# Order policies of the documents (C01, C02), for tests that name block ids.
LOWEST: dict[str, Any] = {"block_order": "lowest", "first_block_id": 0}
FIFO: dict[str, Any] = {"block_order": "fifo", "first_block_id": 1}


def row_of(
    request_id: int, new: bool, computed: int, target: int, length: int, adopted: tuple[int, ...] = ()
) -> RowDemand:
    """A row's demand, in the order in which the tests write it down."""
    return RowDemand(
        request_id=request_id, new=new, num_computed_tokens=computed, target=target, length=length, adopted=adopted
    )


def demand(
    cache: PagedCache, request_id: int, target: int, length: int | None = None, adopted: tuple[int, ...] = ()
) -> RowDemand:
    """A row for `target` positions, new or resident as the cache knows it."""
    table = cache.table(request_id)
    committed = len(adopted) * cache.block_size if table is None else table.num_computed_tokens
    return row_of(request_id, table is None, committed, target, target if length is None else length, adopted)


def advance(cache: PagedCache, *demands: RowDemand) -> Reservation:
    """A whole step over bare memory: reserve, validate, commit."""
    reservation = cache.reserve(demands)
    boundaries = [row.target for row in demands]
    reservation.validate(boundaries)
    reservation.commit(boundaries)
    cache.check_integrity()
    return reservation


class OpenedEngine:
    """Without fairness bounds and prefix reuse unless the configuration asks for them."""

    def __init__(self, decoder: SyntheticDecoder | None = None, **config: Any) -> None:
        defaults: dict[str, Any] = {
            "num_blocks": 128,
            "block_size": 4,
            "max_batch_size": 8,
            "max_length": 128,
            "prefix_reuse": False,
            "fairness": FairnessBounds.off(),
        }
        self.decoder = decoder or SyntheticDecoder()
        self.engine = engine_of(self.decoder, **(defaults | config))
        self.cache = view(self.engine).cache
        self.pool = self.cache.pool
        self.requests: list[Request] = []  # handles: a request without one is abandoned
        self.tokens: dict[int, list[int]] = {}  # by request id, of all turns
        self.events: list[EngineEvent] = []

    def add(self, tokens: Sequence[int], *, salt: bytes = b"", **turn: Any) -> Request:
        request = self.engine.create_request(RequestOptions(salt=salt))
        request.begin_turn(tokens, TurnOptions(**turn))
        self.requests.append(request)
        return request

    def plan(self) -> StepPlan:
        return view(self.engine).plan()

    def step(self) -> list[EngineEvent]:
        """One transaction and all of its events."""
        events = list(self.engine.run(1000))
        self.engine.check_integrity()
        for event in events:
            self.events.append(event)
            if event.token is not None:
                assert event.request_id is not None
                self.tokens.setdefault(event.request_id, []).append(event.token)
        return events

    def run_out(self, limit: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(limit):
            if not self.engine.has_pending_requests():
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def resident(self, tokens: Sequence[int], **turn: Any) -> Request:
        """A request whose first step is done."""
        request = self.add(tokens, **turn)
        self.step()
        return request

    def dormant(self, tokens: Sequence[int], generated: int = 1) -> Request:
        """A resident whose turn is complete; the last token generated is not in the cache yet."""
        request = self.add(tokens, max_generated_tokens=generated)
        while request.finish_reason is None:
            self.step()
        return request

    def record(self, request: Request) -> RequestRecord:
        return record_of(request)

    def blocks(self, request: Request) -> list[int]:
        table = self.cache.table(request.id)
        return [] if table is None else list(table.blocks)

    def counts(self) -> list[tuple[int, int]]:
        """(request id, planned tokens) of the next plan, in its order."""
        return [(row.record.id, row.count) for row in self.plan().rows]

    def fingerprint(self) -> object:
        """All that planning could change: statuses, tables, owners, the order of the free list, counters."""
        records = view(self.engine).requests.records.values()
        return (
            [
                (r.id, r.status, r.num_computed_tokens, tuple(r.history.ids), r.passed_over, r.overtaken)
                for r in records
            ],
            list(view(self.engine).requests.queue),
            [
                (i, list(t.blocks), t.count, t.num_computed_tokens, t.epoch)
                for i, t in tables_of(self.cache.paged).items()
            ],
            self.pool.free_ids(),
            list(owners_of(self.pool)),
            [self.pool.is_indexed(block) for block in range(self.pool.num_ids)],
            idle_blocks(self.pool),
            self.pool.generation,
            len(view(self.engine).events),
        )
