"""A run over the lines of a batch, against an API that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.jobs import runner
from serve_app.jobs.journal import Counts, Journal
from serve_app.jobs.lines import Line
from serve_app.jobs.runner import BatchStuck, run_batch

Answer = Callable[[str], httpx.Response]


def line(number: int, custom_id: str | None = None, **fields: Any) -> Line:
    content = {"custom_id": custom_id or f"c{number}", "url": "/v1/completions", "body": {"prompt": f"p{number}"}}
    return Line(number, json.dumps({**content, **fields}).encode())


def good(prompt: str) -> httpx.Response:
    return httpx.Response(200, json={"text": prompt.upper()}, headers={"x-request-id": f"r-{prompt}"})


class JobAgainstApi:
    """Runs of a job over an API that remembers what it was asked, and how much at once."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "out.jsonl"
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self.told: list[bool] = []

    async def run(self, lines: list[Line], answer: Answer = good, concurrency: int = 4, tries: int = 3) -> Counts:
        async def api(request: httpx.Request) -> httpx.Response:
            prompt = json.loads(request.content)["prompt"]
            self.asked.append(prompt)
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
            await asyncio.sleep(0.001)
            self.at_once -= 1
            return answer(prompt)

        transport = httpx.MockTransport(api)
        with Journal(self.output) as journal:
            async with httpx.AsyncClient(transport=transport, base_url="http://batch") as http:
                await run_batch(lines, journal, http, concurrency=concurrency, tries=tries, on_line=self.told.append)
            return journal.write_output(lines)

    def written(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.output.read_bytes().splitlines()]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobAgainstApi:
    monkeypatch.setattr(runner, "_LONGEST_PAUSE_SECONDS", 0.001)
    return JobAgainstApi(tmp_path)


async def test_every_line_has_its_record_in_order_and_the_counts_are_exact(room: JobAgainstApi) -> None:
    lines = [line(1), Line(2, b"{"), line(3), line(4, url="/v1/files"), line(5, custom_id="c1"), line(6)]
    lines.append(Line(7, b"", digest_of_long="d"))

    def answer(prompt: str) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "no", "code": "x"}}) if prompt == "p6" else good(prompt)

    assert await room.run(lines, answer) == Counts(answered=2, failed=5)
    records = room.written()
    assert [record["custom_id"] for record in records] == ["c1", None, "c3", "c4", "c1", "c6", None]
    codes = [record["error"] and record["error"]["code"] for record in records]
    assert codes == [None, "invalid_json", None, "invalid_url", "duplicate_custom_id", "x", "line_too_long"]
    assert records[0]["response"] == {"status_code": 200, "request_id": "r-p1", "body": {"text": "P1"}}
    assert sorted(room.asked) == ["p1", "p3", "p6"]
    assert sorted(room.told) == [False] * 5 + [True] * 2


async def test_no_more_lines_than_wished_are_asked_at_a_time(room: JobAgainstApi) -> None:
    await room.run([line(number) for number in range(1, 40)], concurrency=5)
    assert room.most_at_once == 5


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_passes_is_asked_again(room: JobAgainstApi, status: int) -> None:
    def answer(prompt: str) -> httpx.Response:
        return httpx.Response(status, headers={"retry-after": "1"}) if room.asked.count(prompt) < 3 else good(prompt)

    assert await room.run([line(1), line(2)], answer) == Counts(answered=2)
    assert sorted(room.asked) == ["p1"] * 3 + ["p2"] * 3


async def test_engines_that_stay_broken_end_the_run_and_the_next_one_goes_on(room: JobAgainstApi) -> None:
    lines = [line(number) for number in range(1, 9)]

    def broken(prompt: str) -> httpx.Response:
        return httpx.Response(503, text="none is running") if prompt == "p5" else good(prompt)

    with pytest.raises(BatchStuck, match=r"line 5: no answer in 3 tries; the last: 503 none is running"):
        await room.run(lines, broken, concurrency=1)
    assert not room.output.exists()
    assert room.asked == ["p1", "p2", "p3", "p4", "p5", "p5", "p5"]
    assert await room.run(lines) == Counts(answered=8)
    assert len(room.told) == 8
    assert room.asked[7:] == ["p5", "p6", "p7", "p8"]
    assert [record["custom_id"] for record in room.written()] == [f"c{number}" for number in range(1, 9)]


@pytest.mark.parametrize("count", [1, 6])
async def test_a_line_that_always_fails_while_others_are_answered_does_not_hold_up_the_batch(
    room: JobAgainstApi, count: int
) -> None:
    def answer(prompt: str) -> httpx.Response:
        failed = {"error": {"code": "engine_failed", "message": "no finite number"}}
        return httpx.Response(500, json=failed) if prompt == "p1" else good(prompt)

    assert await room.run([line(number) for number in range(1, count + 1)], answer) == Counts(count - 1, failed=1)
    assert room.asked.count("p1") == 3
    assert room.written()[0]["error"] == {"code": "engine_failed", "message": "no finite number"}
    assert room.written()[0]["response"]["status_code"] == 500


@pytest.mark.parametrize("status", [500, 503])
async def test_engines_that_fail_at_every_line_end_the_run(room: JobAgainstApi, status: int) -> None:
    with pytest.raises(BatchStuck, match=f"no answer in 3 tries; the last: {status}"):
        await room.run([line(number) for number in range(1, 20)], lambda _: httpx.Response(status, json={}))
    assert room.told == []


async def test_a_journal_that_cannot_be_written_ends_the_run_with_the_reason(
    room: JobAgainstApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "add", full)
    with pytest.raises(OSError, match="No space left"):
        await room.run([line(1), line(2)])
