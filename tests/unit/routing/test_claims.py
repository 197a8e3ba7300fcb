"""Whom a turn of a named session goes to, whichever replica it came to first."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from serve_app.cluster.routing.claims import CLAIM_SECONDS, NameClaims
from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.cluster.routing.placement import by_rank

KEY = "k"
FIRST, SECOND, THIRD = by_rank(KEY, "abc")


class Replicas:
    """Three that ask each other; `hangs` answers nobody."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hangs: str | None = None
        self.asked: list[str] = []
        self.resident: dict[str, set[str]] = {replica: set() for replica in "abc"}
        self.known = KnownReplicas()
        self.known.set_running("abc")
        self.claims = {replica: self._claims_of(replica) for replica in "abc"}

    def _claims_of(self, replica: str) -> NameClaims:
        async def ask(first: str, key: str, avoid: Collection[str]) -> str | None:
            self.asked.append(first)
            await asyncio.sleep(0)
            if first == self.hangs:
                raise TimeoutError
            return self.claims[first].claim(key, replica, avoid)

        return NameClaims(replica, self.known, lambda: self.resident[replica], ask, lambda: self.now)

    async def home(self, replica: str, avoid: Collection[str] = ()) -> str:
        return await self.claims[replica].home(KEY, avoid)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.mark.parametrize("order", [(FIRST, SECOND, THIRD), (SECOND, FIRST, THIRD), (THIRD, SECOND, FIRST)])
async def test_first_turns_that_come_to_different_replicas_go_to_one(replicas: Replicas, order: tuple[str]) -> None:
    homes = await asyncio.gather(*map(replicas.home, order))
    assert len(set(homes)) == 1
    assert {await replicas.home(replica) for replica in "abc"} == set(homes)


async def test_where_a_turn_is_the_others_go_and_nobody_is_asked_there(replicas: Replicas) -> None:
    assert await replicas.home(SECOND) == SECOND
    with replicas.claims[SECOND].turn(KEY), replicas.claims[SECOND].turn(KEY):
        replicas.asked.clear()
        assert await replicas.home(SECOND) == SECOND
        assert replicas.asked == []
        assert await replicas.home(THIRD) == await replicas.home(FIRST) == SECOND


async def test_a_turn_at_the_first_holds_the_name_however_long_it_takes(replicas: Replicas) -> None:
    with replicas.claims[FIRST].turn(KEY):
        replicas.now = 10 * CLAIM_SECONDS
        assert await replicas.home(SECOND) == FIRST
    assert await replicas.home(SECOND) == SECOND


async def test_a_claim_ends_when_the_routers_have_long_heard_of_it(replicas: Replicas) -> None:
    assert await replicas.home(SECOND) == SECOND
    replicas.now = CLAIM_SECONDS + 1
    assert await replicas.home(THIRD) == THIRD


async def test_a_session_that_is_resident_stays_without_a_question_unless_it_was_claimed(replicas: Replicas) -> None:
    replicas.resident[SECOND].add(KEY)
    assert await replicas.home(SECOND) == SECOND
    assert replicas.asked == []
    replicas.resident[FIRST].add(KEY)
    assert await replicas.home(THIRD) == THIRD == await replicas.home(FIRST)


async def test_who_has_refused_or_lost_a_turn_or_is_gone_does_not_get_it(replicas: Replicas) -> None:
    with replicas.claims[FIRST].turn(KEY):
        assert await replicas.home(SECOND, avoid=(FIRST,)) == SECOND
        assert replicas.asked == []
    assert await replicas.home(SECOND) == SECOND
    assert await replicas.home(THIRD, avoid=(SECOND,)) == THIRD
    replicas.known.set_running({FIRST, SECOND})
    assert await replicas.home(SECOND) == SECOND


async def test_a_first_that_does_not_answer_is_not_waited_for(replicas: Replicas) -> None:
    replicas.hangs = FIRST
    assert await replicas.home(SECOND) == SECOND


async def test_one_that_knows_no_others_keeps_its_turns() -> None:
    replicas = Replicas()
    replicas.known.set_running("")
    assert await replicas.home(THIRD) == THIRD
