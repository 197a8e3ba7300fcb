"""Placement as Ray Serve runs it: one router per handle and process, all following the same rule.

Ray Serve asks `choose_replicas` for ranks and takes the shortest queue *inside* a rank, so each rank here
holds one replica. `FIFOMixin` is left out on purpose: it gives a chosen replica to the oldest waiting
request, whoever that is. Without it a chosen replica goes to the call for which it was chosen, found by the
call's internal id. Ray takes that id from the HTTP request in whose context the call was made, so that all calls
of one request would share it, and of those that wait at the same time only the first would ever be placed:
each call gets an id of its own here.

What the router knows, by age:
- its own turns in flight and the queue lengths that replicas answer with: Serve's queue length cache, exact
  for one router and at most 10 s old for several;
- what this process remembers of where conversations are (`homes`);
- the replicas' reports (`record_routing_stats`): resident sessions, those of which turns run or wait, load,
  whether turns are accepted. A report is at most one period and a broadcast old;
- which replicas gave no sign of life when turns of this process asked for one (`known_replicas`);
- which replicas have left the set, since they are being stopped: no turn is sent there, but what is meant for one of
  them alone still reaches it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ray.serve._private.utils import generate_request_id
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Counter

from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.cluster.routing.placement import Margins, ReplicaView, SpillPolicy, place

AVOID = "avoid"
"""Keyword argument of a handle call: ids of replicas that have refused this turn already."""
ONLY = "only"
"""Keyword argument of a handle call: id of the one replica that is to answer. If it is gone, any does."""

_CALLS_PLACED_AT_A_TIME = 1000


class StickyRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed
    """Sends the turns of a conversation to the replica that holds it. See `placement` for the rule."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: frozenset[str] = frozenset()
        self._leaving: dict[ReplicaID, tuple[RunningReplica, float]] = {}  # and the time when it left the set
        self._known = known_replicas(self._deployment_id.app_name, self._deployment_id.name)
        self._homes = self._known.homes
        self._decisions = Counter(
            "moorage_routing_decisions",
            description="Turns by the reason for which their first choice of a replica was taken.",
            tag_keys=("deployment", "application", "reason"),
        )
        self._decisions.set_default_tags(
            {"deployment": self._deployment_id.name, "application": self._deployment_id.app_name}
        )
        self.initialize_state()

    def initialize_state(
        self,
        *,
        table_size: int = 50_000,
        spill_absolute: int = 32,
        spill_relative: float = 2.0,
        newcomer_spill_absolute: int = 4,
        newcomer_spill_relative: float = 1.5,
        name_spill_absolute: int = 32,
        name_spill_relative: float = 2.0,
        leaving_seconds: float = 60.0,
    ) -> None:
        """Takes `RequestRouterConfig.request_router_kwargs`; a bad value is refused by name. `leaving_seconds`: after
        this time Serve has ended what it stops."""
        if isinstance(table_size, bool) or not isinstance(table_size, int) or table_size < 1:
            raise ValueError(f"table_size must be an integer >= 1, not {table_size!r}")
        self._homes.size = table_size
        self._leaving_seconds = leaving_seconds
        self._policy = SpillPolicy(
            resident=Margins(spill_absolute, spill_relative),
            newcomer=Margins(newcomer_spill_absolute, newcomer_spill_relative),
            name=Margins(name_spill_absolute, name_spill_relative),
        )

    @property
    def max_num_routing_tasks(self) -> int:
        """Calls that are placed at a time. One whose replica does not say how long its queue is goes on asking for
        seconds, and Ray's own number, two for each replica, would let all others wait for that."""
        return _CALLS_PLACED_AT_A_TIME if self._replicas else 0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called for every change of the set and for every report."""
        in_set = dict(self.curr_replicas)
        super().update_replicas(replicas)
        before, self._running = self._running, _ids(self.curr_replicas)
        self._forget(before - self._running)
        now = time.monotonic()
        self._leaving = {
            id: (replica, since)
            for id, (replica, since) in ({id: (r, now) for id, r in in_set.items()} | self._leaving).items()
            if id not in self.curr_replicas and now < since + self._leaving_seconds
        }
        self._known.set_running(self._running, _ids(self._leaving))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(frozenset({replica_id.unique_id}))
        self._set_gone(replica_id)

    def _set_gone(self, replica_id: ReplicaID) -> None:
        if self._leaving.pop(replica_id, None) is not None:
            self._known.set_gone(replica_id.unique_id)

    def _forget(self, gone: frozenset[str]) -> None:
        if gone:
            self._homes.forget(gone.__contains__)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve calls this for every call, and again (`is_retry`) when a replica has rejected it. What was noted of
        the call before, so that it is cancelled with its HTTP request, keeps the id of that."""
        if not is_retry:
            own = replace(pending_request.metadata, internal_request_id=generate_request_id())
            pending_request.metadata = own
        if (meant := self._meant(pending_request, is_retry)) is not None:
            return meant
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._homes.end(pending_request.metadata.internal_request_id)
            raise

    def _meant(self, call: PendingRequest, is_retry: bool) -> RunningReplica | None:
        """The one replica that is to answer: it is not asked how long its queue is, since there is no choice. One that
        is being stopped and takes no more calls is as good as gone."""
        replica_id = ReplicaID(call.kwargs.get(ONLY, ""), self._deployment_id)
        if is_retry:
            self._set_gone(replica_id)
            return None
        leaving, _ = self._leaving.get(replica_id, (None, 0.0))
        meant: RunningReplica | None = self.curr_replicas.get(replica_id, leaving)
        if meant is not None and (key := call.metadata.session_id) and _names_a_session(call):
            self._homes.choose(key, call.metadata.internal_request_id, replica_id.unique_id)
        return meant

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, best first; for a turn of a named session only the best, since one that is slow to say
        how long its queue is has not lost the session. Called again, after a pause, for as long as no replica takes
        the turn."""
        if pending_request is None:
            return [candidate_replicas]
        first_try = not pending_request.routing_context.should_backoff
        pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if (only := by_id.get(pending_request.kwargs.get(ONLY, ""))) is not None:
            return [[only]]
        key = pending_request.metadata.session_id or None
        refused = frozenset(pending_request.kwargs.get(AVOID, ()))
        call = pending_request.metadata.internal_request_id
        named = key is not None and _names_a_session(pending_request)
        here = self._homes.open(key) if key and named else frozenset()
        placement = place(
            key,
            [self._view(replica, key, here, refused) for replica in candidate_replicas],
            request_id=call,
            named=named,
            table_home=self._homes.last(key) if key else None,
            policy=self._policy,
        )
        if not placement.ranked:
            return []
        if first_try:
            self._decisions.inc(tags={"reason": placement.reason.value})
        if not named:
            return [[by_id[replica]] for replica in placement.ranked]
        assert key is not None
        self._homes.choose(key, call, placement.ranked[0])
        return [[by_id[placement.ranked[0]]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken the call: it is where the next turn of this key looks first."""
        if key := pending_request.metadata.session_id:
            self._homes.note(key, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The call has ended, however."""
        self._homes.end(internal_request_id)

    def _view(
        self, replica: RunningReplica, key: str | None, here: frozenset[str], refused: frozenset[str]
    ) -> ReplicaView:
        """`here`: replicas at which this process has open calls of the conversation."""
        name = replica.replica_id.unique_id
        report = _report(replica)
        in_flight = self.replica_queue_len_cache.get(replica.replica_id)
        return ReplicaView(
            replica_id=name,
            load=int(report.get("load", 0)) if in_flight is None else in_flight,
            resident=report.get("sessions", {}).get(key, 0) if key is not None else 0,
            open=name in here or key in report.get("open", ()),
            accepting=bool(report.get("accepting", True)) and name not in refused | self._known.silent,
        )


def _ids(replicas: Collection[ReplicaID]) -> frozenset[str]:
    return frozenset(replica.unique_id for replica in replicas)


def _names_a_session(call: PendingRequest) -> bool:
    """A key is that of a session's name, or a hint that finds no more than a cache. What is called with a key takes as
    its first argument what says so: a TurnRequest, or a MovedSession."""
    return bool(call.args) and getattr(call.args[0], "session_id", None) is not None


def _report(replica: RunningReplica) -> Mapping[str, Any]:
    """The replica's last `record_routing_stats`; empty until the first one has arrived."""
    return replica.routing_stats or {}
