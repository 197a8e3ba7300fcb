"""A wait that is ended from elsewhere, and what else may happen to its task at that moment."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.interruption import Interrupted, Interruption


class Waiter:
    """Waits twice, and says how each wait ended."""

    def __init__(self) -> None:
        self.wait = Interruption()
        loop = asyncio.get_running_loop()
        self.futures: list[asyncio.Future[str]] = [loop.create_future(), loop.create_future()]
        self.ended: list[str] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for future in self.futures:
            try:
                with self.wait:
                    self.ended.append(await future)
            except Interrupted:
                self.ended.append("interrupted")
        await asyncio.sleep(0)  # a cancellation that was left over would come here

    async def turn(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def test_an_interruption_ends_one_wait_and_nothing_else() -> None:
    waiter = Waiter()
    await waiter.turn()
    waiter.wait.interrupt()
    waiter.wait.interrupt()
    await waiter.turn()
    assert waiter.ended == ["interrupted"]
    waiter.futures[1].set_result("heard")
    await waiter.task
    assert waiter.ended == ["interrupted", "heard"] and waiter.task.cancelling() == 0


async def test_nobody_who_does_not_wait_is_interrupted() -> None:
    waiter = Waiter()
    waiter.wait.interrupt()  # it has not begun
    for future in waiter.futures:
        await waiter.turn()
        future.set_result("heard")
    await waiter.task
    waiter.wait.interrupt()
    assert waiter.ended == ["heard", "heard"]


@pytest.mark.parametrize("first", ["interrupted", "heard"])
async def test_what_comes_in_the_same_moment_ends_the_wait_once(first: str) -> None:
    waiter = Waiter()
    await waiter.turn()
    for what in (first, "interrupted" if first == "heard" else "heard"):
        if what == "heard" and not waiter.futures[0].cancelled():
            waiter.futures[0].set_result("heard")
        elif what == "interrupted":
            waiter.wait.interrupt()
    await waiter.turn()
    assert waiter.ended == ["interrupted"]
    waiter.futures[1].set_result("heard")
    await waiter.task
    assert waiter.ended == ["interrupted", "heard"] and waiter.task.cancelling() == 0


@pytest.mark.parametrize("interrupted_first", [True, False])
async def test_a_task_that_is_cancelled_too_is_cancelled(interrupted_first: bool) -> None:
    waiter = Waiter()
    await waiter.turn()
    if interrupted_first:
        waiter.wait.interrupt()
    waiter.task.cancel()
    if not interrupted_first:
        waiter.wait.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await waiter.task
    assert waiter.ended == []


async def test_an_error_of_the_wait_itself_is_raised() -> None:
    wait = Interruption()
    with pytest.raises(KeyError), wait:
        raise KeyError
    async with asyncio.timeout(5):  # its task is as it was
        await asyncio.sleep(0)


async def test_a_wait_that_swallows_its_end_leaves_no_cancellation_behind() -> None:
    wait, begun = Interruption(), asyncio.Event()

    async def deaf() -> str:
        with wait:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return "deaf"
        return "slept"

    task = asyncio.create_task(deaf())
    await begun.wait()
    wait.interrupt()
    assert await task == "deaf"
    assert task.cancelling() == 0
