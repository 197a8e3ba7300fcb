"""Jobs in a process of their own: what they give, and what ends them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from serve_app.ingress.errors import ApiError, bad_value
from serve_app.ingress.side_process import SideProcess

MIB = 2**20


def make() -> str:
    return "made"


def fails_to_start() -> str:
    raise OSError("no such model")


def told(made: str, *args: object) -> tuple[object, ...]:
    print("what a library prints is no answer")
    return (made, *args, os.getpid())


def refuse(made: str) -> None:
    raise ApiError(429, "later", type="t", param="p", code="c", headers={"Retry-After": "3"})


def break_down(made: str) -> None:
    raise ZeroDivisionError("a bug")


def block(made: str) -> None:
    signal.pause()


_left: list[bytes] = []


def allocate(made: str, size: int) -> None:
    _left.append(b"x" * size)


def die(made: str) -> None:
    os._exit(1)


def wait_for(made: str, path: Path) -> None:
    """Opening a pipe waits for the other end."""
    path.read_bytes()


@pytest.fixture(scope="module")
def side() -> Iterator[SideProcess]:
    with closing(SideProcess(make, seconds=60.0, job_bytes=256 * MIB, waiting_bytes=100)) as side:
        yield side


async def pid_of(side: SideProcess) -> int:
    *_, pid = await side.run(told, size=0)
    assert isinstance(pid, int)
    return pid


async def test_a_job_gets_what_was_made_once_and_its_arguments_in_another_process(side: SideProcess) -> None:
    made, one, two, pid = await side.run(told, 1, b"two", size=0)
    assert (made, one, two) == ("made", 1, b"two")
    assert pid == await pid_of(side) != os.getpid()


async def test_a_refusal_comes_back_whole_and_a_bug_as_its_trace(side: SideProcess) -> None:
    pid = await pid_of(side)
    with pytest.raises(ApiError) as refused:
        await side.run(refuse, size=0)
    error = refused.value
    assert (error.status, error.message, error.type, error.param, error.code) == (429, "later", "t", "p", "c")
    assert error.headers == {"Retry-After": "3"}
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug"):
        await side.run(break_down, size=0)
    assert await pid_of(side) == pid


async def test_a_job_that_takes_too_long_is_refused_and_its_process_ended() -> None:
    with closing(SideProcess(make, seconds=0.5, job_bytes=256 * MIB, waiting_bytes=100)) as side:
        with pytest.raises(ApiError) as refused:
            await side.run(block, size=0)
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")
        assert side._process is None


async def test_a_job_that_takes_its_process_along_is_refused_and_the_next_one_served(side: SideProcess) -> None:
    before = await pid_of(side)
    with pytest.raises(ApiError) as refused:
        await side.run(die, size=0)
    assert (refused.value.status, refused.value.code) == (413, "request_too_large")
    assert await pid_of(side) != before


async def test_memory_has_a_bound_and_what_a_large_job_leaves_is_given_back(side: SideProcess) -> None:
    before = await pid_of(side)
    with pytest.raises(ApiError) as refused:
        await side.run(allocate, 512 * MIB, size=0)
    assert refused.value.status == 413
    assert await pid_of(side) == before
    await side.run(allocate, 128 * MIB, size=0)
    assert await pid_of(side) != before


async def test_a_process_that_died_between_jobs_is_replaced(side: SideProcess) -> None:
    before = await pid_of(side)
    os.kill(before, signal.SIGKILL)
    assert side._process is not None
    side._process.wait()
    assert await pid_of(side) != before


async def test_what_can_not_start_says_why() -> None:
    broken = SideProcess(fails_to_start, seconds=60.0, job_bytes=MIB, waiting_bytes=100)
    with closing(broken), pytest.raises(RuntimeError, match="no such model"):
        await broken.run(told, size=0)


async def test_the_smallest_goes_first_and_one_that_nobody_waits_for_does_not_run(
    side: SideProcess, tmp_path: Path
) -> None:
    pipe, left = tmp_path / "pipe", tmp_path / "left"
    os.mkfifo(pipe)
    order: list[int] = []

    async def run(size: int) -> None:
        await side.run(told, size=size)
        order.append(size)

    running = asyncio.create_task(side.run(wait_for, pipe, size=0))
    end = await asyncio.to_thread(lambda: pipe.open("wb"))  # from here on the process is busy
    waiting = [asyncio.create_task(run(size)) for size in (30, 10, 20)]
    gone = asyncio.create_task(side.run(wait_for, left, size=40))  # would fail: there is no such file
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await side.run(told, size=1)
    assert (refused.value.status, refused.value.code) == (429, "server_busy")
    gone.cancel()
    end.close()
    await asyncio.gather(running, *waiting)
    assert order == [10, 20, 30]
    assert gone.cancelled()
    await side.run(told, size=1000)  # alone it may be of any size


async def test_it_ends_when_it_is_closed(side: SideProcess) -> None:
    with closing(SideProcess(make, seconds=60.0, job_bytes=256 * MIB, waiting_bytes=100)) as other:
        await pid_of(other)
        process = other._process
        assert process is not None and process.poll() is None
    assert await asyncio.to_thread(process.wait, 30) == 0


def test_errors_are_the_same_after_a_journey() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(bad_value("field", "is wrong", "code")))
    assert isinstance(error, ApiError)
    assert (error.status, error.envelope()) == (400, bad_value("field", "is wrong", "code").envelope())
