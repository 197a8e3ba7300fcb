"""A Ray that does not start is started once more, from a clean floor."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from serve_app.commands import local_ray
from serve_app.commands.local_ray import RaySession, disconnect, start_ray

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Starter:
    """In the place of Ray: each start leaves a process behind, and fails as it is told."""

    def __init__(self, *failures: Exception | None) -> None:
        self._failures = list(failures)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.alive_at_start: list[int] = []
        self.addresses: list[str] = []
        self.shutdowns = 0

    def init(self, address: str, **_: Any) -> Any:
        self.addresses.append(address)
        self.alive_at_start.append(sum(psutil.pid_exists(process.pid) for process in self.processes))
        self.processes.append(subprocess.Popen(SLEEP))
        if (failure := self._failures.pop(0)) is not None:
            raise failure
        return SimpleNamespace(address_info={"session_dir": "/logs"})

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "prepare_environment", lambda _: None)
    monkeypatch.setattr(local_ray, "_END_SECONDS", 0.2)
    monkeypatch.setattr(local_ray, "find_ray", lambda address: address)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that is none of Ray's."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def put(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", starter.init)
    monkeypatch.setattr(ray, "shutdown", starter.shutdown)


def end(starter: Starter) -> None:
    for process in starter.processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("failure", [TimeoutError("the node timed out\nand more"), RuntimeError(), OSError(28, "full")])
def test_one_start_may_fail_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other: subprocess.Popen[bytes],
    failure: Exception,
) -> None:
    starter = Starter(failure, None)
    put(starter, monkeypatch)
    attempts: list[str] = []

    @contextmanager
    def attempt(name: str) -> Iterator[None]:
        """As a step: when the second begins, the first has ended, and so have its processes."""
        try:
            yield
        finally:
            attempts.append(f"{name}: {sum(process.poll() is None for process in starter.processes)} alive")

    with caplog.at_level(logging.WARNING, "moorage"):
        assert start_ray(None, attempt=attempt) == RaySession(owned=True, folder="/logs")
    assert attempts == ["Ray: 0 alive", "Ray, once more: 1 alive"]
    assert starter.addresses == ["local", "local"]
    assert starter.alive_at_start == [0, 0] and starter.shutdowns == 1
    assert starter.processes[1].poll() is None and other.poll() is None
    reason = str(failure).partition("\n")[0] or "RuntimeError"
    assert [record.getMessage() for record in caplog.records] == [
        f"Ray did not start, and is started once more: {reason}"
    ]
    end(starter)


def test_a_second_failure_says_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes], tmp_path: Any
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    starter = Starter(TimeoutError("slow"), TimeoutError("slow again"))
    put(starter, monkeypatch)
    with pytest.raises(ConnectionError, match=r"Ray did not start: slow again\. Look at raylet\.out") as told:
        start_ray(None)
    assert f"{tmp_path}/ray/session_latest/logs" in str(told.value)
    assert "GiB of memory" in str(told.value) and "GiB of disk" in str(told.value)
    assert all(not psutil.pid_exists(process.pid) for process in starter.processes)
    assert other.poll() is None


def test_a_cluster_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Starter(RuntimeError("wrong token"))
    put(starter, monkeypatch)
    with pytest.raises(ConnectionError, match=r"what answers at 10\.0\.0\.1:6379 could not be joined: wrong token"):
        start_ray("10.0.0.1:6379")
    assert starter.addresses == ["10.0.0.1:6379"]


def test_nothing_is_tried_again_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Starter()
    put(starter, monkeypatch)

    def interrupt(**_: Any) -> None:
        starter.addresses.append("local")
        starter.processes.append(subprocess.Popen(SLEEP))
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_ray(None)
    assert starter.addresses == ["local"]
    assert not psutil.pid_exists(starter.processes[0].pid)


def test_a_thread_that_still_asks_serve_starts_no_other_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Starter(None, None)
    put(starter, monkeypatch)
    start_ray(None)
    for _ in range(2):
        disconnect()
        with pytest.raises(ConnectionError, match="has shut down its Ray"):
            ray.init(namespace="serve")
    start_ray(None)
    assert len(starter.addresses) == 2
    end(starter)
