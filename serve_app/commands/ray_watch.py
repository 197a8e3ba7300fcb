"""Whether the Ray that an application runs on is there, while it serves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping

import psutil

from serve_app.cluster.port_watch import PortWatch, head_watch
from serve_app.commands.console import fail
from serve_app.commands.local_ray import APPLICATION, RaySession
from serve_app.commands.orphans import reap_adopted
from serve_app.commands.ray_startup import end_of, needed_children

_LOOK_SECONDS = 1.0
_STATUS_SECONDS = 5.0
_SERVE_PATIENCE_SECONDS = 60.0
_NODE_PATIENCE_SECONDS = 2.0


class RayLost(Exception):
    """A process that Ray cannot be without is gone; the message names it."""


class OwnRay:
    """One that this process started: it knows how its children end."""

    def __init__(self) -> None:
        self._needed: list[tuple[psutil.Process, str]] = needed_children()
        self._started = {child.pid for child in psutil.Process().children()}

    def check(self) -> None:
        """Raises RayLost."""
        reap_adopted(self._started)
        for process, what in self._needed:
            if (how := end_of(process)) is not None:
                raise RayLost(f"{what}, process {process.pid}, has ended {how}: without it no Ray can run")


class JoinedRay:
    """One that others run: what it needs is asked for a connection."""

    def __init__(self, needed: Mapping[str, PortWatch]) -> None:
        """By what they are."""
        self._needed = needed

    def check(self) -> None:
        """Raises RayLost. Says so when something does not answer, and may answer again."""
        for what, watch in self._needed.items():
            answered = watch.silent_since is None
            lost = asyncio.run(watch.lost())
            if lost:
                raise RayLost(f"{what} at {watch.address} has not answered for {watch.patience:.0f} s")
            if answered and watch.silent_since is not None:
                fail(f"{what} at {watch.address} does not answer; this command ends if it stays so")


def joined_ray() -> JoinedRay:
    """The one that this process is in."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == own]
    at = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return JoinedRay(
        {
            "the head of the cluster (GCS)": head_watch(),
            "this machine's node process (raylet)": PortWatch(at, _NODE_PATIENCE_SECONDS),
        }
    )


def watch_until_gone(session: RaySession) -> str:
    """Returns when the application is gone, and what is known of that; a signal leaves by KeyboardInterrupt. Raises
    RayLost."""
    ray = OwnRay() if session.owned else joined_ray()
    # Beside: Serve may be waited for long where a process of Ray is gone.
    reasons: list[str] = []
    asking = threading.Thread(target=lambda: reasons.append(_until_gone()), name="watch", daemon=True)
    asking.start()
    while asking.is_alive():
        asking.join(_LOOK_SECONDS)
        ray.check()
    return reasons[0]


def _until_gone() -> str:
    from ray import serve

    answered = time.monotonic()
    while True:
        time.sleep(_STATUS_SECONDS)
        try:
            if APPLICATION not in serve.status().applications:
                return "the application was deleted by someone else"
            answered = time.monotonic()
        except Exception as error:  # whatever Ray raises; Serve's controller may be on its way to another process
            if time.monotonic() > answered + _SERVE_PATIENCE_SECONDS:
                return f"Serve does not answer any more: {error}"
