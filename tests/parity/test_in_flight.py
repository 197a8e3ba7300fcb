"""What is in flight, and which rows are valid: F350 to F362 as far as one step at a time has them.

The documents keep two steps in flight and count what each has started. This engine has one: the positions in flight are
those of its live reservation. So tests below say what takes the place of those counters and of a deferred release."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_actor.errors import ContractViolation, InvalidCall, StaleView
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.requests.record import RequestStatus
from engine_actor.sampling.batched_sampler import BatchedSampler
from tests.support.doubles import ForcedDecoder, SyntheticDecoder, build_engine, solo
from tests.support.engine_room import OpenedEngine, row_of
from tests.support.engine_view import reservation_of, view

X, Y = 1, 2


def committed(cache: CacheManager, request: int, positions: range, windowed: bool = False) -> list[int]:
    return [p for p in positions if cache.is_committed_row(request, p, windowed=windowed)]


# -- which rows are valid ---------------------------------------------------------------------------------------------


@pytest.mark.parity("F354", "F353", scenario="FK-11")
def test_a_row_needs_an_owner_and_a_committed_position() -> None:
    cache = CacheManager(8, 4, 4)
    cache.reserve([row_of(X, True, 0, 10, 12)]).commit([10])
    assert committed(cache, X, range(-1, 13)) == list(range(10))  # not the position equal to the length, owned as it is
    assert committed(cache, Y, range(12)) == []
    table = cache.table(X)
    assert table is not None
    cache.pool.free([table.blocks[1]])
    assert committed(cache, X, range(10)) == [0, 1, 2, 3, 8, 9]
    with pytest.raises(ContractViolation, match="has 0 owners, its holders say 1"):
        cache.check_integrity()
    other = CacheManager(8, 4, 4)
    other.reserve([row_of(X, True, 0, 10, 10)]).commit([10])
    other.remove(X)
    assert committed(other, X, range(10)) == []


@pytest.mark.parity("F354", "F349", scenario="FK-11")
def test_a_row_is_not_valid_before_the_copy_that_fills_it_is_made() -> None:
    cache = CacheManager(8, 4, 4)
    cache.reserve([row_of(X, True, 0, 10, 10)]).commit([10])
    cache.fork(X, Y, 10)
    assert committed(cache, Y, range(12)) == list(range(10))  # read where the parent has them
    reservation = cache.reserve([row_of(Y, False, 10, 11, 11)])
    assert reservation.copies
    assert committed(cache, Y, range(12)) == list(range(8))
    assert committed(cache, X, range(12)) == list(range(10))
    reservation.commit([11])
    assert committed(cache, Y, range(12)) == list(range(11))


@pytest.mark.parity("F354", scenario="FK-11")
def test_a_row_that_a_later_position_replaced_in_its_ring_is_not_valid() -> None:
    cache = CacheManager(8, 4, 4, window=5, query_cap=4)
    assert cache.windows is not None and cache.windows.ring_size == 2
    cache.reserve([row_of(X, True, 0, 4, 12)]).commit([4])
    cache.reserve([row_of(X, False, 4, 8, 12)]).commit([8])
    assert committed(cache, X, range(12), windowed=True) == list(range(8))
    reservation = cache.reserve([row_of(X, False, 8, 11, 12)])
    # The step may write at once: p + R * B takes the place of p. Full layers lose nothing.
    assert committed(cache, X, range(12), windowed=True) == [3, 4, 5, 6, 7]
    assert committed(cache, X, range(12)) == list(range(8))
    reservation.release()
    assert committed(cache, X, range(12), windowed=True) == [3, 4, 5, 6, 7]
    assert committed(CacheManager(8, 4, 4), X, range(3), windowed=True) == []


@pytest.mark.parity("F354")
def test_only_valid_rows_are_offered_to_the_prefix_index() -> None:
    cache = CacheManager(8, 4, 4)
    cache.reserve([row_of(X, True, 0, 8, 8)]).commit([8])
    table = cache.table(X)
    assert table is not None
    cache.pool.free([table.blocks[1]])
    with pytest.raises(AssertionError, match="position 7 of request 1 is not valid"):
        cache.index_full_blocks(X, b"", [5] * 8, 0)


# -- one step in flight -----------------------------------------------------------------------------------------------


@pytest.mark.parity("F355", "F052", scenario="DP-12")
def test_keys_of_a_step_go_beyond_the_committed_prefix() -> None:
    """50 positions and four queries: 54 keys while the step runs, and 50 valid ones."""
    room = OpenedEngine(ForcedDecoder([5, 8, 9, 10, 12], drafts=8))
    request = room.resident([4] * 50)
    request.set_draft_tokens([8, 9, 10])
    forward, seen = room.decoder.forward, []

    def watch(step: Any) -> Any:
        table = room.cache.table(request.id)
        assert table is not None
        seen.append((step.attention_metadata.tolist(), table.num_computed_tokens, request.num_computed_tokens))
        assert committed(room.cache, request.id, range(60)) == list(range(50))
        return forward(step)

    room.decoder.forward = watch  # type: ignore[method-assign]
    room.step()
    assert seen == [([4, 54, 54], 50, 50)]
    assert request.num_computed_tokens == 54


@pytest.mark.parity("F151", scenario="DP-09")
@pytest.mark.parity("F362", stand_in="one step is in flight: a second start is refused instead of counted")
def test_a_second_step_cannot_start_before_the_first_has_ended() -> None:
    """start, start, finish, finish becomes: start, refused, finish, start. What was started is over when it ends."""
    cache = CacheManager(16, 4, 4)
    cache.reserve([row_of(X, True, 0, 50, 50)]).commit([50])

    def start() -> Any:
        return cache.reserve([row_of(X, False, 50, 56, 56)])

    def in_flight() -> list[int]:
        live = reservation_of(cache.paged)
        return [row.demand.target - row.demand.num_computed_tokens for row in live.rows] if live else []

    first = start()
    assert in_flight() == [6]
    with pytest.raises(ContractViolation, match="second reservation"):
        start()
    assert in_flight() == [6]
    first.release()
    assert in_flight() == []
    start().commit([56])
    assert in_flight() == [] and cache.paged.table(X).num_computed_tokens == 56  # type: ignore[union-attr]


@pytest.mark.parity("F365", scenario="PR-04")
@pytest.mark.parity("F362", stand_in="one step is in flight: nothing can go while its step runs")
def test_nothing_can_be_preempted_closed_or_cancelled_while_its_step_runs() -> None:
    """So no output arrives for a request that is gone."""
    room = OpenedEngine()
    request = room.resident([5, 9, 13], max_generated_tokens=4)
    forward, refused = room.decoder.forward, []

    def meddle(step: Any) -> Any:
        with pytest.raises(ContractViolation, match="while a step holds a reservation"):
            view(room.engine).lifecycle.cache.remove(request.id)
        for call in (request.close, lambda: request.cancel_turn(1), lambda: request.rewind(1), request.fork):
            with pytest.raises(InvalidCall, match="inside its own step"):
                call()
        refused.append(True)
        return forward(step)

    room.decoder.forward = meddle  # type: ignore[method-assign]
    room.run_out()
    assert len(refused) == 3 and room.tokens[request.id] == solo([5, 9, 13], 4)


@pytest.mark.parity("F350", "F349", "F348")
def test_what_a_step_copies_from_stays_pinned_until_its_logits_were_read_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = OpenedEngine()
    parent = room.dormant([5, 9, 13])
    child = parent.fork()
    room.requests.append(child)
    child.begin_turn([7])
    forward, sample, owners, order = room.decoder.forward, BatchedSampler.sample, [], []

    def watch_forward(step: Any) -> Any:
        ((source, copy),) = step.block_copies
        order.append("forward")
        owners.extend([source, copy])
        assert room.pool.owner_count(source) == 2
        return forward(step)

    def watch_sample(sampler: BatchedSampler, logits: Any, rows: Any) -> Any:
        order.append("sample")
        assert room.pool.owner_count(owners[0]) == 2
        return sample(sampler, logits, rows)

    room.decoder.forward = watch_forward  # type: ignore[method-assign]
    monkeypatch.setattr(BatchedSampler, "sample", watch_sample)
    room.step()
    assert order == ["forward", "sample"]  # one call each: no step and no wait between them
    assert [room.pool.owner_count(block) for block in owners] == [1, 1]


@pytest.mark.parity(
    "F351", stand_in="one step is in flight: a step owns its arrays, and nothing is given back a step late"
)
def test_a_step_owns_its_arrays_whatever_comes_after_it() -> None:
    """A decoder may still read them when the next step is packed."""
    room = OpenedEngine(chunk_size=3)
    requests = [room.add([5 + i, 9, 13, 2, 7, 4], max_generated_tokens=9) for i in range(4)]
    kept: list[list[np.ndarray]] = []

    def arrays(step: Any) -> list[np.ndarray]:
        values = (getattr(step, name) for name in step.__dataclass_fields__)
        return [value for value in values if isinstance(value, np.ndarray)]

    while room.engine.has_pending_requests():
        room.step()
        kept.append([array.copy() for array in arrays(room.decoder.steps[-1])])
    assert len(kept[0]) == 7
    for step, copies in zip(room.decoder.steps, kept, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(arrays(step), copies, strict=True))
    assert all(request.status is RequestStatus.IDLE for request in requests)


@pytest.mark.parity("F062")
@pytest.mark.parity("F356", stand_in="an event buffer lends its events; no pool of output records could run dry")
def test_a_borrowed_event_is_read_or_copied_before_the_next_run() -> None:
    """There is no pool of output records that could run dry: a buffer lends its events, and says when one is stale."""
    engine = build_engine(SyntheticDecoder())
    request = engine.create_request()
    request.begin_turn([5, 9, 13])
    buffer = engine.create_event_buffer(4)
    taken = []
    for _ in range(5):
        engine.run(buffer)
        view = buffer[0]
        taken.append(view.token)
        engine.run(buffer)
        with pytest.raises(StaleView):
            _ = view.token
        taken.append(buffer[0].token)
    assert taken == solo([5, 9, 13], 10)
