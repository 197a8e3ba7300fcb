"""The JSON object in a request's body, within a limit on its bytes, on its depth, and on the values in it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from serve_app.ingress.encodings import check_encoding, unpacked
from serve_app.ingress.errors import ApiError, too_large

# No schema that the grammar library reads is deeper.
MAX_DEPTH = 128
# Of all that is no token id of a prompt: of the largest conversations and tools that are in use a tenth.
MAX_VALUES = 2**17


async def read_body(request: Request, limit: int) -> bytes:
    """Unpacked, if it was compressed. Raises ApiError: 413 beyond `limit` bytes, packed or not, whether announced or
    not; 415 for what is no JSON by its type, or packed in an unknown way."""
    _check_type(request.headers.get("content-type", ""))
    encoding = request.headers.get("content-encoding", "identity").strip().lower().removeprefix("x-")
    if encoding != "identity":
        check_encoding(encoding)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large(limit)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise too_large(limit)
    # The thread leaves the interpreter to others for most of its work.
    return bytes(data) if encoding == "identity" else await asyncio.to_thread(unpacked, bytes(data), encoding, limit)


def _check_type(content_type: str) -> None:
    """Also keeps out what a browser sends for pages of other origins without asking first."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    difference = f"not '{kind[:100]}'" if kind else "and this one has no type"
    message = f"The body must be JSON by its type, {difference}: send the header 'Content-Type: application/json'."
    raise ApiError(415, message, code="unsupported_media_type")


def json_object(data: bytes, *, uncounted: frozenset[str] = frozenset()) -> dict[str, object]:
    """Raises ApiError 400 for what is no JSON object, or one that is too deep, or has too many values.

    `uncounted`: fields that may hold as many values as there are bytes, such as token ids.

    NaN and Infinity pass, so that the field that holds one can be named by the checks that follow.
    """
    try:
        content = json.loads(data.decode())
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # no UTF-8, no JSON, or an integer of thousands of digits
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    _check_structure(data, content, uncounted)
    return content


def _check_structure(data: bytes, content: dict[str, Any], uncounted: frozenset[str]) -> None:
    # There are no more levels than there are brackets, and no more values than brackets and commas: nearly always that
    # is enough to know.
    brackets = data.count(b"[") + data.count(b"{")
    if brackets <= MAX_DEPTH and brackets + data.count(b",") <= MAX_VALUES:
        return
    values = 0
    level: list[Any] = [value for name, value in content.items() if name not in uncounted]
    for _ in range(MAX_DEPTH):
        values += len(level)
        if values > MAX_VALUES:
            raise ApiError(400, f"The body has more than {MAX_VALUES} values.", code="invalid_json")
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer if isinstance(outer, list) else outer.values())
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"The body is nested too deeply: at most {MAX_DEPTH} levels are allowed.", code="invalid_json")
