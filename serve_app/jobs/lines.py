"""The lines of a batch file, as OpenAI has them: what is asked, and what comes of it.

In:   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
Out:  {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
       "error": null}

A line that asks for nothing that can be done has an error and no response. One that the API refuses has the API's
answer as its response, and an error too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

URLS = ("/v1/chat/completions", "/v1/completions")
LONGEST_LINE = 64 * 2**20
_PIECE = 2**20


class BadLine(ValueError):
    """`custom_id` is None where the line does not tell one."""

    def __init__(self, custom_id: str | None, code: str, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id
        self.code = code


@dataclass(frozen=True, slots=True)
class Line:
    """`number` counts from 1 and includes empty lines, as editors do. A line that is too long to be kept has no text,
    but the digest of it."""

    number: int
    text: bytes
    digest_of_long: str | None = None

    @property
    def digest(self) -> str:
        return self.digest_of_long or hashlib.sha256(self.text).hexdigest()


@dataclass(frozen=True, slots=True)
class Call:
    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path) -> Iterator[Line]:
    """All lines but empty ones. Of a line longer than LONGEST_LINE no more than that is in memory at a time. Raises
    OSError."""
    with path.open("rb") as file:
        for number in count(1):
            text = file.readline(LONGEST_LINE + 1)
            if not text:
                return
            if len(text) > LONGEST_LINE and not text.endswith(b"\n"):
                digest = hashlib.sha256(text)
                del text
                yield Line(number, b"", _read_over(file, digest))
            elif stripped := text.strip():
                yield Line(number, stripped)


def _read_over(file: BinaryIO, digest: hashlib._Hash) -> str:
    """To the end of the line whose beginning `digest` has; returns that of the whole line."""
    while piece := file.readline(_PIECE):
        digest.update(piece)
        if piece.endswith(b"\n"):
            break
    return digest.hexdigest()


def parse_line(line: Line) -> Call:
    """Raises BadLine. What is in the body is the API's to judge."""
    where = f"line {line.number}"
    if line.digest_of_long is not None:
        raise BadLine(None, "line_too_long", f"{where}: more than {LONGEST_LINE} bytes")
    try:
        content = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise BadLine(None, "invalid_json", f"{where}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadLine(None, "invalid_line", f"{where}: must be an object, not {type(content).__name__}")
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(None, "invalid_line", f"{where}: custom_id must be a text of one character or more")
    method, url, body = content.get("method", "POST"), content.get("url"), content.get("body")
    if method != "POST":
        raise BadLine(custom_id, "invalid_line", f"{where}: method must be POST, not {method!r}")
    if url not in URLS:
        raise BadLine(custom_id, "invalid_url", f"{where}: url must be one of {', '.join(URLS)}, not {url!r}")
    if not isinstance(body, dict):
        raise BadLine(custom_id, "invalid_line", f"{where}: body must be an object, not {type(body).__name__}")
    if body.get("stream"):
        raise BadLine(custom_id, "invalid_line", f"{where}: body.stream has no meaning in a batch: remove it")
    return Call(custom_id, url, body)


def answered(line: Line, call: Call, status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """The output line of a call that the API has answered."""
    error = None
    if status != 200:
        api_error = body.get("error", {})
        error = {"code": api_error.get("code") or str(status), "message": api_error.get("message", f"status {status}")}
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output(line, call.custom_id, response, error)


def refused(line: Line, bad: BadLine) -> dict[str, Any]:
    """The output line of a line that is no call."""
    return _output(line, bad.custom_id, None, {"code": bad.code, "message": str(bad)})


def output_id(line: Line) -> str:
    """The same each time that this line is asked, so that a job which starts again changes nothing."""
    return f"batch_req_{hashlib.sha256(f'{line.number}:{line.digest}'.encode()).hexdigest()[:24]}"


def _output(line: Line, custom_id: str | None, response: object, error: object) -> dict[str, Any]:
    return {"id": output_id(line), "custom_id": custom_id, "response": response, "error": error}
