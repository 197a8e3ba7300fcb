"""A Ray of our own on this machine, or a place in a cluster that runs already; and Serve on it.

A Ray that we start listens on loopback, wants a token that only this process and its children know, has no
dashboard, and ends with us. One that we join is left as it was, but for our application.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from serve_app.cluster.proxy.limits import CALLBACK, CALLBACK_VARIABLE
from serve_app.commands.tls import TlsFiles
from serve_app.local_ports import is_loopback

logger = logging.getLogger("moorage")

APPLICATION = "moorage"
_STARTS = 2
_CONNECT_SECONDS = 5.0
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RaySession:
    """`owned`: this process started the Ray, and stops it. `folder`: where that Ray keeps its logs."""

    owned: bool
    folder: str
    started_serve: bool = False


def prepare_environment(address: str | None = None) -> None:
    """To be called before ray is imported: these are read then, and inherited by every process that Ray
    starts."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call that comes after the end must fail, not start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if address is None:
        # What stands in Serve's proxy before Serve: bounds, and answers of ours in place of Serve's own.
        os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)
        # Ray lets its workers yield to every other process (niceness 15); a server is what this machine is
        # for.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A replica that fails its health checks has no turn left to finish: its resources are wanted by the next one.
        os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
        # Seconds that a node may take to start: on a machine that is busy, Ray's 30 are too few.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        # Ray's switch for "this machine only", whatever its name says: node address and listeners are
        # loopback.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            # Else Ray makes one itself and leaves it in ~/.ray, readable by others.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def start_ray(address: str | None, *, verbose: bool = False) -> RaySession:
    """Starts a Ray of our own, or joins the one at `address`. Of our own, one start may fail: on an overloaded machine
    one of Ray's processes may be too slow for another. Raises ConnectionError if there is none, or if it does not start
    in time."""
    prepare_environment(address)
    import ray
    from ray import serve  # noqa: F401  # sets up its logger when it is imported

    logging.getLogger("ray.serve").setLevel(logging.INFO if verbose else logging.ERROR)
    if address is not None:
        _require_answer(address)
    for tries_left in reversed(range(1 if address else _STARTS)):
        others = frozenset(psutil.Process().children(recursive=True))
        try:
            context = ray.init(
                address=address or "local",
                namespace=APPLICATION,
                log_to_driver=verbose,
                logging_level="INFO" if verbose else "ERROR",
                **({} if address else {"include_dashboard": False}),
            )
            break
        except Exception as error:  # Ray has no type of its own for a start that failed
            _shut_down(others)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            if address:
                raise ConnectionError(f"the Ray at {address} could not be joined: {reason}") from error
            if not tries_left:
                raise ConnectionError(f"Ray did not start: {reason}. {_where_to_look()}") from error
            logger.warning("Ray did not start, and is started once more: %s", reason)
    return RaySession(owned=address is None, folder=context.address_info["session_dir"])


def _where_to_look() -> str:
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    logs = Path(folder, "ray", "session_latest", "logs")
    load, cores = os.getloadavg()[0], os.cpu_count()
    memory = psutil.virtual_memory().available / 2**30
    disk = psutil.disk_usage(folder).free / 2**30
    return (
        f"Look at raylet.out, raylet.err and gcs_server.out in {logs}, and at this machine, which may be overloaded: "
        f"{load:.1f} processes on {cores} cores, {memory:.1f} GiB of memory and {disk:.1f} GiB of disk are free"
    )


def start_serve(
    session: RaySession,
    host: str,
    port: int,
    tls: TlsFiles | None = None,
    log_format: Literal["text", "json"] = "text",
) -> RaySession:
    """Serve with its HTTP proxy on host:port. A Serve that runs already in a joined cluster keeps its own
    address."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from serve_app.telemetry.logs import logging_config

    try:
        before = bool(serve.status().proxies)
    except RayServeException:
        before = False
    http: dict[str, object] = {"host": host, "port": port}
    if tls is not None:
        http |= tls.serve_options()
    serve.start(
        proxy_location="HeadOnly" if session.owned else "EveryNode",
        http_options=http,
        logging_config=logging_config(log_format),
    )
    return replace(session, started_serve=not before)


def remove_application(session: RaySession) -> None:
    """Returns when the answers that run have ended and the replicas are gone, or their time has run out."""
    from ray import serve

    serve.delete(APPLICATION)
    if session.started_serve and not session.owned and not serve.status().applications:
        serve.shutdown()


def disconnect() -> None:
    """Stops a Ray of our own, and returns when its processes are gone; leaves a cluster that was joined."""
    _shut_down(frozenset())


def _shut_down(others: Collection[psutil.Process]) -> None:
    """`others`: of our children, those that are none of Ray's."""
    import ray

    # Before: what Ray's own processes started is nobody's child once they have ended.
    processes = [process for process in psutil.Process().children(recursive=True) if process not in others]
    ray.shutdown()
    _, left = psutil.wait_procs(processes, timeout=_END_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_END_SECONDS)


def _require_answer(address: str) -> None:
    """Ray itself tries for many minutes. Raises ConnectionError if nothing listens there."""
    import ray

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():  # "auto" is found by Ray, or not at all
        return
    if is_loopback(host):  # as Ray does: a cluster knows its nodes by addresses that others can reach
        host = ray.util.get_node_ip_address()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"no Ray answers at {host}:{port}: {error}") from None
