from __future__ import annotations

import asyncio

import pytest

from serve_app.openai.keep_alive import COMMENT, KEEP_ALIVE_SECONDS, KeepAlive


async def until(sent: list[bytes], count: int) -> None:
    while len(sent) < count:
        await asyncio.sleep(0.001)


async def test_a_stream_that_is_silent_gets_comments_and_one_that_speaks_none() -> None:
    sent: list[bytes] = []

    async def send(body: bytes) -> None:
        sent.append(body)

    async with KeepAlive(send, 0.01) as stream:
        await stream.write(b"data: 1\n\n")
        await until(sent, 3)
        await stream.write(b"data: 2\n\n")
        await until(sent, 5)
    assert [body for body in sent if body != COMMENT] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert sent[1] == COMMENT and sent[-1] == COMMENT
    before = len(sent)
    await asyncio.sleep(0.05)
    assert len(sent) == before

    async with KeepAlive(send, 60.0) as stream:
        await stream.write(b"data: 3\n\n")
    assert sent[before:] == [b"data: 3\n\n"]


async def test_a_client_that_is_slow_to_read_gets_none() -> None:
    sent: list[bytes] = []
    read = asyncio.Event()

    async def send(body: bytes) -> None:
        sent.append(body)
        await read.wait()

    async with KeepAlive(send, 0.005) as stream:
        writing = asyncio.create_task(stream.write(b"data: 1\n\n"))
        await asyncio.sleep(0.05)
        assert sent == [b"data: 1\n\n"]
        read.set()
        await writing
        await until(sent, 2)


@pytest.mark.parametrize("fails", [ConnectionResetError, RuntimeError])
async def test_what_a_comment_meets_is_left_to_the_next_event(fails: type[Exception]) -> None:
    tried = asyncio.Event()

    async def send(body: bytes) -> None:
        tried.set()
        raise fails

    async with KeepAlive(send, 0.005) as stream:
        await tried.wait()
        with pytest.raises(fails):
            await stream.write(b"data: 1\n\n")


def test_comments_come_well_within_the_minute_of_most_proxies() -> None:
    assert KEEP_ALIVE_SECONDS <= 30
