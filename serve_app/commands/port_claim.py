"""One server on a port. Serve binds so that several processes may share an address, and the system then deals out the
connections among them: of two servers that start at the same moment neither would notice."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from serve_app.local_ports import BindRefused

_ANY = ("0.0.0.0", "::")


@contextmanager
def claim_port(host: str, port: int) -> Iterator[None]:
    """The address is ours for the time of the block, among all servers of this user. One that listens on every address
    of the port shares it with nobody. Raises BindRefused at once if it is another's."""
    address = _address(host)
    with ExitStack() as held:
        try:
            held.enter_context(_lock(f"{port}", exclusive=address in _ANY))
            held.enter_context(_lock(f"{port}-{address}", exclusive=True))
        except OSError as error:
            why = "another server has it, or is starting there" if isinstance(error, BlockingIOError) else str(error)
            raise BindRefused(f"cannot listen on {host}:{port}: {why}; choose another --port") from None
        yield


@contextmanager
def _lock(name: str, *, exclusive: bool) -> Iterator[None]:
    """Gone with the process that holds it, however that ends. Raises OSError, BlockingIOError if it is held."""
    path = Path(tempfile.gettempdir(), f"moorage-{os.getuid()}-port-{name}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def strangers_on(host: str, port: int) -> list[int]:
    """Processes that listen on this address and are neither this one nor have been started by it."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    address = _address(host)
    return sorted(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.pid is not None
        and connection.pid not in own
        and connection.laddr.port == port
        and _overlap(connection.laddr.ip, address)
    )


def _overlap(one: str, other: str) -> bool:
    return (":" in one) == (":" in other) and (one == other or one in _ANY or other in _ANY)


def _address(host: str) -> str:
    """As the system writes it. What has none is for the bind to refuse."""
    host = host.strip("[]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host
