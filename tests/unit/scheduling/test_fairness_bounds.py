"""Each fairness bound at its exact border: one step earlier it does nothing, one step later it would be too late."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.limits import FairnessBounds
from engine_actor.requests.outcomes import DeferralReason
from tests.support.engine_room import OpenedEngine

NEVER = 10**9


def bounds(passed_over: int = NEVER, share: float = 0.0, overtakes: int = NEVER) -> FairnessBounds:
    return FairnessBounds(passed_over, share, overtakes)


def room_of(fairness: FairnessBounds, **limits: Any) -> OpenedEngine:
    room = OpenedEngine(fairness=fairness, **limits)
    room.decoder.choose = lambda _: 5  # nobody ends
    return room


def rows(room: OpenedEngine) -> list[int]:
    return [row.record.id for row in room.plan().rows]


@pytest.mark.parity("F121", "F122")
@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_prompt_is_passed_over_exactly_as_often_as_it_may_be(most: int) -> None:
    room = room_of(bounds(passed_over=most), max_batch_size=2, max_residents=8)
    running = [room.resident([4 + i]) for i in range(2)]
    prompt = room.add([9, 9])
    for _ in range(most):
        assert prompt.id not in rows(room)
        room.step()
    assert rows(room) == [prompt.id, running[0].id]


@pytest.mark.parity("F121")
@pytest.mark.parametrize("decodes", [1, 2, 3, 4])
def test_decodes_leave_a_prompt_one_row_of_a_full_step(decodes: int) -> None:
    """The tokens would do for all of them: rows are what is scarce."""
    room = room_of(bounds(share=0.1), max_batch_size=3, max_residents=8, max_scheduled_tokens=100)
    for i in range(decodes):
        room.resident([4 + i])
    prompt = room.add([9] * 40)
    planned = rows(room)
    assert planned[-1] == prompt.id and len(planned) == min(decodes, 2) + 1


@pytest.mark.parity("F121")
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_decode_runs_beside_a_prompt_however_few_the_tokens(share: float) -> None:
    room = room_of(bounds(share=share), max_scheduled_tokens=2)
    decode = room.resident([4])
    prompt = room.add([9] * 40)
    assert room.counts() == [(decode.id, 1), (prompt.id, 1)]


@pytest.mark.parity("F125")
@pytest.mark.parametrize(("most", "times", "first"), [(1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True)])
def test_a_prompt_that_was_overtaken_as_often_as_it_may_be_goes_before_decodes(
    most: int, times: int, first: bool
) -> None:
    """Of five blocks the prompt needs four; a fourth comes free just when the next token of a decode needs one too."""
    room = room_of(bounds(overtakes=most), num_blocks=5, max_residents=9)
    dormant = room.dormant([6])
    decode = room.resident([4] * (4 - times))
    prompt = room.add([9] * 14)
    for _ in range(times):
        small = room.add([7])
        room.step()
        small.close()
    assert decode.current_length == 5
    dormant.close()
    assert rows(room) == [prompt.id if first else decode.id]


@pytest.mark.parity("F125", "F086")
def test_where_nobody_may_be_overtaken_decodes_still_come_first() -> None:
    room = room_of(bounds(overtakes=0), chunk_size=2)
    prompt = room.add([9] * 20)
    decode = room.add([4])
    room.step()
    assert rows(room) == [decode.id, prompt.id]


@pytest.mark.parity("F125")
@pytest.mark.parametrize("most", [0, 1, 3])
def test_behind_a_prompt_that_lacks_memory_as_many_are_admitted_as_may_overtake_it(most: int) -> None:
    room = room_of(bounds(overtakes=most), num_blocks=8, max_residents=9)
    room.dormant([6])
    prompt = room.add([9] * 30)  # eight blocks, of which seven are left
    others = [room.add([7]) for _ in range(5)]
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [other.id for other in others[:most]]
    reasons = {deferral.request_id: deferral.reason for deferral in plan.deferrals}
    assert reasons == {prompt.id: DeferralReason.BLOCKS} | {other.id: DeferralReason.TURN for other in others[most:]}


@pytest.mark.parity("F125")
def test_only_newer_requests_overtake() -> None:
    room = room_of(bounds(overtakes=9), num_blocks=8, max_residents=9, max_batch_size=2)
    room.dormant([6])
    older = [room.add([7], max_generated_tokens=1) for _ in range(2)]
    prompt = room.add([9] * 30, priority=-1)  # considered first, and it lacks a block
    newer = [room.add([8], max_generated_tokens=1) for _ in range(2)]
    for expected, admitted in ((0, older), (2, newer)):
        assert rows(room) == [request.id for request in admitted]
        room.step()
        assert room.record(prompt).overtaken == expected
        for request in admitted:
            request.close()


@pytest.mark.parity("F125")
def test_newer_requests_that_a_step_took_first_count_as_overtaking_too() -> None:
    room = room_of(bounds(overtakes=3), num_blocks=8, max_residents=9)
    room.dormant([6])
    prompt = room.add([9] * 30)
    urgent = [room.add([7], priority=-1) for _ in range(2)]
    others = [room.add([8]) for _ in range(2)]
    assert rows(room) == [*(request.id for request in urgent), others[0].id]
    assert {d.request_id for d in room.plan().deferrals} == {prompt.id, others[1].id}


@pytest.mark.parity("F125")
def test_who_was_served_has_been_overtaken_by_nobody() -> None:
    room = room_of(bounds(overtakes=9), num_blocks=8, max_residents=9)
    dormant = room.dormant([6])
    prompt = room.add([9] * 30)
    small = room.add([7], max_generated_tokens=1)
    room.step()
    assert room.record(prompt).overtaken == 1
    dormant.close()
    small.close()
    room.step()
    assert (room.record(prompt).overtaken, room.record(prompt).passed_over) == (0, 0)
