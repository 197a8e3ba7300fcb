from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve_app.cluster.client import HandleEngineClient
from serve_app.cluster.port_watch import PortWatch
from serve_app.commands.ray_watch import JoinedRay, OwnRay, RayLost
from tests.support.failing_replicas import Replicas


@contextmanager
def child(folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this name, which does nothing."""
    program = folder / name
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    process = subprocess.Popen([program, "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("name", "said"), [("raylet", "node process (raylet)"), ("gcs_server", "head process (gcs_server)")]
)
def test_a_process_of_our_own_ray_that_has_ended_is_named(tmp_path: Path, name: str, said: str) -> None:
    with child(tmp_path, name) as needed, child(tmp_path, "dashboard") as other:
        ray = OwnRay()
        other.kill()
        other.wait()
        ray.check()
        needed.send_signal(signal.SIGKILL)
        with pytest.raises(RayLost) as lost:
            while True:
                ray.check()
        assert str(lost.value) == (
            f"Ray's {said}, process {needed.pid}, has ended with signal 9: without it no Ray can run"
        )
        needed.wait()  # somebody reaps it
        with pytest.raises(RayLost, match="is not known any more"):
            ray.check()


def listener(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_a_joined_ray_that_stays_silent_is_lost_and_one_that_comes_back_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = listener()
    port = there.getsockname()[1]
    patient, impatient = PortWatch(f"127.0.0.1:{port}", 3600.0), PortWatch(f"127.0.0.1:{port}", 0.0)
    ray = JoinedRay({"the head": patient})
    ray.check()
    there.close()
    for _ in range(3):
        ray.check()
    assert capsys.readouterr().err.count(f"the head at 127.0.0.1:{port} does not answer") == 1
    with listener(port):
        ray.check()
        assert patient.silent_since is None
        JoinedRay({"the head": impatient}).check()
    with pytest.raises(RayLost, match=f"the head at 127.0.0.1:{port} has not answered for 0 s"):
        JoinedRay({"the head": impatient}).check()


def test_nothing_is_ready_without_the_head_of_the_cluster() -> None:
    async def ready(head: PortWatch) -> bool:
        return await HandleEngineClient(Replicas(), placement_timeout=1.0, head=head).ready()

    with listener() as there:
        head = PortWatch(f"127.0.0.1:{there.getsockname()[1]}", 0.0)
        assert asyncio.run(ready(head))
    assert not asyncio.run(ready(head))
