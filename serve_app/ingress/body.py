"""The JSON object in a request's body, within a limit."""

from __future__ import annotations

import json

from starlette.requests import Request

from serve_app.ingress.errors import ApiError, too_large


async def read_json_object(request: Request, limit: int) -> tuple[dict[str, object], int]:
    """The object and its size in bytes.

    Raises ApiError: 413 beyond `limit` bytes, whether announced or not; 400 for what is no JSON object.

    NaN and Infinity pass, so that the field that holds one can be named by the checks that follow.
    """
    data = await _read(request, limit)
    try:
        content = json.loads(data.decode())
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from error
    except ValueError as error:  # no UTF-8, no JSON, or an integer of thousands of digits
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return content, len(data)


async def _read(request: Request, limit: int) -> bytearray:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large(limit)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise too_large(limit)
    return data
