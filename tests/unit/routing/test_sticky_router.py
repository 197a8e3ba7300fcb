"""The router as a plain object: no cluster, replicas that only carry what Serve would report."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve import Application
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from serve_app.cluster import app
from serve_app.cluster.routing import sticky_router
from serve_app.cluster.routing.homes import Homes
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.cluster.routing.placement import by_rank
from serve_app.cluster.routing.sticky_router import StickyRouter
from serve_app.config import AppArgs

DEPLOYMENT = DeploymentID(name="EngineDeployment", app_name="moorage")


@dataclass
class FakeReplica:
    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 1000

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Decisions:
    """In place of the counter that Ray exports: the reasons of placements, counted."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"deployment": DEPLOYMENT.name, "application": DEPLOYMENT.app_name}

    def inc(self, *, tags: dict[str, str]) -> None:
        self.seen[tags["reason"]] += 1


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    made = Decisions()
    monkeypatch.setattr(sticky_router, "Counter", lambda *_, **__: made)
    return made


@pytest.fixture
def homes() -> Homes:
    """Those of the process, as new."""
    made = known_replicas(DEPLOYMENT.app_name, DEPLOYMENT.name).homes = Homes()
    return made


@pytest.fixture
async def router(decisions: Decisions, homes: Homes) -> StickyRouter:
    return StickyRouter(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        create_replica_wrapper_func=lambda info: info,
    )


@dataclass
class Named:
    """What a call says of its session, as its first argument."""

    session_id: str = "some name"


def named_turn(key: str, number: int = 0, avoid: tuple[str, ...] = ()) -> PendingRequest:
    pending = turn(key, number, avoid)
    pending.args.append(Named())
    return pending


def turn(key: str = "", number: int = 0, avoid: tuple[str, ...] = ()) -> PendingRequest:
    metadata = RequestMetadata(f"request-{number}", f"internal-{number}", session_id=key)
    return PendingRequest(args=[], kwargs={"avoid": avoid} if avoid else {}, metadata=metadata)


async def ranks(router: StickyRouter, pending: PendingRequest) -> list[list[str]]:
    chosen = await router.choose_replicas(list(router.curr_replicas.values()), pending)
    return [[replica.name for replica in rank] for rank in chosen]


async def test_each_rank_holds_one_replica_in_rendezvous_order(
    router: StickyRouter,
) -> None:
    router.update_replicas([FakeReplica(name) for name in "abc"])
    pending = turn("k")
    assert await ranks(router, pending) == [[name] for name in by_rank("k", "abc")]
    assert pending.routing_context.should_backoff


async def test_a_reported_session_draws_its_turns(router: StickyRouter, decisions: Decisions) -> None:
    *_, last = by_rank("k", "abc")
    router.update_replicas([FakeReplica(n, {"sessions": {"k": 9} if n == last else {}}) for n in "abc"])
    assert (await ranks(router, turn("k")))[0] == [last]
    assert decisions.seen == {"resident": 1}


async def test_of_two_that_report_a_session_the_one_with_more_of_it_draws_its_turns(router: StickyRouter) -> None:
    first, second, _ = by_rank("k", "abc")
    tokens = {first: {"k": 90}, second: {"k": 120}}
    replicas = {name: FakeReplica(name, {"sessions": tokens.get(name, {})}) for name in "abc"}
    router.update_replicas(list(replicas.values()))
    router.on_request_routed(turn("k"), replicas[first].replica_id, None)
    assert (await ranks(router, turn("k")))[:2] == [[second], [first]]


async def test_the_replica_that_took_a_turn_is_remembered_until_it_is_gone(router: StickyRouter, homes: Homes) -> None:
    replicas = [FakeReplica(name) for name in "abc"]
    router.update_replicas(replicas)
    *_, last = by_rank("k", "abc")
    taker = next(replica for replica in replicas if replica.name == last)
    router.on_request_routed(turn("k"), taker.replica_id, None)
    assert (await ranks(router, turn("k")))[0] == [last]

    router.update_replicas([replica for replica in replicas if replica is not taker])
    assert len(homes) == 0
    assert len(await ranks(router, turn("k"))) == 2


async def test_a_dead_replica_loses_its_sessions_at_once(router: StickyRouter, homes: Homes) -> None:
    replicas = [FakeReplica(name, {"sessions": {"k": 9}} if name == "a" else {}) for name in "abc"]
    router.update_replicas(replicas)
    router.on_request_routed(turn("k"), replicas[0].replica_id, None)
    router.on_replica_actor_died(replicas[0].replica_id)
    assert ["a"] not in await ranks(router, turn("k"))
    assert len(homes) == 0


async def test_the_table_is_bounded_and_drops_the_key_used_longest_ago(router: StickyRouter, homes: Homes) -> None:
    router.initialize_state(table_size=2)
    replicas = [FakeReplica("a")]
    router.update_replicas(replicas)
    for key in ("one", "two", "one", "three"):
        router.on_request_routed(turn(key), replicas[0].replica_id, None)
    assert [homes.last(key) for key in ("one", "two", "three")] == ["a", None, "a"]


async def test_a_replica_that_refused_this_turn_or_accepts_none_comes_last(
    router: StickyRouter, decisions: Decisions
) -> None:
    home, other, _ = by_rank("k", "abc")
    router.update_replicas([FakeReplica(n, {"accepting": n != other}) for n in "abc"])
    order = await ranks(router, turn("k", avoid=(home,)))
    assert {name for [name] in order[1:]} == {home, other}
    assert decisions.seen == {"detour": 1}


async def test_a_question_for_one_replica_goes_there_and_elsewhere_only_if_it_is_gone(router: StickyRouter) -> None:
    router.update_replicas([FakeReplica(name) for name in "abc"])
    *_, last = by_rank("", "abc")
    question = turn()
    question.kwargs["only"] = last
    assert await ranks(router, question) == [[last]]
    assert question.routing_context.should_backoff, "asked again without a pause, it would spin"
    question.kwargs["only"] = "gone"
    assert len(await ranks(router, question)) == 3


def question_for(replica: str) -> PendingRequest:
    asked = turn()
    asked.kwargs["only"] = replica
    return asked


async def test_what_is_meant_for_one_replica_reaches_it_while_it_is_being_stopped_and_no_turn_does(
    router: StickyRouter,
) -> None:
    known = known_replicas(DEPLOYMENT.app_name, DEPLOYMENT.name)
    staying, stopped = FakeReplica("a"), FakeReplica("b")
    router.update_replicas([staying, stopped])
    router.update_replicas([staying])
    assert known.running == {"a"} and known.leaving == {"b"}
    for replica in (staying, stopped):
        assert await router._choose_replica_for_request(question_for(replica.name)) is replica
    assert await ranks(router, turn("k")) == [["a"]]
    router.update_replicas([])
    assert await router._choose_replica_for_request(question_for("a")) is staying
    router.update_replicas([staying, stopped])
    assert known.running == {"a", "b"} and not known.leaving


@pytest.mark.parametrize("how", ["its process has ended", "it takes no more calls", "its time is over"])
async def test_one_that_was_stopped_is_gone_in_the_end(router: StickyRouter, how: str) -> None:
    known = known_replicas(DEPLOYMENT.app_name, DEPLOYMENT.name)
    staying, stopped = FakeReplica("a"), FakeReplica("b")
    router.update_replicas([staying, stopped])
    router.update_replicas([staying])
    if how == "its process has ended":
        router.on_replica_actor_died(stopped.replica_id)
    elif how == "it takes no more calls":
        assert await router._choose_replica_for_request(question_for("b"), is_retry=True) is staying
    else:
        router.initialize_state(leaving_seconds=0.0)
        router.update_replicas([staying])
    assert known.leaving == set()
    assert await router._choose_replica_for_request(question_for("b")) is staying


async def test_a_silent_replica_comes_last_until_it_answers_or_is_gone(
    router: StickyRouter, decisions: Decisions
) -> None:
    router.update_replicas([FakeReplica(name) for name in "abc"])
    known = known_replicas(DEPLOYMENT.app_name, DEPLOYMENT.name)
    assert known.running == {"a", "b", "c"}
    home, *others = by_rank("k", "abc")
    known.set_silent(home, True)
    assert await ranks(router, turn("k")) == [[name] for name in (*others, home)]
    assert decisions.seen == {"detour": 1}
    known.set_silent(home, False)
    assert (await ranks(router, turn("k")))[0] == [home]
    known.set_silent(home, True)
    router.update_replicas([FakeReplica(name) for name in others])
    assert known.silent == frozenset()


async def test_load_comes_from_turns_in_flight_before_the_older_report(router: StickyRouter) -> None:
    home, other = by_rank("k", "ab")
    router.update_replicas([FakeReplica(n, {"load": 40 if n == home else 0}) for n in "ab"])
    assert (await ranks(router, turn("k")))[0] == [other]
    for replica in router.curr_replicas:
        router.on_new_queue_len_info(replica, 1)
    assert (await ranks(router, turn("k")))[0] == [home]


async def test_a_turn_that_is_tried_again_is_counted_once(router: StickyRouter, decisions: Decisions) -> None:
    router.update_replicas([FakeReplica("a")])
    pending = turn("k")
    await ranks(router, pending)
    await ranks(router, pending)
    assert decisions.seen == {"rendezvous": 1}


async def test_calls_of_one_http_request_are_placed_each_by_itself(router: StickyRouter) -> None:
    """Serve gives all of them the id of the request in whose context they are made; one leaves before it is placed."""
    calls = [turn(key) for key in ("one", "two", "three", "")]
    placing = [asyncio.create_task(router._choose_replica_for_request(call)) for call in calls]
    await asyncio.sleep(0)
    placing[1].cancel()
    router.update_replicas([FakeReplica(name) for name in "abc"])
    async with asyncio.timeout(10):
        placed: list[Any] = await asyncio.gather(*placing, return_exceptions=True)
        assert isinstance(placed[1], asyncio.CancelledError)
        for call, replica in zip(calls, placed, strict=True):
            if call.metadata.session_id in ("one", "three"):
                assert replica.name == by_rank(call.metadata.session_id, "abc")[0]
        rejected = calls[0].metadata
        assert (await router._choose_replica_for_request(calls[0], is_retry=True)).name == placed[0].name
        assert calls[0].metadata is rejected
    assert router._pending_requests_by_id == {}


async def test_turns_of_a_new_name_that_come_together_stay_together(
    router: StickyRouter, decisions: Decisions, homes: Homes
) -> None:
    """Before any report, while other loads come and go, and though its first turn had to leave the first by rank."""
    router.update_replicas([FakeReplica(name) for name in "abc"])
    home, detour, _ = by_rank("k", "abc")
    assert await ranks(router, named_turn("k", 0, avoid=(home,))) == [[detour]]
    for number in range(1, 20):
        for replica in router.curr_replicas:
            router.on_new_queue_len_info(replica, 90 if replica.unique_id == detour else number % 3)
        assert await ranks(router, named_turn("k", number)) == [[detour]]
    assert decisions.seen == {"detour": 1, "open": 19}
    for replica in router.curr_replicas:
        router.on_new_queue_len_info(replica, 0)
    for number in range(20):
        router.on_request_completed(next(iter(router.curr_replicas)), f"internal-{number}")
    assert homes.open_calls == 0
    assert await ranks(router, named_turn("k", 20)) == [[home]]


async def test_a_named_turn_waits_for_its_home_where_a_hint_would_go_on(router: StickyRouter) -> None:
    router.update_replicas([FakeReplica(name) for name in "abc"])
    order = by_rank("k", "abc")
    assert await ranks(router, named_turn("k")) == [[order[0]]]
    assert await ranks(router, turn("k")) == [[name] for name in order]


async def test_a_report_of_open_turns_draws_the_turns_of_their_session(router: StickyRouter) -> None:
    *_, last = by_rank("k", "abc")
    reports = {n: {"open": {"k"}, "load": 99} if n == last else {"sessions": {"k": 50}} for n in "abc"}
    router.update_replicas([FakeReplica(name, report) for name, report in reports.items()])
    assert await ranks(router, named_turn("k")) == [[last]]


async def test_a_call_that_is_cancelled_before_it_is_placed_leaves_no_open_turn(
    router: StickyRouter, homes: Homes
) -> None:
    router.update_replicas([FakeReplica("a", max_ongoing_requests=0)])
    placing = asyncio.create_task(router._choose_replica_for_request(named_turn("k")))
    async with asyncio.timeout(10):
        while not homes.open_calls:
            await asyncio.sleep(0)
    placing.cancel()
    await asyncio.gather(placing, return_exceptions=True)
    assert homes.open_calls == 0 and not homes.open("k")


@pytest.mark.parametrize("arguments", [{"table_size": 0}, {"spill_relative": 0.5}, {"spill_absolute": -1}])
async def test_bad_settings_are_refused(router: StickyRouter, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        router.initialize_state(**arguments)


@pytest.mark.parametrize(
    ("limits", "margin"), [({}, 64), ({"max_batch_size": 4}, 8), ({"max_running_sequences": 10}, 20)]
)
def test_a_conversation_leaves_its_cache_only_when_two_batches_stand_before_it(
    limits: dict[str, int], margin: int
) -> None:
    front_door = app.build(AppArgs(model="smollm2", **limits))._bound_deployment
    bound = [*front_door.init_args, *front_door.init_kwargs.values()]
    deployments = [one._bound_deployment for one in bound if isinstance(one, Application)]
    [engines] = [deployment for deployment in deployments if deployment.name == app.ENGINES]
    router = engines._deployment_config.request_router_config
    margins = {name: value for name, value in router.request_router_kwargs.items() if name.endswith("absolute")}
    assert margins == {"spill_absolute": margin, "name_spill_absolute": margin // 2}
