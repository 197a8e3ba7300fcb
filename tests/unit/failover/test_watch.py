"""Which silence is a failure, and who is asked how often."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import pytest

from serve_app.cluster.failover import watch as watch_module
from serve_app.cluster.failover.watch import Attempt, ReplicaSilent, ReplicaWatch
from serve_app.cluster.routing.known_replicas import KnownReplicas


class Asked:
    """Answers as it is told; `hang` is no answer."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.questions: list[str] = []
        self.open = self.most_open = 0

    async def __call__(self, replica: str) -> tuple[str, bool]:
        self.questions.append(replica)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            answer = self.answers.get(replica, (replica, True))
            if answer == "hang":
                await asyncio.Event().wait()
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]
        finally:
            self.open -= 1


class Stream:
    """A replica's stream; what it gives is put in from outside."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        return await self.items.get()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_SECONDS", "ANSWER_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(watch_module, name, 0.01)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def known() -> KnownReplicas:
    made = KnownReplicas()
    made.set_running(["a", "b"])
    return made


@pytest.fixture
def watch(asked: Asked, known: KnownReplicas) -> ReplicaWatch:
    return ReplicaWatch(asked, known)


async def questions(asked: Asked, count: int) -> None:
    while len(asked.questions) < count:
        await asyncio.sleep(0.001)


def waiting_at(stack: ExitStack, watch: ReplicaWatch, replica: str | None) -> tuple[Attempt, asyncio.Task[Any]]:
    place = stack.enter_context(watch.place())
    if replica is not None:
        place.reached(replica)
    return place, asyncio.create_task(place.next(Stream()))


@pytest.mark.parametrize("answer", ["hang", ("a", False)])
async def test_all_turns_leave_a_replica_that_does_not_answer_or_has_failed_and_no_others(
    watch: ReplicaWatch, asked: Asked, known: KnownReplicas, answer: Any
) -> None:
    asked.answers["a"] = answer
    with ExitStack() as stack:
        lost = [waiting_at(stack, watch, "a")[1] for _ in range(5)]
        _, stays = waiting_at(stack, watch, "b")
        for task in lost:
            with pytest.raises(ReplicaSilent):
                await task
        assert known.silent == {"a"}
        assert not stays.done()
        stays.cancel()


async def test_a_turn_that_waits_at_a_replica_which_answers_stays(watch: ReplicaWatch, asked: Asked) -> None:
    with ExitStack() as stack:
        tasks = [waiting_at(stack, watch, "a")[1] for _ in range(20)]
        await questions(asked, 5)
        assert not any(task.done() for task in tasks)
        assert asked.most_open == 1, "one question for all turns of a replica"
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize("answer", [("b", True), ("b", False), RuntimeError("no replica is running")])
async def test_what_nobody_knows_moves_no_turn(
    watch: ReplicaWatch, asked: Asked, known: KnownReplicas, answer: Any
) -> None:
    """Such as a replica that is being stopped, finishes its turns and is in no router's set any more."""
    asked.answers["a"] = answer
    with ExitStack() as stack:
        _, task = waiting_at(stack, watch, "a")
        await questions(asked, 3)
        assert not task.done() and known.silent == frozenset()
        task.cancel()


async def test_a_turn_that_its_replica_tells_something_asks_nobody(watch: ReplicaWatch, asked: Asked) -> None:
    stream = Stream()
    with watch.place() as place:
        place.reached("a")
        for i in range(30):
            stream.items.put_nowait(i)
            assert await place.next(stream) == i
            await asyncio.sleep(0.001)
        before = [q for q in asked.questions if q == "a"]
        assert len(before) <= 3, "only where this machine itself was slow"


async def test_a_question_is_that_of_all_turns_and_not_of_the_request_that_came_first(known: KnownReplicas) -> None:
    """Serve cancels calls with the request in whose context they were made."""
    request = ContextVar("request", default="none")
    request.set("the first")
    seen: list[str] = []

    async def ask(replica: str) -> tuple[str, bool]:
        seen.append(request.get())
        return replica, True

    with ExitStack() as stack:
        _, task = waiting_at(stack, ReplicaWatch(ask, known), "a")
        while not seen:
            await asyncio.sleep(0.001)
        task.cancel()
    assert set(seen) == {"none"}


async def test_a_turn_on_its_way_is_called_back_when_a_replica_fails_to_answer(
    watch: ReplicaWatch, asked: Asked, known: KnownReplicas
) -> None:
    asked.answers["b"] = "hang"
    with ExitStack() as stack:
        _, on_its_way = waiting_at(stack, watch, None)
        with pytest.raises(ReplicaSilent):
            await on_its_way
        assert set(asked.questions) == {"a", "b"}
        assert known.silent == {"b"}


async def test_a_turn_on_its_way_waits_while_all_answer(watch: ReplicaWatch, asked: Asked) -> None:
    with ExitStack() as stack:
        place, on_its_way = waiting_at(stack, watch, None)
        await questions(asked, 4)
        assert not on_its_way.done()
        on_its_way.cancel()
    with watch.place() as place, pytest.raises(TimeoutError):
        await place.next(Stream(), asyncio.get_running_loop().time() + 0.005)


async def test_a_replica_that_answers_again_is_trusted_again_though_no_turn_is_open(
    watch: ReplicaWatch, asked: Asked, known: KnownReplicas
) -> None:
    asked.answers["a"] = "hang"
    with ExitStack() as stack:
        _, task = waiting_at(stack, watch, "a")
        with pytest.raises(ReplicaSilent):
            await task
    assert known.silent == {"a"}
    asked.answers.clear()
    while known.silent:
        await asyncio.sleep(0.001)
    while watch._looking is not None:
        await asyncio.sleep(0.001)


async def test_a_turn_that_is_given_up_while_its_reader_is_elsewhere_learns_it_next(
    watch: ReplicaWatch, asked: Asked
) -> None:
    asked.answers["a"] = "hang"
    with ExitStack() as stack:
        place = stack.enter_context(watch.place())
        place.reached("a")
        _, task = waiting_at(stack, watch, "a")
        with pytest.raises(ReplicaSilent):
            await task
        with pytest.raises(ReplicaSilent):
            await place.next(Stream())


def test_only_running_replicas_can_be_silent() -> None:
    known = KnownReplicas()
    known.set_running(["a"])
    assert known.set_silent("a", True) and not known.set_silent("a", True)
    assert not known.set_silent("gone", True)
    known.set_running(["b"])
    assert known.silent == frozenset()
