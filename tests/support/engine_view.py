"""What tests see and change of an engine behind its public face. This file, and actor_view.py for the actor around it,
are the only ones of the tests that know private names; a test says so.

Ask first what everybody may: `engine.stats()`, `metrics`, `last_report`, `blocks_of`, `available_blocks`, a request's
own properties, events. What is given here is the engine's own, not a copy, unless said otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from llguidance import LLMatcher

from engine_actor.core.engine import Engine
from engine_actor.core.lifecycle import Lifecycle
from engine_actor.core.step import StepTransaction
from engine_actor.decoding.decoder import Decoder
from engine_actor.decoding.packing import StepPacker
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.block_table import BlockTable
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.paged_cache import PagedCache
from engine_actor.memory.prefix_index import IndexEntry, PrefixIndex
from engine_actor.memory.reservation import Reservation
from engine_actor.models.transformer import Transformer
from engine_actor.requests.events import EngineEvent, EventQueue
from engine_actor.requests.record import RequestRecord
from engine_actor.requests.request import Request
from engine_actor.requests.table import RequestTable
from engine_actor.sampling.grammar_cursor import Cursor
from engine_actor.scheduling.scheduler import Scheduler
from engine_actor.scheduling.step_plan import StepPlan

# Methods that work on one row or call, for tests that replace them and fail in the middle of a phase.
STAGE_ROW, ADD_EVENTS, PUBLISH_ROW = "_stage", "_add_events", "_publish"  # of StepTransaction
READ_ANSWER = "_advance"  # of Cursor


class EngineView:
    """The parts of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def cache(self) -> CacheManager:
        return self._engine._cache

    @property
    def lifecycle(self) -> Lifecycle:
        return self._engine._lifecycle

    @property
    def requests(self) -> RequestTable:
        return self._engine._lifecycle.requests

    @property
    def events(self) -> EventQueue:
        """Committed, and not drained yet."""
        return self._engine._events

    @property
    def decoder(self) -> Decoder:
        return self._engine._decoder

    @property
    def packer(self) -> StepPacker:
        return self._engine._packer

    @property
    def scheduler(self) -> Scheduler:
        return self._engine._scheduler

    def plan(self, transaction_id: int = 1) -> StepPlan:
        """The next step, which is not made."""
        return self._engine._scheduler.plan(transaction_id)

    def new_step(self) -> StepTransaction:
        """The next step, none of whose phases has begun."""
        return StepTransaction(self.plan(), self.lifecycle, self.decoder, self.packer)

    def limit(self, **limits: Any) -> None:
        """From now on steps are planned with these fields of EngineLimits, and the others as they were."""
        self._engine._scheduler = Scheduler(self.requests, self.cache, replace(self._engine.limits, **limits))

    def preempt(self, request: Request) -> None:
        self._engine._lifecycle.preempt(request._record)


def view(engine: Engine) -> EngineView:
    return EngineView(engine)


def record_of(request: Request) -> RequestRecord:
    return request._record


def turns_of(requests: RequestTable) -> dict[int, RequestRecord]:
    """All that run or wait, by request id."""
    return requests._turns


def queue_of(events: EventQueue) -> deque[EngineEvent]:
    return events._events


def queue_after(step: StepTransaction) -> deque[EngineEvent]:
    """The events that wait once the step is published."""
    return step._queue_after


def table_matrix(packer: StepPacker) -> np.ndarray:
    """int32 [rows, columns]: the block tables as the last step mirrored them."""
    return packer._mirror._matrix


# -- memory -----------------------------------------------------------------------------------------------------------


def tables_of(cache: PagedCache) -> dict[int, BlockTable]:
    """By request id, those of the step in flight included."""
    return cache._tables


def reservation_of(cache: PagedCache) -> Reservation | None:
    """That of the step in flight."""
    return cache._live


def owners_of(pool: BlockPool) -> list[int]:
    """How many own each id, the prefix index apart."""
    return pool._owners


def free_list(pool: BlockPool) -> deque[int] | list[int]:
    return pool._heap if pool.order == "lowest" else pool._free


class WatchedList(list[int]):
    """Notes which places are looked at; whoever goes through all of them fails."""

    def __init__(self, values: Iterable[int]) -> None:
        super().__init__(values)
        self.places: list[Any] = []

    def __getitem__(self, place: Any) -> Any:
        self.places.append(place)
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("went through all ids of the pool")


class WatchedDeque(deque[int]):
    """Ends only: whoever goes through it, or looks into its middle, fails."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("went through all free ids of the pool")

    def __getitem__(self, place: Any) -> Any:
        raise AssertionError("looked into the middle of the free ids")


def watch_owners(pool: BlockPool) -> WatchedList:
    """Of a pool that issues the id that has been free for longest."""
    pool._owners = watched = WatchedList(pool._owners)
    pool._free = WatchedDeque(pool._free)
    return watched


def idle_blocks(pool: BlockPool) -> list[int]:
    """A copy; the one that goes next comes first."""
    return list(pool._idle)


def entries_of(index: PrefixIndex) -> dict[int, IndexEntry]:
    """By block."""
    return index._by_block


# -- models and grammars ----------------------------------------------------------------------------------------------


def model_of(decoder: TorchDecoder) -> Transformer:
    return decoder._model


def sharing_weights(decoder: TorchDecoder) -> TorchDecoder:
    """Another decoder, without pools yet, over the same weights."""
    return TorchDecoder(decoder._model, decoder._device, decoder._dtype)


def matcher_of(cursor: Cursor) -> tuple[LLMatcher, np.ndarray]:
    """The library's part of a cursor, and the uint8 [bytes] that it writes masks into."""
    return cursor._matcher, cursor._bits
