"""`moorage serve`: from flags to a server that is ready, and back to a machine as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx

from kernels.instruction_cap import requested_cap
from serve_app.cluster.proxy.limits import ProxyLimits
from serve_app.commands.arguments import StartFailed, read_args
from serve_app.commands.console import Step, fail, fetch_with_bar, say, step
from serve_app.commands.findings import Finding, Mark
from serve_app.commands.local_ray import (
    APPLICATION,
    RaySession,
    abandon,
    disconnect,
    remove_application,
    start_ray,
    start_serve,
)
from serve_app.commands.port_claim import claim_port, strangers_on
from serve_app.commands.preflight import CHAT, preflight
from serve_app.commands.ray_address import BadAddress, require_address
from serve_app.commands.ray_watch import RayLost, watch_until_gone
from serve_app.commands.ready import curl, print_facts
from serve_app.commands.tls import TlsFiles, tls_files
from serve_app.config import AppArgs
from serve_app.local_ports import BindRefused, reachable_address, require_free_port, require_key_beyond_loopback
from serve_app.model_store import KNOWN_MODELS, ModelStoreError, NoSuchModel

DRAIN_SECONDS = 30.0
_SAME_SIGNAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where to serve and on which Ray; the rest is in AppArgs."""

    host: str
    port: int
    address: str | None
    config: Path | None
    verbose: bool
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def base_url(self) -> str:
        """For clients on this machine."""
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://{reachable_address(self.host, self.port)}"


def run(options: ServeOptions, flags: Mapping[str, Any]) -> int:
    """Serves until a signal. The exit code: 0 stopped on request, 1 it failed, 2 it was asked for the
    impossible."""
    _catch_signals()
    begun = time.monotonic()
    with ExitStack() as held:
        try:
            args = read_args(options.config, flags)
            requested_cap()
            tls = tls_files(options.ssl_certfile, options.ssl_keyfile)
            require_key_beyond_loopback(options.host, has_keys=bool(args.load_api_keys()))
            if options.address is None:
                held.enter_context(claim_port(options.host, options.port))
                require_free_port(options.host, options.port)
            elif options.address != "auto":
                require_address(options.address)
        except (StartFailed, BindRefused, BadAddress, ValueError) as error:
            fail(str(error))
            return 2
        return _serve(options, args, tls, begun)


def _serve(options: ServeOptions, args: AppArgs, tls: TlsFiles | None, begun: float) -> int:
    """`begun`: when the command was, by the monotonic clock. The exit code."""
    session: RaySession | None = None
    ready = False
    chats = True
    try:
        if options.address is None:
            for name, value in _proxy_limits(args).environment().items():
                os.environ.setdefault(name, value)
            path = fetch_with_bar(args.model)
            with step("checks"):
                findings = _checked(args, path)
            for finding in findings:
                if finding.mark is Mark.NOTE:
                    say(f"  {finding.what}: {finding.detail}")
            chats = any(finding.what == CHAT and finding.mark is Mark.GOOD for finding in findings)
            if args.model not in KNOWN_MODELS:  # the workers have other working directories
                args = args.model_copy(update={"model": str(path), "served_model_name": args.model_name()})
        session = start_ray(options.address, verbose=options.verbose, attempt=step)
        with step(f"Serve on {options.host}:{options.port}"):
            session = start_serve(session, options.host, options.port, tls, args.log_format)
        check_gpus(args, _gpus_of_ray(), grows=options.address is not None)
        with step(f"{args.model_name()} on {_number_of_replicas(args)}") as progress:
            _deploy(args, progress)
            _wait_until_ready(options, progress)
        if session.owned and (others := strangers_on(options.host, options.port)):
            listeners = ", ".join(map(str, others))
            raise StartFailed(
                f"others listen on {options.host}:{options.port} too (process {listeners}), and would get a part of "
                "the requests; end them, or choose another --port"
            )
        print_facts(session)
        request = curl(options.base_url, args, chats=chats)
        say(f"ready after {time.monotonic() - begun:.1f} s; try: {request}")
        ready = True
        fail(watch_until_gone(session))
        return 1
    except RayLost as error:
        fail(f"{error}; the server ends")
        assert session is not None
        _end_without_ray(session)
    except (StartFailed, ModelStoreError, ConnectionError) as error:
        fail(str(error))
        if session is None and options.address is not None:
            say("without --address this command starts a Ray of its own")
        return 2 if isinstance(error, NoSuchModel | BadAddress) else 1
    except KeyboardInterrupt:
        if not ready:
            say("interrupted while it started")
        if session is None:
            say("stopped")
        return 0
    finally:
        if session is not None:
            _stop(session, answering=ready)


def _checked(args: AppArgs, model: Path) -> list[Finding]:
    """What there is to know before anything starts. Raises StartFailed with all that would stop the start."""
    findings = list(preflight(args, model))
    if bad := [f"{finding.what}: {finding.detail}" for finding in findings if finding.mark is Mark.BAD]:
        raise StartFailed("\n".join(bad))
    return findings


def _catch_signals() -> None:
    """A terminal sends SIGINT, a process manager SIGTERM: both interrupt, also while it starts. SIGINT is set
    too, since a shell starts what it puts in the background with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _proxy_limits(args: AppArgs) -> ProxyLimits:
    return ProxyLimits.for_application(args.ingress_replicas, args.max_turns, args.max_body_bytes)


def _number_of_replicas(args: AppArgs) -> str:
    least, most = args.replica_bounds()
    return f"{least} to {most} replicas" if args.autoscales else f"{most} replica{'s' if most > 1 else ''}"


def check_gpus(args: AppArgs, gpus: float, *, grows: bool) -> None:
    """A replica for which there is no GPU would be waited for in vain. `grows`: others run this cluster, and may add
    nodes to it. Raises StartFailed."""
    least, _ = args.replica_bounds()
    needed = least * args.resolved_gpus(gpus)
    if needed <= gpus:
        return
    shortage = f"{needed:g} GPUs for {least} of {args.model_name()} are wanted, and Ray finds {gpus:g}"
    if not grows:
        raise StartFailed(f"device {args.device}: {shortage}; try --device cpu, or fewer replicas")
    say(f"  {shortage}: the start waits until the cluster has more")


def _gpus_of_ray() -> float:
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))


def _deploy(args: AppArgs, progress: Step) -> None:
    """Deploys in a thread, so that signals and the spinner go on. Raises StartFailed with the reason of a
    replica."""
    from ray import serve

    from serve_app.cluster.app import ENGINES, build

    if APPLICATION in serve.status().applications:
        raise StartFailed(f"this cluster already runs an application named {APPLICATION!r}; stop it first")
    failures: list[BaseException] = []

    def deploy() -> None:
        try:
            serve.run(build(args), name=APPLICATION)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=deploy, name="deploy", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        application = serve.status().applications.get(APPLICATION)
        engines = application.deployments.get(ENGINES) if application else None
        running = engines.replica_states.get("RUNNING", 0) if engines else 0
        progress.note(f"({running}/{args.replicas} ready)")
    if failures:
        raise StartFailed(_reason(failures[0]))


def _reason(error: BaseException) -> str:
    """The last line of the traceback that a replica died with, which names the error; else what Serve
    says."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    messages = [d.message for d in application.deployments.values() if d.message] if application else []
    for message in messages:
        if "Traceback" in message or "Error" in message:
            lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(" ")]
            return f"a replica could not start: {lines[-1]}"
    return str(error)


def _wait_until_ready(options: ServeOptions, progress: Step) -> None:
    """The proxy has learned the route, and a replica takes turns."""
    deadline = time.monotonic() + 60
    # A server that asks itself: its certificate may be for another name.
    with httpx.Client(trust_env=False, timeout=5, verify=False) as client:
        while time.monotonic() < deadline:
            try:
                if client.get(f"{options.base_url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            progress.note("(waiting for the proxy)")
            time.sleep(0.1)
    raise StartFailed(f"nothing answers on {options.base_url}; a Serve that ran before keeps its own address")


def _end_without_ray(session: RaySession) -> NoReturn:
    """Ends this process, by exit code 1: on an orderly way out Ray's library would wait for its dead."""
    say("stopping what is left")
    abandon(session)
    say("stopped")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _stop(session: RaySession, *, answering: bool) -> None:
    """Lets running answers end, for a while; another signal ends the wait. Then nothing of ours is left. `answering`:
    the server was ready, so that there may be answers."""
    begun = time.monotonic()
    hurry = threading.Event()

    def again(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - begun > _SAME_SIGNAL_SECONDS:  # a process group gets one signal more than once
            hurry.set()

    signal.signal(signal.SIGINT, again)
    signal.signal(signal.SIGTERM, again)
    if answering:
        say(f"stopping; running answers have {DRAIN_SECONDS:.0f} s (Ctrl-C again: stop now)")
    else:
        say("stopping what was started")
    if answering or not session.owned:  # a Ray of our own takes everything along
        draining = threading.Thread(target=_drain, args=(session, hurry), name="drain", daemon=True)
        draining.start()
        while draining.is_alive() and not hurry.is_set() and time.monotonic() < begun + DRAIN_SECONDS:
            draining.join(0.1)
    disconnect()
    say("stopped")


def _drain(session: RaySession, hurry: threading.Event) -> None:
    try:
        remove_application(session)
    except Exception as error:  # Ray may be gone already; what is left is stopped in any case
        if not hurry.is_set():
            fail(f"the application could not be removed in order: {error}")
