"""Of two servers on a port one is told."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serve_app.commands.port_claim import claim_port, strangers_on
from serve_app.local_ports import BindRefused

PORT = 1  # nobody listens there: a claim is no bind


def refused(host: str, port: int = PORT) -> bool:
    try:
        with claim_port(host, port):
            return False
    except BindRefused as error:
        assert f"cannot listen on {host}:{port}: another server has it" in str(error)
        return True


@pytest.mark.parametrize(
    ("held", "asked", "fails"),
    [
        ("127.0.0.1", "127.0.0.1", True), ("127.0.0.1", "localhost", True), ("127.0.0.1", "0.0.0.0", True),
        ("0.0.0.0", "127.0.0.1", True), ("::", "127.0.0.1", True), ("[::1]", "::1", True),
        ("127.0.0.1", "127.0.0.2", False), ("127.0.0.1", "::1", False),
    ],
)  # fmt: skip
def test_an_address_is_claimed_once(held: str, asked: str, fails: bool) -> None:
    with claim_port(held, PORT):
        assert refused(asked) == fails
        assert not refused(asked, PORT + 1)
    assert not refused(asked)


def test_a_claim_ends_with_its_process() -> None:
    code = (
        f"import os\nfrom serve_app.commands.port_claim import claim_port\n"
        f"with claim_port('127.0.0.1', {PORT}):\n print(flush=True); input(); os._exit(9)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert refused("127.0.0.1")
        other.communicate(b"\n")
    assert not refused("127.0.0.1")


@contextmanager
def listening(host: str, port: int) -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_stranger_that_shares_the_port_is_found() -> None:
    """One that has been started elsewhere: its parent has ended."""
    code = (
        "import os, socket, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print(os.getpid(), flush=True); sys.stdin.read()"
    )
    with listening("127.0.0.1", 0) as port:
        assert strangers_on("127.0.0.1", port) == []
        command = [sys.executable, "-c", code, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            pid = int(other.stdout.readline())
            assert other.wait(30) == 0
            assert strangers_on("127.0.0.1", port) == [pid]
            assert strangers_on("0.0.0.0", port) == [pid]
            assert strangers_on("127.0.0.2", port) == []
