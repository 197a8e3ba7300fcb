"""While Ray starts, what it waits for is watched, and signals stay ours."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private import node, services, utils

from serve_app.commands.ray_startup import RayEnded, attentive_start

NOBODY_YET = RuntimeError("GCS cannot find the node")


def needed_process(folder: Path, name: str, code: str) -> subprocess.Popen[bytes]:
    """A child that the system knows by this name."""
    program = folder / name
    program.symlink_to(sys.executable)
    return subprocess.Popen([str(program), "-c", code])


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_process_that_has_ended_ends_the_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, starting: list[subprocess.Popen[bytes]], name: str
) -> None:
    """And one of that name that was there before the start is none of it."""
    starting.append(needed_process(tmp_path, name, "raise SystemExit(3)"))

    def get_node(*_: Any) -> None:
        if len(starting) == 1:
            (tmp_path / name).unlink()
            starting.append(needed_process(tmp_path, name, "import time; time.sleep(600)"))
        elif starting[1].pid:
            starting[1].kill()
        raise NOBODY_YET

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "60")
    with attentive_start(), pytest.raises(RayEnded, match=rf"\({name}\) has ended with signal 9"):
        services.get_node("127.0.0.1:1", "id")
    assert starting[1].wait() == -signal.SIGKILL  # it was left to whoever started it


def test_the_exit_code_of_a_process_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, starting: list[subprocess.Popen[bytes]]
) -> None:
    def wait_for_port(*_: Any, timeout_ms: int) -> int:
        assert timeout_ms == 1000  # a piece
        if not starting:
            starting.append(needed_process(tmp_path, "gcs_server", "raise SystemExit(3)"))
        raise RuntimeError("no file")

    monkeypatch.setattr(node, "wait_for_persisted_port", wait_for_port)
    with attentive_start(), pytest.raises(RayEnded, match=r"\(gcs_server\) has ended with exit code 3"):
        node.wait_for_persisted_port("folder", "id", "name", timeout_ms=30_000)


def test_a_node_that_is_late_is_waited_for_and_one_that_never_comes_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [NOBODY_YET, NOBODY_YET, {"node_manager_port": 1}]

    def get_node(*_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "600")
    with attentive_start():
        assert services.get_node("127.0.0.1:1", "id") == {"node_manager_port": 1}
    answers = [NOBODY_YET]
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "0")
    with attentive_start(), pytest.raises(TimeoutError, match="not there after 0 s: GCS cannot find the node"):
        services.get_node("127.0.0.1:1", "id")


def test_rays_handler_of_sigterm_does_not_take_the_place_of_ours_and_all_is_as_before_afterwards() -> None:
    before = services.get_node, node.wait_for_persisted_port, utils.set_sigterm_handler
    kept = signal.getsignal(signal.SIGTERM)
    with attentive_start():
        utils.set_sigterm_handler(lambda *_: sys.exit(15))
        assert signal.getsignal(signal.SIGTERM) is kept
    assert (services.get_node, node.wait_for_persisted_port, utils.set_sigterm_handler) == before


def test_a_native_call_waits_for_a_piece_only_and_rays_processes_are_patient() -> None:
    """In a process of its own: Ray reads the setting once."""
    code = (
        "import os, sys\n"
        "from serve_app.commands.ray_startup import import_ray_impatiently\n"
        "import_ray_impatiently()\n"
        "assert os.environ['RAY_raylet_start_wait_time_s'] == sys.argv[1], os.environ\n"
    )
    for given, handed_on in (({}, "120"), ({"RAY_raylet_start_wait_time_s": "77"}, "77")):
        subprocess.run([sys.executable, "-c", code, handed_on], env={"PATH": "/usr/bin", **given}, check=True)


def test_a_start_leaves_the_handler_of_sigterm_as_it_was_and_no_alarm() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with attentive_start():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(100)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.alarm(0) == 0
