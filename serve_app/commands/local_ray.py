"""A Ray of our own on this machine, or a place in a cluster that runs already; and Serve on it.

A Ray that we start listens on loopback, wants a token that only this process and its children know, has no
dashboard, and ends with us. One that we join is left as it was, but for our application.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from serve_app.cluster.port_watch import OWN_RAY_VARIABLE
from serve_app.cluster.proxy.limits import CALLBACK, CALLBACK_VARIABLE
from serve_app.commands.orphans import kill_descendants
from serve_app.commands.ray_address import find_ray, not_joined
from serve_app.commands.ray_startup import attentive_start, first_line, import_ray_impatiently
from serve_app.commands.tls import TlsFiles

logger = logging.getLogger("moorage")

APPLICATION = "moorage"
_END_SECONDS = 10.0

Attempt = Callable[[str], AbstractContextManager[object]]


def _unseen(name: str) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


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
    if address is not None:
        # Seconds, and attempts, to reach a cluster: what has accepted a connection and says nothing is none.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "3")
    else:
        os.environ.setdefault(OWN_RAY_VARIABLE, "1")
        # What stands in Serve's proxy before Serve: bounds, and answers of ours in place of Serve's own.
        os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)
        # Ray lets its workers yield to every other process (niceness 15); a server is what this machine is
        # for.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A replica that fails its health checks has no turn left to finish: its resources are wanted by the next one.
        os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
        # Ray's switch for "this machine only", whatever its name says: node address and listeners are
        # loopback.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            # Else Ray makes one itself and leaves it in ~/.ray, readable by others.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def start_ray(address: str | None, *, verbose: bool = False, attempt: Attempt = _unseen) -> RaySession:
    """Starts a Ray of our own, or joins the one at `address`. Of our own, one start may fail: on an overloaded machine
    one of Ray's processes may be too slow for another. `attempt` is entered with the name of each attempt, and left
    when that has ended. Raises BadAddress for what is no address, ConnectionError if there is none, or if it does not
    start in time. Whatever it raises, no process of the attempt is left."""
    prepare_environment(address)
    if address is not None:
        with attempt(f"Ray at {address}"):
            import_ray_impatiently()
            where = find_ray(address)
            try:
                return _start_once(where, verbose)
            except Exception as error:
                raise not_joined(address, where, error) from error
    try:
        with attempt("Ray"):
            import_ray_impatiently()
            return _start_once(None, verbose)
    except Exception as error:  # Ray has no type of its own for a start that failed
        logger.warning("Ray did not start, and is started once more: %s", first_line(error))
    try:
        with attempt("Ray, once more"):
            return _start_once(None, verbose)
    except Exception as error:
        raise ConnectionError(f"Ray did not start: {first_line(error)}. {_where_to_look()}") from error


def _start_once(address: str | None, verbose: bool) -> RaySession:
    import ray
    from ray import serve  # noqa: F401  # sets up its logger when it is imported

    logging.getLogger("ray.serve").setLevel(logging.INFO if verbose else logging.ERROR)
    others = frozenset(psutil.Process().children(recursive=True))
    if isinstance(ray.init, _Ended):
        ray.init = ray.init.start
    try:
        with attentive_start():
            context = ray.init(
                address=address or "local",
                namespace=APPLICATION,
                log_to_driver=verbose,
                logging_level="INFO" if verbose else "ERROR",
                **({} if address else {"include_dashboard": False}),
            )
    except BaseException:
        _shut_down(others, patience=0.0)  # what has only begun to start has nothing to finish
        raise
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
    _shut_down(frozenset(), patience=_END_SECONDS)


def abandon(session: RaySession) -> None:
    """Of a Ray that has ended: its library would wait for what is gone, for a minute, so nothing is told. What is left
    of one of our own is killed. Such a process has to end by `os._exit`."""
    if session.owned:
        kill_descendants(_END_SECONDS)


class _Ended:
    """In the place of `ray.init` once a Ray has been shut down: where Serve's client finds none it starts another, and
    a thread of ours may still be asking it."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self.start = start

    def __call__(self, *_: object, **__: object) -> Any:
        raise ConnectionError("this process has shut down its Ray")


def _shut_down(others: Collection[psutil.Process], *, patience: float) -> None:
    """`others`: of our children, those that are none of Ray's. `patience`: seconds that the processes have to end by
    themselves."""
    import ray

    # Before: what Ray's own processes started is nobody's child once they have ended.
    processes = [process for process in psutil.Process().children(recursive=True) if process not in others]
    if not isinstance(ray.init, _Ended):
        ray.init = _Ended(ray.init)
    ray.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=patience)
    _kill(alive)
    psutil.wait_procs(alive, timeout=_END_SECONDS)


def _kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
