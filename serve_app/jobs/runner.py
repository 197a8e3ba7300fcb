"""Asks the API for each line that is not done, many at a time, and notes what it answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable

import httpx

from serve_app.jobs.journal import Journal
from serve_app.jobs.lines import BadLine, Line, answered, parse_line, refused

# Answers that say nothing about the line: it is asked again, also by the next job.
_PASSING = frozenset({429, 500, 502, 503, 504})
_FAILED = 500  # of these, the one that may be due to the line after all
_LONGEST_PAUSE_SECONDS = 30.0

OnLine = Callable[[bool], None]
"""Called for each line that is done: whether it was answered well."""


class BatchStuck(RuntimeError):
    """The engines fail again and again; what is done is kept."""


async def run_batch(
    lines: Iterable[Line],
    journal: Journal,
    http: httpx.AsyncClient,
    *,
    concurrency: int,
    tries: int,
    on_line: OnLine,
) -> None:
    """`http` reaches the API. A line that gets no answer in `tries` attempts ends the run with BatchStuck: something is
    wrong with the engines, not with the line. But one that fails where others are answered, or there are no others, is
    to blame itself. Raises OSError if the journal can't be written."""
    ids: set[str] = set()
    places = asyncio.Semaphore(concurrency)
    at_work = answers = 0
    stuck = False  # from the first line that got no answer on, until the others have heard of it

    def note(line: Line, record: dict[str, object], good: bool) -> None:
        nonlocal answers
        answers += good
        journal.add(line, record)
        on_line(good)

    async def work(line: Line) -> None:
        nonlocal at_work, stuck
        at_work += 1
        before = answers
        try:
            try:
                call = parse_line(line)
                if call.custom_id in ids:
                    text = f"line {line.number}: custom_id {call.custom_id!r} is that of an earlier line"
                    raise BadLine(call.custom_id, "duplicate_custom_id", text)
                ids.add(call.custom_id)
            except BadLine as bad:
                if not journal.has(line):
                    note(line, refused(line, bad), good=False)
                return
            if journal.has(line):
                return
            response = await _ask(http, call.url, json.dumps(call.body).encode(), tries)
            own = response.status_code == _FAILED and (answers > before or at_work == 1)
            if response.status_code in _PASSING and (stuck or not own):
                stuck = True
                text = f"{response.status_code} {response.text[:300]}"
                raise BatchStuck(f"line {line.number}: no answer in {tries} tries; the last: {text}")
            request_id = response.headers.get("x-request-id", "")
            record = answered(line, call, response.status_code, request_id, response.json())
            note(line, record, good=response.status_code == 200)
        finally:
            at_work -= 1
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                await places.acquire()
                group.create_task(work(line))
    except* (BatchStuck, OSError) as group:
        raise group.exceptions[0] from None


async def _ask(http: httpx.AsyncClient, url: str, body: bytes, tries: int) -> httpx.Response:
    """The first answer that does not pass, or the last one."""
    headers = {"content-type": "application/json"}
    for attempt in range(tries):
        response = await http.post(url, content=body, headers=headers)
        if response.status_code not in _PASSING:
            break
        wished = response.headers.get("retry-after", "")
        pause = float(wished) if wished.isdigit() else 2.0**attempt
        await asyncio.sleep(min(pause, _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.5))
    return response
