"""Every error that a client sees has OpenAI's envelope, on every route and status.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from engine_actor.messages import Failure, RefusalCode, TurnRefused
from serve_app.ingress.disconnect import ClientGone

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
CLIENT_GONE = 499  # nobody is left to read a status; for the log only
_MAX_MESSAGE = 1000
_RETRY_SECONDS = 1.0


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault, dotted for nested ones."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes."""
        constructor = partial(
            ApiError, self.status, self.message, type=self.type, param=self.param, code=self.code, headers=self.headers
        )
        return constructor, ()

    def envelope(self) -> dict[str, object]:
        error = {
            "message": _printable(self.message),
            "type": self.type,
            "param": None if self.param is None else _printable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        return JSONResponse(self.envelope(), self.status, self.headers)


def _printable(text: str) -> str:
    """Bounded, and free of the lone surrogates that a client can put into a name or value we quote."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."


def bad_value(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def not_supported(param: str, remedy: str = "remove it") -> ApiError:
    """`remedy`: what the client can do."""
    message = f"`{param}` is not supported by this server: {remedy}."
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(prompt_tokens: int, limit: int, param: str | None, *, at_least: bool = False) -> ApiError:
    """`at_least`: the prompt was not counted, and has so many tokens or more."""
    message = (
        f"This model's maximum context length is {limit} tokens, but the prompt alone has "
        f"{'at least ' if at_least else ''}{prompt_tokens} tokens, and an answer needs at least one. "
        "Please shorten the prompt"
    )
    message += ": truncation is 'auto', but this server drops nothing of it." if param == "truncation" else "."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def model_not_found(model: str) -> ApiError:
    message = f"The model '{_printable(model)[:200]}' does not exist; see /v1/models."
    return ApiError(404, message, param="model", code="model_not_found")


def internal_error() -> ApiError:
    return ApiError(500, "The server had an internal error.", type=SERVER_ERROR, code="internal_error")


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")


def unknown_url(url: str) -> ApiError:
    """`url`: method and path."""
    return ApiError(404, f"Unknown path: {url}", code="unknown_url")


def retry_later(status: int, message: str, code: str, seconds: float) -> ApiError:
    """429 or 503. `Retry-After` is whole seconds, at least 1."""
    kind = "rate_limit_error" if status == 429 else SERVER_ERROR
    return ApiError(status, message, type=kind, code=code, headers={"Retry-After": str(max(1, math.ceil(seconds)))})


def refusal(refused: TurnRefused, prompt_param: str, default_retry: float) -> ApiError:
    """What a client is told when no replica took its turn."""
    seconds = refused.retry_after or default_retry
    match refused.code:
        case RefusalCode.CONTEXT_LENGTH:
            return context_length_exceeded(refused.prompt_tokens, refused.limit, prompt_param)
        case RefusalCode.INVALID:
            return ApiError(400, refused.message)
        case RefusalCode.GRAMMAR:
            return ApiError(400, refused.message, code=str(refused.code))
        case RefusalCode.SESSION_BUSY | RefusalCode.QUEUE_FULL:
            return retry_later(429, refused.message, str(refused.code), seconds)
        case RefusalCode.UNAVAILABLE:
            return retry_later(503, refused.message, str(refused.code), seconds)


def broken_off(failure: Failure, why: str) -> ApiError:
    """What a client is told of an answer that was accepted and could not be completed."""
    message = f"The answer could not be completed: {why}"
    match failure:
        case Failure.SESSION_DELETED:
            return ApiError(410, message, code=str(failure))  # clients try a 409 again, and would bring it back
        case Failure.GRAMMAR | Failure.CONTEXT_LENGTH:
            return ApiError(400, message, code=str(failure))
        case Failure.UNAVAILABLE:
            return retry_later(503, message, str(failure), _RETRY_SECONDS)
        case Failure.ENGINE:
            headers = {"x-should-retry": "false"}  # for clients that try every 500 again
            return ApiError(500, message, type=SERVER_ERROR, code=str(failure), headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Typed errors and those of the router. Unexpected exceptions are the request log's: it is outermost."""

    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        url = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return unknown_url(url).response()
        code, sentence = None, str(error.detail)
        if error.status_code == 405:
            code, sentence = "method_not_allowed", "Method not allowed for this path"
        return ApiError(error.status_code, f"{sentence}: {url}", code=code, headers=error.headers).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ApiError, typed)
    app.add_exception_handler(ClientDisconnect, gone)  # while it was still sending
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(HTTPException, routing)
