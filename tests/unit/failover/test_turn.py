"""A turn whose replicas are lost: its caller sees one stream, as if nothing had happened, or one end."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import pytest

from engine_actor.messages import (
    EndReason,
    Failure,
    HistorySpan,
    RefusalCode,
    TurnAccepted,
    TurnEnded,
    TurnRefused,
    TurnTokens,
)
from serve_app.cluster.channel.call import TurnElsewhere
from serve_app.cluster.failover import turn as turn_module
from serve_app.cluster.failover import watch as watch_module
from serve_app.cluster.failover.turn import LOSSES, REFUSALS
from tests.support.failing_replicas import (
    ANSWER,
    DIES,
    ENDS,
    PROMPT,
    SILENT,
    STOPS,
    Replicas,
    Script,
    client_of,
    items_of,
    request,
    told,
)

ITEMS = len(items_of("a", request()))  # id, accepted, five tokens, end


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_SECONDS", "ANSWER_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(watch_module, name, 0.01)
    for name in ("_FIRST_PAUSE_SECONDS", "_LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(turn_module, name, 0.001)


async def undisturbed(**fields: Any) -> list[Any]:
    return await told(Replicas(), request(**fields))


@pytest.mark.parametrize(
    ("items", "then"),
    [(i, then) for i in range(ITEMS) for then in (DIES, SILENT, STOPS, ENDS) if i >= 2 or then != STOPS],
)
async def test_a_loss_at_any_place_of_the_stream_is_not_seen(items: int, then: str) -> None:
    replicas = Replicas(Script(items, then), works={"a": None})
    replicas.known.set_running(["a", "b"])
    found = await told(replicas)
    accepted_first = items >= 2
    expected = await undisturbed()
    if not accepted_first:  # then the second replica's acceptance is the one
        expected = items_of("b", request(), cached=3)[1:]
    assert found == expected
    delivered = ANSWER[: max(0, items - 2)]
    again = replicas.requests[1]
    assert again.prompt_ids == PROMPT + delivered
    assert again.resumed_tokens == (len(delivered) if accepted_first else None)
    assert replicas.avoided[1] == (("a",) if items else ())
    assert replicas.calls[0].cancelled is (then in (DIES, SILENT, STOPS))


@pytest.mark.parametrize("ticks", range(24))
async def test_a_delta_that_comes_as_its_replica_is_given_up_is_told_once_or_asked_for_again(ticks: int) -> None:
    """Waiting for the next delta is cancelled then, and may take one that has come along."""
    replicas = Replicas()
    replicas.ticks = 2  # of the event loop, until the next item
    client = client_of(replicas)

    async def give_up() -> None:
        for _ in range(ticks):
            await asyncio.sleep(0)
        for place in list(client._watch._places):
            place.give_up()

    giving_up = asyncio.create_task(give_up())
    found = [delta async for delta in client.stream_turn(request(), routing_key=None)]
    await giving_up
    assert [token for delta in found if isinstance(delta, TurnTokens) for token in delta.token_ids] == list(ANSWER)
    assert isinstance(found[-1], TurnEnded) and found[-1].generated_tokens == len(ANSWER)
    assert [type(delta) for delta in found].count(TurnAccepted) == 1
    assert len(replicas.calls) <= 2


async def test_the_counts_are_those_of_the_first_acceptance_over_two_losses() -> None:
    replicas = Replicas(Script(4, DIES), Script(3, DIES))
    found = await told(replicas)
    assert found == await undisturbed()
    assert found[-1] == TurnEnded(EndReason.STOP, 3, 2, 5)
    assert [r.prompt_ids for r in replicas.requests] == [PROMPT, PROMPT + ANSWER[:2], PROMPT + ANSWER[:3]]
    assert replicas.avoided == [(), ("a",), ("b",)]


@pytest.mark.parametrize("then", [DIES, SILENT, ENDS])
async def test_what_happens_after_the_end_is_no_loss(then: str) -> None:
    replicas = Replicas(Script(then=then), works={"a": None})
    assert await told(replicas) == await undisturbed()
    assert len(replicas.calls) == 1


async def test_what_the_turn_asked_for_travels_along() -> None:
    asked = request(max_generated_tokens=4, min_generated_tokens=3, logprobs=2, stop_token_ids=frozenset({9}))
    asked = replace(asked, sampling=replace(asked.sampling, temperature=0.7, seed=5, presence_penalty=1.0))
    replicas = Replicas(Script(4, DIES))
    found = await told(replicas, asked)
    assert replicas.requests[1] == replace(asked, prompt_ids=PROMPT + ANSWER[:2], resumed_tokens=2)
    assert found[-1] == TurnEnded(EndReason.LENGTH, 3, 2, 4)


async def test_a_turn_that_has_all_its_tokens_ends_without_another_replica() -> None:
    replicas = Replicas(Script(5, DIES))
    found = await told(replicas, request(max_generated_tokens=3))
    assert len(replicas.calls) == 1
    assert found[-1] == TurnEnded(EndReason.LENGTH, 3, 2, 3)


@pytest.mark.parametrize(("limit", "reason"), [(8, EndReason.LENGTH), (6, EndReason.FAILED)])
async def test_a_sequence_that_is_as_long_as_it_can_be_has_ended(limit: int, reason: EndReason) -> None:
    """Refused for its length alone; a replica that holds less than the first one did cannot go on with it."""
    refused = TurnRefused(RefusalCode.CONTEXT_LENGTH, "too long", 8, limit)
    replicas = Replicas(Script(7, DIES), *[Script(instead=[refused])] * 300)
    found = await told(replicas, placement_timeout=0.05)
    assert isinstance(found[-1], TurnEnded)
    assert found[-1] == TurnEnded(reason, 3, 2, 5, found[-1].message, failure=found[-1].failure)
    assert reason is not EndReason.FAILED or found[-1].failure is Failure.CONTEXT_LENGTH


async def test_history_that_a_replica_replaced_stays_replaced() -> None:
    digest = hashlib.sha256(b"x").digest()
    asked = request(spans=(HistorySpan(1, 2, digest),))
    accepted = TurnAccepted("a", 4, 1, own_tokens=((0, (77, 78)),))
    replicas = Replicas(Script(then=DIES, instead=[accepted, TurnTokens((31,))]))
    found = await told(replicas, asked)
    again = replicas.requests[1]
    assert again.prompt_ids == (1, 77, 78, 3, 31)
    assert again.spans == (HistorySpan(1, 3, digest),)
    assert again.resumed_tokens == 1
    assert found[-1] == TurnEnded(EndReason.STOP, 4, 1, 5)


async def test_a_turn_that_failed_by_itself_is_not_tried_again() -> None:
    ended = TurnEnded(EndReason.FAILED, 3, 2, 0, "no finite number")
    replicas = Replicas(Script(instead=[TurnAccepted("a", 3, 2), ended]))
    assert await told(replicas) == [TurnAccepted("a", 3, 2), ended]
    assert len(replicas.calls) == 1


@pytest.mark.parametrize("items", [1, 4])
async def test_a_turn_that_loses_two_replicas_at_one_token_is_given_up(items: int) -> None:
    replicas = Replicas(Script(items, DIES), Script(2 if items > 1 else 1, DIES))
    *_, last = await told(replicas)
    assert len(replicas.calls) == 2
    if items == 1:
        assert isinstance(last, TurnRefused) and last.code is RefusalCode.UNAVAILABLE and last.retry_after
    else:
        assert isinstance(last, TurnEnded) and last.reason is EndReason.FAILED
        assert last.failure is Failure.ENGINE, "what made it fatal happens again"
        assert (last.prompt_tokens, last.cached_tokens, last.generated_tokens) == (3, 2, 2)


async def test_a_turn_that_loses_a_replica_at_every_token_is_given_up_after_five() -> None:
    replicas = Replicas(*[Script(3, DIES)] * 9)
    many = await told(replicas)
    assert len(replicas.calls) == LOSSES
    assert isinstance(many[-1], TurnEnded) and many[-1].reason is EndReason.FAILED
    assert many[-1].generated_tokens == LOSSES


async def test_replicas_that_die_before_they_hear_of_a_turn_are_not_its_fault_but_bounded() -> None:
    survives = Replicas(*[Script(0, DIES)] * (LOSSES - 1))
    assert (await told(survives))[-1] == TurnEnded(EndReason.STOP, 3, 2 + LOSSES - 1, 5)
    [refused] = await told(Replicas(*[Script(0, DIES)] * 20))
    assert isinstance(refused, TurnRefused) and refused.code is RefusalCode.UNAVAILABLE


async def test_several_choices_are_not_resumed() -> None:
    items = [
        TurnAccepted("a", 3, 2),
        TurnTokens((1,), 0),
        TurnTokens((2, 3), 2),
        TurnEnded(EndReason.STOP, 3, 2, 1),
    ]
    replicas = Replicas(Script(then=DIES, instead=items))
    found = await told(replicas, request(choices=3))
    lost = "the replica was lost in the middle of the answer"
    assert found[: len(items)] == items
    assert found[len(items) :] == [
        TurnEnded(EndReason.FAILED, 3, 2, 0, lost, 1, Failure.UNAVAILABLE),
        TurnEnded(EndReason.FAILED, 3, 2, 2, lost, 2, Failure.UNAVAILABLE),
    ]


@pytest.mark.parametrize("then", [None, DIES])
async def test_a_turn_is_complete_when_its_last_choice_is(then: str | None) -> None:
    said = [
        TurnAccepted("a", 3, 2),
        TurnTokens((1,), 0),
        TurnEnded(EndReason.STOP, 3, 2, 1),
        TurnTokens((2,), 1),
        TurnEnded(EndReason.STOP, 3, 2, 1, choice=1),
    ]
    assert await told(Replicas(Script(then=then, instead=said)), request(choices=2)) == said


@pytest.mark.parametrize("code", [RefusalCode.QUEUE_FULL, RefusalCode.UNAVAILABLE])
async def test_a_refusal_is_tried_elsewhere_a_bounded_number_of_times(code: RefusalCode) -> None:
    refused = TurnRefused(code, "not now", retry_after=1.0)
    replicas = Replicas(Script(instead=[refused]))
    assert (await told(replicas))[-1] == TurnEnded(EndReason.STOP, 3, 3, 5)
    assert replicas.avoided == [(), ("a",)]
    replicas = Replicas(*[Script(instead=[refused])] * 9)
    assert await told(replicas) == [refused]
    assert len(replicas.calls) == REFUSALS


async def test_of_several_refusals_the_caller_hears_that_of_the_replica_that_will_have_room_first() -> None:
    full = [TurnRefused(RefusalCode.QUEUE_FULL, "full", retry_after=seconds) for seconds in (9.0, 4.0, 7.0)]
    assert await told(Replicas(*(Script(instead=[refused]) for refused in full))) == [full[1]]
    stopping = TurnRefused(RefusalCode.UNAVAILABLE, "stopping", retry_after=1.0)
    for refusals in ([full[0], stopping, full[2]], [stopping, full[2], stopping]):
        assert await told(Replicas(*(Script(instead=[refused]) for refused in refusals))) == [full[2]]
    assert await told(Replicas(*[Script(instead=[stopping])] * 3)) == [stopping]


@pytest.mark.parametrize(("code", "calls"), [(RefusalCode.QUEUE_FULL, 2), (RefusalCode.UNAVAILABLE, REFUSALS)])
async def test_where_every_queue_is_full_nobody_is_asked_twice(code: RefusalCode, calls: int) -> None:
    """One that is being stopped is replaced soon, so it is worth another try."""
    replicas = Replicas(*[Script(instead=[TurnRefused(code, "not now", retry_after=1.0)])] * 9)
    replicas.known.set_running(["a", "b"])
    [refused] = await told(replicas)
    assert isinstance(refused, TurnRefused) and refused.code is code
    assert len(replicas.calls) == calls


@pytest.mark.parametrize("code", [RefusalCode.INVALID, RefusalCode.CONTEXT_LENGTH, RefusalCode.SESSION_BUSY])
async def test_a_refusal_that_holds_everywhere_is_the_answer(code: RefusalCode) -> None:
    refused = TurnRefused(code, "no")
    replicas = Replicas(Script(instead=[refused]))
    assert await told(replicas) == [refused]
    assert len(replicas.calls) == 1


async def test_an_accepted_turn_waits_for_a_replica_that_takes_it() -> None:
    refused = TurnRefused(RefusalCode.UNAVAILABLE, "stopping", retry_after=1.0)
    replicas = Replicas(Script(4, DIES), *[Script(instead=[refused])] * 20)
    assert await told(replicas) == await undisturbed()
    assert len(replicas.calls) == 22


async def test_an_accepted_turn_fails_when_nobody_takes_it_in_time() -> None:
    refused = TurnRefused(RefusalCode.UNAVAILABLE, "stopping", retry_after=1.0)
    found = await told(Replicas(Script(4, DIES), *[Script(instead=[refused])] * 500), placement_timeout=0.05)
    assert isinstance(found[-1], TurnEnded) and found[-1].reason is EndReason.FAILED
    found = await told(Replicas(Script(4, DIES), Script(0, SILENT)), placement_timeout=0.05)
    assert isinstance(found[-1], TurnEnded) and "no replica has taken the turn" in found[-1].message


async def test_a_turn_that_had_a_replica_waits_for_another_to_start_and_a_new_one_does_not() -> None:
    late = [Script(0, SILENT)]  # Serve keeps the call until there is a replica
    for lost in (Script(4, DIES), Script(1, DIES)):  # running, and waiting in its queue
        replicas = Replicas(lost, *late)
        asking = asyncio.create_task(told(replicas, placement_timeout=0.01, replacement_timeout=60.0))
        while len(replicas.calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not asking.done()
        replicas.calls[1].let_go(items_of("b", replicas.requests[1], cached=3))
        found = await asking
        assert [token for delta in found if isinstance(delta, TurnTokens) for token in delta.token_ids] == [*ANSWER]
        assert isinstance(found[-1], TurnEnded) and found[-1].reason is EndReason.STOP
    [refused] = await told(Replicas(*late), placement_timeout=0.01, replacement_timeout=60.0)
    assert isinstance(refused, TurnRefused) and refused.code is RefusalCode.UNAVAILABLE
    found = await told(Replicas(Script(4, DIES), *late), placement_timeout=0.01, replacement_timeout=0.05)
    assert isinstance(found[-1], TurnEnded) and found[-1].failure is Failure.UNAVAILABLE


async def test_a_new_turn_is_refused_when_nobody_takes_it_in_time() -> None:
    replicas = Replicas(Script(0, SILENT))
    [refused] = await told(replicas, placement_timeout=0.05)
    assert isinstance(refused, TurnRefused) and refused.code is RefusalCode.UNAVAILABLE and refused.retry_after
    assert replicas.calls[0].cancelled


@pytest.mark.parametrize(
    ("running", "silent", "said"),
    [
        ("", "", "no replica is running, and none has started within 0.05 s"),
        ("ab", "", "no replica has taken the turn within 0.05 s (running: 2, of these not answering: 0)"),
        ("ab", "a", "no replica has taken the turn within 0.05 s (running: 2, of these not answering: 1)"),
    ],
)
async def test_a_turn_that_nobody_takes_in_time_says_what_the_router_knew(
    monkeypatch: pytest.MonkeyPatch, running: str, silent: str, said: str
) -> None:
    monkeypatch.setattr(watch_module, "SILENCE_SECONDS", 10.0)  # nobody is asked in this time
    replicas = Replicas(Script(0, SILENT), works=dict.fromkeys(silent))
    replicas.known.set_running(running)
    for replica in silent:
        replicas.known.set_silent(replica, True)
    [refused] = await told(replicas, placement_timeout=0.05)
    assert isinstance(refused, TurnRefused) and refused.message == said


@pytest.mark.parametrize("asked_before", [True, False])
async def test_a_replica_that_is_being_stopped_is_not_taken_for_a_silent_one(asked_before: bool) -> None:
    """It is in no set any more, and is not asked; its turns end when they have ended, or with its process."""
    replicas = Replicas(Script(1, SILENT), works={"a": None})
    client = client_of(replicas)
    if not asked_before:
        replicas.known.set_running([])
    told_next = asyncio.create_task(anext(client.stream_turn(request(), routing_key="k")))
    async with asyncio.timeout(10):
        while not replicas.calls or (asked_before and not replicas.signs):
            await asyncio.sleep(0)
    replicas.known.set_running([])
    done, _ = await asyncio.wait([told_next], timeout=0.2)  # ten times as long as silence is suffered here
    assert not done and not replicas.known.silent and len(replicas.calls) == 1
    told_next.cancel()
    await asyncio.gather(told_next, return_exceptions=True)
    assert replicas.calls[0].cancelled


class Counted:
    def __init__(self) -> None:
        self.seen: list[tuple[bool, str]] = []

    def count(self, *, resumed: bool, why: str) -> None:
        self.seen.append((resumed, why))


async def test_resumes_and_retries_are_counted_by_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr("serve_app.cluster.client.FailoverCounters", lambda: counted)
    refused = TurnRefused(RefusalCode.QUEUE_FULL, "full")
    await told(Replicas(Script(instead=[refused]), Script(1, DIES), Script(3, STOPS), Script(3, DIES)))
    assert counted.seen == [(False, "refused"), (False, "died"), (True, "stopped"), (True, "died")]


def tokens_of(deltas: list[Any]) -> tuple[int, ...]:
    return tuple(token for delta in deltas if isinstance(delta, TurnTokens) for token in delta.token_ids)


@pytest.mark.parametrize(
    ("silent", "meant"), [((), ["", "b"]), (("b",), ["", "a"])], ids=["sent on", "not to one that is silent"]
)
async def test_a_turn_whose_session_is_elsewhere_is_sent_there_once(silent: tuple[str, ...], meant: list[str]) -> None:
    replicas = Replicas(Script(instead=[TurnElsewhere("a", "b")]))
    for replica in silent:
        replicas.known.set_silent(replica, True)
    assert tokens_of(await told(replicas)) == ANSWER
    assert replicas.meant == meant
    assert replicas.avoided == [(), ()], "nobody has refused or lost it"


async def test_a_turn_is_not_sent_from_one_replica_to_another_for_ever() -> None:
    sent = [Script(instead=[TurnElsewhere("a", "b")]), Script(instead=[TurnElsewhere("c", "b")])]
    replicas = Replicas(*sent)
    assert tokens_of(await told(replicas)) == ANSWER
    assert replicas.meant == ["", "b", "c"]
