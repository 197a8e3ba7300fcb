"""The HTTP answer to a turn, streamed or whole, from the same events.

The whole turn lives inside the response, so that every way out of it closes the turn: the end, a stop string,
an error, a client that leaves before or after the first byte, and the cancellation of this task.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine_actor.messages import TurnAccepted
from serve_app.ingress.disconnect import ClientGone, until_disconnect
from serve_app.ingress.errors import CLIENT_GONE, ApiError, internal_error
from serve_app.ingress.request_log import record_of
from serve_app.openai.choices import Piece, joined
from serve_app.openai.formats import AnswerFormat
from serve_app.openai.keep_alive import KeepAlive
from serve_app.openai.turns import AnswerEvent, ChoiceEnd, Finished

log = logging.getLogger("moorage.http")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would collect the stream
]


class TurnResponse(Response):
    """The status goes out only after a replica has accepted the turn: before that, any error is a plain
    answer."""

    def __init__(self, events: AsyncGenerator[AnswerEvent, None], form: AnswerFormat, *, stream: bool) -> None:
        """`events` must not have begun: whoever sends this response begins and closes them."""
        self._events = events
        self._form = form
        self._stream = stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._answer(scope, receive, send))
        except ClientGone:
            record_of(scope).status = CLIENT_GONE

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        async with aclosing(self._events) as events:
            accepted = await anext(events)
            assert isinstance(accepted, TurnAccepted)
            record.replica = accepted.replica
            record.prompt_tokens, record.cached_tokens = accepted.prompt_tokens, accepted.cached_tokens
            replica = {"x-moorage-replica": accepted.replica}
            if self._stream:
                await self._send_stream(events, replica, scope, send)
            else:
                content = await self._whole(events, scope)
                await JSONResponse(content, headers=replica)(scope, receive, send)

    async def _whole(self, events: AsyncGenerator[AnswerEvent, None], scope: Scope) -> dict[str, object]:
        pieces: list[Piece] = []
        async for event in events:
            if isinstance(event, Piece):
                pieces.append(event)
            elif isinstance(event, Finished):
                record_of(scope).count(event.usage.cached_tokens, event.usage.completion_tokens)
                return self._form.whole(joined(pieces, len(event.reasons)), event)
        raise AssertionError("an answer ends with Finished or an error")

    async def _send_stream(
        self, events: AsyncGenerator[AnswerEvent, None], replica: dict[str, str], scope: Scope, send: Send
    ) -> None:
        headers = [*_STREAM_HEADERS, *((k.encode(), v.encode("latin-1")) for k, v in replica.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(body: bytes, *, more: bool = True) -> None:
            try:
                await send({"type": "http.response.body", "body": body, "more_body": more})
            except OSError:
                raise ClientGone from None  # how some servers say that the client has left

        form, last = self._form, b""
        try:
            if opening := form.opening():
                await write(opening)
            async with KeepAlive(write) as stream:
                async for event in events:
                    if isinstance(event, Piece):
                        await stream.write(form.piece(event))
                    elif isinstance(event, ChoiceEnd):
                        await stream.write(form.ended(event))
                    elif isinstance(event, Finished):
                        record_of(scope).count(event.usage.cached_tokens, event.usage.completion_tokens)
                        last = form.closing(event)
        except ClientGone:
            raise
        except ApiError as error:
            log.warning("request %s failed after its answer had begun: %s", record_of(scope).request_id, error)
            last = form.failed(error)
        except Exception:
            log.exception("request %s failed after its answer had begun", record_of(scope).request_id)
            last = form.failed(internal_error())
        # A server that has all of an answer says that its client has left, so nothing may come after it.
        await write(last, more=False)
