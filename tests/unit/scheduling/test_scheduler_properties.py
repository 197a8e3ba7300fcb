"""The scheduler over random workloads: planning is pure, the plain order without bounds, bounded service with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_actor.limits import FairnessBounds
from engine_actor.options import UNBOUNDED
from engine_actor.requests.outcomes import DeferralReason
from engine_actor.requests.request import Request
from engine_actor.scheduling.step_plan import StepPlan
from tests.support.doubles import solo
from tests.support.engine_room import OpenedEngine
from tests.support.engine_view import view


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    generated: int


arrivals = st.lists(
    st.builds(Arrival, st.integers(0, 15), st.lists(st.integers(2, 60), min_size=1, max_size=14), st.integers(1, 20)),
    min_size=1,
    max_size=9,
)
limits = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 5),
        "max_scheduled_tokens": st.integers(1, 12),
        "max_residents": st.integers(1, 9),
        "num_blocks": st.integers(9, 30),  # any request fits alone: at most 34 positions of 4 to a block
        "chunk_size": st.integers(0, 4),
        "prefix_reuse": st.booleans(),
    }
)


class Workload:
    """Runs arrivals to their end, closing what is finished, and shows each executed plan to `watch`."""

    def __init__(self, arrivals: list[Arrival], room: OpenedEngine) -> None:
        self.room = room
        self.left = sorted(arrivals, key=lambda arrival: arrival.step)
        self.expected: dict[int, list[int]] = {}
        self.open: dict[int, Request] = {}

    def run(self, watch: Any) -> None:
        work = sum(len(a.prompt) + a.generated for a in self.left)
        for step in range(40 * work + 100):
            while self.left and self.left[0].step <= step:
                arrival = self.left.pop(0)
                request = self.room.add(arrival.prompt, max_generated_tokens=arrival.generated, ignore_eos=True)
                self.expected[request.id] = solo(arrival.prompt, arrival.generated, eos=-1)
                self.open[request.id] = request
            before = self.room.fingerprint()
            plan, again = self.room.plan(), self.room.plan()
            assert plan == again and self.room.fingerprint() == before
            watch(plan)
            self.room.step()
            for request in [r for r in self.open.values() if r.finish_reason is not None]:
                request.close()
                del self.open[request.id]
            if not self.left and not self.open:
                break
        assert self.room.tokens == self.expected
        assert self.room.pool.available == self.room.pool.usable


def check_counts(room: OpenedEngine, plan: StepPlan) -> None:
    config = room.engine.limits
    assert len(plan.rows) <= config.max_batch_size and plan.token_count <= config.max_scheduled_tokens
    for row in plan.rows:
        assert 1 <= row.count <= row.demand.length - row.demand.num_computed_tokens
        assert row.prefill or row.count == 1
        assert not config.chunk_size or row.count <= config.chunk_size
    if plan.rows:
        plan.check()


def s0_plan(room: OpenedEngine) -> list[int]:
    """The plain rule, written down a second time: one pass over decodes, then prefills, counting limits down."""
    engine, cache = room.engine, room.cache
    records = view(engine).requests.records
    residents = [records[name] for name in view(engine).cache.paged.residents() if records[name].has_turn]
    order = [*residents, *view(engine).requests.queue.values()]
    order.sort(key=lambda record: record.num_computed_tokens < record.prompt_boundary)
    rows = min(engine.limits.max_batch_size, engine.limits.max_scheduled_tokens)
    blocks, places = cache.available, cache.max_residents - cache.resident_count
    selected = []
    for record in order:
        table = cache.table(record.id)
        whole = record.history.length
        if table is None:
            adopted = cache.match(record.options.salt, record.history.ids).blocks
            cost = math.ceil(whole / 4) - sum(not room.pool.is_idle(block) for block in adopted)
            cost += record.preemptions * len(residents)
        else:
            cost = max(0, math.ceil(whole / 4) - table.count)
        if rows < 1 or cost > blocks or (table is None and places < 1):
            continue
        selected.append(record.id)
        rows -= 1
        blocks -= cost - (record.preemptions * len(residents) if table is None else 0)
        places -= table is None
    return selected


@given(arrivals, limits)
def test_without_bounds_the_order_is_s0s(arrivals: list[Arrival], limits: dict[str, Any]) -> None:
    room = OpenedEngine(**limits)

    def watch(plan: StepPlan) -> None:
        check_counts(room, plan)
        assert [row.record.id for row in plan.rows] == s0_plan(room)

    Workload(arrivals, room).run(watch)


bounds = st.builds(FairnessBounds, st.integers(1, 4), st.sampled_from([0.0, 0.25, 0.5, 0.9]), st.integers(0, 3))


@given(arrivals, limits, bounds)
def test_every_runnable_row_is_served_within_the_bound(
    arrivals: list[Arrival], limits: dict[str, Any], fairness: FairnessBounds
) -> None:
    """At most `max_passed_over` steps in a row in which it could run, and then one round of those that wait as long."""
    room = OpenedEngine(fairness=fairness, **limits)
    waited: dict[int, int] = {}
    rows = min(limits["max_batch_size"], limits["max_scheduled_tokens"])

    def watch(plan: StepPlan) -> None:
        check_counts(room, plan)
        if not plan.rows:
            return  # a preemption comes first; this plan is not executed
        passed = {d.request_id for d in plan.deferrals if d.reason is DeferralReason.ROWS}
        for name in waited.keys() - passed:
            waited[name] = 0  # it ran, or lacked memory or a place and could not
        for name in passed:
            waited[name] = waited.get(name, 0) + 1
            assert waited[name] <= fairness.max_passed_over + math.ceil(len(arrivals) / rows)

    Workload(arrivals, room).run(watch)


@given(arrivals, limits, st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_prefills_keep_their_share_of_the_tokens(arrivals: list[Arrival], limits: dict[str, Any], share: float) -> None:
    room = OpenedEngine(fairness=FairnessBounds(UNBOUNDED - 1, share, UNBOUNDED - 1), **limits)
    budget = limits["max_scheduled_tokens"]
    rows = min(limits["max_batch_size"], budget)

    def watch(plan: StepPlan) -> None:
        prefills = [row for row in plan.rows if row.prefill]
        decodes = len(plan.rows) - len(prefills)
        wanted = sum(
            min(row.demand.length - row.demand.num_computed_tokens, limits["chunk_size"] or 99) for row in prefills
        )
        kept = min(math.ceil(share * budget), budget - 1)
        assert not prefills or plan.prefill_tokens >= min(wanted, kept)
        waiting = {d.request_id for d in plan.deferrals if d.reason is DeferralReason.ROWS}
        if rows > 1 and decodes and not prefills:
            # Decodes alone: no prefill was left out for want of rows.
            records = view(room.engine).requests.records
            assert not any(records[name].is_prefill for name in waiting)

    Workload(arrivals, room).run(watch)


@given(arrivals, limits, st.integers(0, 3))
def test_a_waiting_request_is_overtaken_a_bounded_number_of_times(
    arrivals: list[Arrival], limits: dict[str, Any], most: int
) -> None:
    """Newer requests admitted while it lacks memory; one step may admit several before it is met in the order."""
    room = OpenedEngine(fairness=FairnessBounds(UNBOUNDED - 1, 0.25, most), **limits)
    overtaken: dict[int, int] = {}

    def watch(plan: StepPlan) -> None:
        admitted = [row.record.submitted for row in plan.rows if row.demand.new]
        for row in plan.rows:
            overtaken.pop(row.record.id, None)
        for deferral in plan.deferrals:
            if deferral.reason is DeferralReason.ROWS:
                continue
            record = view(room.engine).requests.records[deferral.request_id]
            newer = sum(submitted > record.submitted for submitted in admitted)
            overtaken[record.id] = overtaken.get(record.id, 0) + newer
            assert overtaken[record.id] <= most

    Workload(arrivals, room).run(watch)
