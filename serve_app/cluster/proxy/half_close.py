"""A client that has ended its sending: does it wait for its answer, or has it left?

TCP says the same of both. Only when something is sent to it does a client that has closed its socket answer with a
reset. So it is sent, once, bytes that mean nothing, and then the connection's state is looked at, more and more seldom:
nobody else would notice, since there is nothing left to read.
"""

from __future__ import annotations

import asyncio
import socket

_FIRST_LOOK_SECONDS = 0.005
_SELDOM_SECONDS = 1.0
_TCP_CLOSE = 7  # of Linux' states of a connection: no such connection any more


def can_be_noticed() -> bool:
    """Whether this system tells the state of a connection. Without it, the end of sending is a departure."""
    return hasattr(socket, "TCP_INFO")


class Departure:
    """Breaks the connection as soon as it turns out that the client has left."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, sign: bytes) -> None:
        """`sign`: bytes that may be sent now. Where there are none, those of the answer will do."""
        self._transport, self._loop = transport, loop
        if sign:
            transport.write(sign)
        self._after = _FIRST_LOOK_SECONDS
        self._next = loop.call_later(self._after, self._look)

    def stop(self) -> None:
        self._next.cancel()

    def _look(self) -> None:
        connection = self._transport.get_extra_info("socket")
        if self._transport.is_closing() or connection is None:
            return
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self._transport.abort()
            return
        self._after = min(2 * self._after, _SELDOM_SECONDS)
        self._next = self._loop.call_later(self._after, self._look)
