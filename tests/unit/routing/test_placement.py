from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cluster.routing.placement import Margins, Placement, Reason, ReplicaView, SpillPolicy, by_rank, place

IDS = st.lists(st.text("abcdef0123456789", min_size=1, max_size=8), min_size=1, max_size=6, unique=True)
MANY_KEYS = st.lists(st.text(min_size=1), min_size=1, max_size=40, unique=True)
KEYS = st.one_of(st.none(), st.text(min_size=1, max_size=12))


@st.composite
def fleets(draw: st.DrawFn) -> list[ReplicaView]:
    return [ReplicaView(name, draw(st.integers(0, 60)), draw(st.booleans()), draw(st.booleans())) for name in draw(IDS)]


def idle(*names: str, resident: str | None = None) -> list[ReplicaView]:
    return [ReplicaView(name, resident=name == resident) for name in names]


def first(key: str | None, views: list[ReplicaView], table_home: str | None = None) -> tuple[str, Reason]:
    placement = place(key, views, request_id="r", table_home=table_home)
    return placement.ranked[0], placement.reason


@given(KEYS, fleets(), st.randoms(use_true_random=False), st.booleans())
def test_the_answer_does_not_depend_on_the_order_of_the_replicas(
    key: str | None, fleet: list[ReplicaView], rng: random.Random, with_table: bool
) -> None:
    table_home = fleet[0].replica_id if with_table else None
    shuffled = fleet[:]
    rng.shuffle(shuffled)
    assert place(key, fleet, request_id="r", table_home=table_home) == place(
        key, shuffled, request_id="r", table_home=table_home
    )


@given(KEYS, fleets())
def test_every_replica_is_ranked_exactly_once_and_unwilling_ones_come_last(
    key: str | None, fleet: list[ReplicaView]
) -> None:
    ranked = place(key, fleet, request_id="r").ranked
    assert sorted(ranked) == sorted(view.replica_id for view in fleet)
    accepting = {view.replica_id: view.accepting for view in fleet}
    flags = [accepting[replica] for replica in ranked]
    assert flags == sorted(flags, reverse=True)


@given(
    IDS,
    st.text("xyz", min_size=1, max_size=6),
    MANY_KEYS,
)
def test_a_new_replica_moves_no_resident_session_and_only_its_share_of_unknown_ones(
    names: list[str], joiner: str, keys: list[str]
) -> None:
    for key in keys:
        home, _ = first(key, idle(*names))
        assert first(key, idle(*names, joiner, resident=home)) == (home, Reason.RESIDENT)
        after, reason = first(key, idle(*names, joiner))
        assert reason is Reason.RENDEZVOUS
        assert after in (home, joiner)


@given(
    IDS.filter(lambda names: len(names) > 1),
    MANY_KEYS,
)
def test_a_lost_replica_moves_only_its_own_sessions(names: list[str], keys: list[str]) -> None:
    lost, rest = names[0], names[1:]
    for key in keys:
        before, _ = first(key, idle(*names))
        after, _ = first(key, idle(*rest))
        assert after == before or before == lost


def test_rendezvous_spreads_keys_evenly() -> None:
    counts = dict.fromkeys("abcd", 0)
    for i in range(4000):
        counts[by_rank(f"session-{i}", list("abcd"))[0]] += 1
    assert all(850 < count < 1150 for count in counts.values()), counts


LOADS = st.lists(st.integers(0, 32), min_size=6, max_size=6)


@given(IDS, MANY_KEYS, LOADS, LOADS)
def test_two_routers_place_a_new_name_alike_whatever_loads_they_see(
    names: list[str], keys: list[str], loads: list[int], others: list[int]
) -> None:
    """As long as no replica is ahead of another by more than the margin."""

    def home(key: str, seen: list[int]) -> tuple[str, Reason]:
        views = [ReplicaView(name, load) for name, load in zip(names, seen, strict=False)]
        placement = place(key, views, request_id=str(seen), named=True)
        return placement.ranked[0], placement.reason

    for key in keys:
        assert home(key, loads) == home(key, others) == (by_rank(key, names)[0], Reason.RENDEZVOUS)


@given(st.text(min_size=1), fleets(), st.data())
def test_a_named_session_never_leaves_a_home_where_its_turns_are_open(
    key: str, fleet: list[ReplicaView], data: st.DataObject
) -> None:
    home = replace(data.draw(st.sampled_from(fleet)), open=True, accepting=True)
    views = [view if view.replica_id != home.replica_id else home for view in fleet]
    table_home = data.draw(st.sampled_from([None, *(view.replica_id for view in fleet)]))
    placement = place(key, views, request_id="r", named=True, table_home=table_home)
    assert (placement.ranked[0], placement.reason) == (home.replica_id, Reason.OPEN)


def test_a_new_name_spills_only_past_a_whole_batch_and_one_at_home_leaves_when_that_is_gone() -> None:
    top, second = by_rank("k", ["a", "b"])
    margins = SpillPolicy(name=Margins(8, 2.0))
    for load, taken_by in ((8, top), (9, second)):
        views = [ReplicaView(top, load), ReplicaView(second, 0)]
        assert place("k", views, request_id="r", named=True, policy=margins).ranked[0] == taken_by
    views = [ReplicaView(top, open=True, accepting=False), ReplicaView(second, 50)]
    assert place("k", views, request_id="r", named=True) == Placement((second, top), Reason.DETOUR)


def test_open_turns_of_a_hint_are_no_reason_to_stay() -> None:
    top, second = by_rank("k", ["a", "b"])
    views = [ReplicaView(top, 5, open=True), ReplicaView(second)]
    assert place("k", views, request_id="r").ranked[0] == second


def test_residency_goes_before_the_table_and_the_table_before_rank() -> None:
    names = by_rank("k", ["a", "b", "c"])
    top, second, third = names
    assert first("k", idle(*names)) == (top, Reason.RENDEZVOUS)
    assert first("k", idle(*names), table_home=second) == (second, Reason.TABLE)
    assert first("k", idle(*names, resident=third), table_home=second) == (third, Reason.RESIDENT)


def test_of_several_holders_the_one_of_most_is_first_of_equal_ones_that_in_the_table_and_the_others_follow() -> None:
    top, second, third = by_rank("k", ["a", "b", "c"])
    views = [ReplicaView(top, resident=7), ReplicaView(second, resident=9), ReplicaView(third, resident=8)]
    assert place("k", views, request_id="r", table_home=top).ranked == (second, third, top)
    views = [ReplicaView(top), ReplicaView(second, resident=9), ReplicaView(third, resident=9)]
    assert place("k", views, request_id="r", table_home=third) == Placement((third, second, top), Reason.RESIDENT)


def test_processes_that_remember_different_homes_agree_once_they_hear_who_has_more() -> None:
    """A turn has left its home while that was silent; both hold the conversation, and turns come by two processes."""
    held = {"left": 100, "newer": 150}
    tables = ["newer", "left"]
    length = computed = 150
    for number in range(10):
        views = [ReplicaView(name, resident=tokens) for name, tokens in held.items()]
        home, reason = first("k", views, table_home=tables[number % 2])
        assert (home, reason) == ("newer", Reason.RESIDENT)
        length += 20
        computed += length - held[home]
        held[home], tables[number % 2] = length, home
    assert computed == length, "no token is computed twice"


def test_a_table_entry_of_a_replica_that_is_gone_is_ignored() -> None:
    assert first("k", idle("a"), table_home="gone") == ("a", Reason.RENDEZVOUS)


@pytest.mark.parametrize(
    ("home_load", "other_load", "spills"),
    [(32, 0, False), (33, 0, True), (60, 27, True), (60, 30, False), (80, 40, False), (81, 40, True)],
)
def test_a_resident_session_spills_only_past_both_margins(home_load: int, other_load: int, spills: bool) -> None:
    views = [ReplicaView("home", home_load, resident=True), ReplicaView("other", other_load)]
    expected = ("other", Reason.SPILL) if spills else ("home", Reason.RESIDENT)
    assert first("k", views) == expected


def test_a_newcomer_spills_sooner_than_a_resident() -> None:
    top, second = by_rank("k", ["a", "b"])
    assert first("k", [ReplicaView(top, 5), ReplicaView(second, 0)]) == (second, Reason.SPILL)
    assert first("k", [ReplicaView(top, 5), ReplicaView(second, 0)], table_home=top) == (second, Reason.SPILL)
    assert first("k", [ReplicaView(top, 5, resident=True), ReplicaView(second, 0)]) == (top, Reason.RESIDENT)


def test_a_spill_goes_past_alternatives_that_are_overloaded_too() -> None:
    top, second, third = by_rank("k", ["a", "b", "c"])
    views = [ReplicaView(top, 50, resident=True), ReplicaView(second, 50), ReplicaView(third, 1)]
    assert place("k", views, request_id="r").ranked == (third, top, second)


def test_a_home_that_does_not_accept_is_left_and_stays_as_last_resort() -> None:
    views = [ReplicaView("home", resident=True, accepting=False), ReplicaView("other", load=99)]
    assert place("k", views, request_id="r") == Placement(("other", "home"), Reason.DETOUR)
    alone = [ReplicaView("home", resident=True, accepting=False)]
    assert first("k", alone) == ("home", Reason.RESIDENT)


def test_a_turn_without_a_key_goes_to_the_least_loaded_and_ties_are_spread() -> None:
    assert first(None, [ReplicaView("a", 2), ReplicaView("b", 1)]) == ("b", Reason.LEAST_LOADED)
    picked = {place(None, idle("a", "b"), request_id=f"req-{i}").ranked[0] for i in range(50)}
    assert picked == {"a", "b"}


def test_no_replicas_give_an_empty_placement() -> None:
    assert place("k", [], request_id="r").ranked == ()
    assert place(None, [], request_id="r").ranked == ()


@pytest.mark.parametrize(("absolute", "relative"), [(-1, 1.5), (True, 1.5), (1, 0.9), (1, float("nan"))])
def test_margins_that_make_no_sense_are_refused(absolute: int, relative: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        Margins(absolute, relative)


def test_wider_margins_keep_a_session_at_home() -> None:
    views = [ReplicaView("home", 40, resident=True), ReplicaView("other", 0)]
    patient = SpillPolicy(resident=Margins(100, 1.5))
    assert place("k", views, request_id="r", policy=patient).ranked[0] == "home"
