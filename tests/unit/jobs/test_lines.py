"""Lines of a batch file: what is a call, and what is told of a line that is none."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from serve_app.jobs import lines as module
from serve_app.jobs.lines import BadLine, Call, Line, answered, output_id, parse_line, read_lines, refused

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hi"}]},
}


def line(content: object, number: int = 7) -> Line:
    return Line(number, content if isinstance(content, bytes) else json.dumps(content).encode())


def test_a_good_line_is_a_call() -> None:
    assert parse_line(line(GOOD)) == Call("a", "/v1/chat/completions", GOOD["body"])
    without_method = {key: value for key, value in GOOD.items() if key != "method"}
    assert parse_line(line(without_method)).custom_id == "a"


@pytest.mark.parametrize(
    ("content", "code", "custom_id", "told"),
    [
        (b"{", "invalid_json", None, "not JSON"),
        (b"\xff\xfe", "invalid_json", None, "not JSON"),
        (b"[" * 100_000, "invalid_json", None, "not JSON"),
        ([1], "invalid_line", None, "must be an object, not list"),
        ({**GOOD, "custom_id": ""}, "invalid_line", None, "custom_id"),
        ({**GOOD, "custom_id": 5}, "invalid_line", None, "custom_id"),
        ({**GOOD, "method": "GET"}, "invalid_line", "a", "method must be POST, not 'GET'"),
        ({**GOOD, "url": "/v1/embeddings"}, "invalid_url", "a", "not '/v1/embeddings'"),
        ({**GOOD, "url": ["x"]}, "invalid_url", "a", "url must be one of"),
        ({**GOOD, "body": None}, "invalid_line", "a", "body must be an object"),
        ({**GOOD, "body": {**GOOD["body"], "stream": True}}, "invalid_line", "a", "body.stream"),
    ],
)
def test_a_bad_line_says_which_it_is_and_what_is_wrong(
    content: object, code: str, custom_id: str | None, told: str
) -> None:
    with pytest.raises(BadLine) as bad:
        parse_line(line(content))
    assert (bad.value.code, bad.value.custom_id) == (code, custom_id)
    assert told in str(bad.value)
    assert str(bad.value).startswith("line 7: ")
    record = refused(line(content), bad.value)
    assert record["response"] is None
    assert record["error"] == {"code": code, "message": str(bad.value)}


def test_an_answer_of_the_api_is_the_response_and_a_refusal_is_an_error_too() -> None:
    asked = line(GOOD)
    call = parse_line(asked)
    good = answered(asked, call, 200, "r1", {"choices": []})
    assert good == {
        "id": output_id(asked),
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r1", "body": {"choices": []}},
        "error": None,
    }
    body = {"error": {"message": "max_tokens must be at least 1, not 0", "code": None}}
    bad = answered(asked, call, 400, "r2", body)
    assert bad["response"]["status_code"] == 400
    assert bad["error"] == {"code": "400", "message": "max_tokens must be at least 1, not 0"}


def test_the_id_of_a_record_stays_and_differs_between_lines() -> None:
    assert output_id(line(GOOD)) == output_id(line(GOOD))
    assert len({output_id(line(GOOD, number)) for number in range(50)}) == 50


def test_lines_are_numbered_as_in_an_editor_and_empty_ones_skipped(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\n{"a": 1}\r\n  \n{"b": 2}')
    assert list(read_lines(file)) == [Line(2, b'{"a": 1}'), Line(4, b'{"b": 2}')]


LIMIT = 100


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE", LIMIT)


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("length", [LIMIT + 1, LIMIT + 2, 2 * LIMIT + 1, 2**20 + LIMIT + 1, 3 * 2**20])
def test_a_line_that_is_too_long_has_its_error_in_its_place_and_the_next_is_read(
    tmp_path: Path, length: int, end: bytes
) -> None:
    file = tmp_path / "in.jsonl"
    long, fitting = b"x" * length, b"y" * LIMIT
    file.write_bytes(b"\n".join([b"{}", long, b"", long[:-1] + b"z", fitting, long]) + end)
    lines = list(read_lines(file))
    assert [(found.number, found.text) for found in lines] == [(1, b"{}"), (2, b""), (4, b""), (5, fitting), (6, b"")]
    assert len({found.digest for found in lines[:4]}) == 4, "by them a job that goes on knows what it has done"
    assert len({output_id(found) for found in lines}) == 5
    for found in (lines[1], lines[2], lines[4]):
        with pytest.raises(BadLine) as bad:
            parse_line(found)
        assert str(bad.value) == f"line {found.number}: more than {LIMIT} bytes"
        error = refused(found, bad.value)["error"]
        assert error == {"code": "line_too_long", "message": str(bad.value)}
    assert list(read_lines(file)) == lines


@pytest.mark.usefixtures("small_limit")
def test_a_line_is_as_long_as_it_may_be_with_its_end_and_without(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    fitting = b"y" * LIMIT
    for content in (fitting, fitting + b"\n", fitting + b"\n" + fitting + b"\n"):
        file.write_bytes(content)
        assert {found.text for found in read_lines(file)} == {fitting}
        assert {found.digest for found in read_lines(file)} == {hashlib.sha256(fitting).hexdigest()}


def test_memory_is_bounded_however_long_a_line_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2**16
    monkeypatch.setattr(module, "LONGEST_LINE", limit)
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"x" * 64 * 2**20 + b"\n{}\n")
    tracemalloc.start()
    try:
        assert [found.number for found in read_lines(file)] == [1, 2]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * limit + 4 * module._PIECE
