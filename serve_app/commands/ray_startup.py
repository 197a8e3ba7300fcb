"""`ray.init`, made to listen while it waits: to signals, and to the end of the processes that it waits for.

By itself it waits for its node inside native calls of up to two minutes, in which Python runs no handler of a signal,
and it goes on waiting when the node has ended. And it puts SIGTERM handlers of its own in the place of ours: one in
Python, and a native one that calls ours, but first sets an alarm which aborts the process three seconds later. Ray has
no setting for any of it, so three functions of its start are replaced while it runs, and our handler is put back when
it is over; `pyproject.toml` pins the version.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

# Seconds that a node may take to start: on a machine that is busy, Ray's 30 are too few.
NODE_SECONDS = 120.0
# Of one native call, after which Python looks at signals and at the processes.
_PIECE_SECONDS = 1
_WAIT_VARIABLE = "RAY_raylet_start_wait_time_s"
_NEEDED = {"raylet": "Ray's node process (raylet)", "gcs_server": "Ray's head process (gcs_server)"}


class RayEnded(Exception):
    """A process that the start needs has ended; the message says which one, and how."""


def import_ray_impatiently() -> None:
    """Imports Ray such that a native call of this process waits for one piece only. Ray's own processes have the value
    that is in the environment now, or the long one."""
    seconds = os.environ.get(_WAIT_VARIABLE) or f"{NODE_SECONDS:.0f}"
    os.environ[_WAIT_VARIABLE] = str(_PIECE_SECONDS)
    try:
        from ray._raylet import Config  # type: ignore[attr-defined]  # its stub leaves it out

        Config.raylet_client_num_connect_attempts()  # its settings are read from the environment once, at the first use
    finally:
        os.environ[_WAIT_VARIABLE] = seconds


@contextmanager
def attentive_start() -> Iterator[None]:
    """Around `ray.init`: signals are handled within a second or two, and RayEnded is raised as soon as a process of the
    new Ray has ended."""
    from ray._private import node, services, utils

    earlier = {child.pid for child in psutil.Process().children()}
    get_node, wait_for_port = services.get_node, node.wait_for_persisted_port

    def get_node_in_pieces(*arguments: Any) -> Any:
        return _in_pieces(lambda: get_node(*arguments), float(os.environ[_WAIT_VARIABLE]), earlier)

    def wait_for_port_in_pieces(*arguments: Any, timeout_ms: int, **options: Any) -> Any:
        piece = min(timeout_ms, 1000 * _PIECE_SECONDS)
        return _in_pieces(lambda: wait_for_port(*arguments, timeout_ms=piece, **options), timeout_ms / 1000, earlier)

    with (
        _replaced(services, "get_node", get_node_in_pieces),
        _replaced(node, "wait_for_persisted_port", wait_for_port_in_pieces),
        _replaced(utils, "set_sigterm_handler", lambda handler: None),
        _kept_sigterm_handler(),
    ):
        yield


@contextmanager
def _kept_sigterm_handler() -> Iterator[None]:
    """Only the main thread can have one. Python does not see a native handler, and replaces it when it sets one."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.alarm(0)


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def _in_pieces(call: Callable[[], Any], seconds: float, earlier: set[int]) -> Any:
    """`call` until it raises no RuntimeError, for so many seconds. `earlier`: children that are not of this start."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except RuntimeError as error:
            _require_running(earlier)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"Ray's node was not there after {seconds:.0f} s: {first_line(error)}") from error


def _require_running(earlier: set[int]) -> None:
    """Raises RayEnded."""
    for child, what in needed_children():
        if child.pid not in earlier and (how := end_of(child)) is not None:
            raise RayEnded(f"{what} has ended {how}")


def needed_children() -> list[tuple[psutil.Process, str]]:
    """Children of this process that a Ray cannot be without, and what they are; also such as have ended."""
    children = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if (what := _NEEDED.get(child.name())) is not None:
                children.append((child, what))
    return children


def end_of(child: psutil.Process) -> str | None:
    """How it has ended, in words; None while it runs. Looks without reaping: that is for whoever started it."""
    try:
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None if child.is_running() else "with a status that is not known any more"
    if ended is None:
        return None
    return f"with {'exit code' if ended.si_code == os.CLD_EXITED else 'signal'} {ended.si_status}"


def first_line(error: BaseException) -> str:
    """What Ray says, without the advice that it adds."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
