"""An application that grows and shrinks with its load, 0 -> 1 -> 2 -> 1 -> 0 engines, and the cluster with it.

    python -m tests.benchmarks.bench_autoscaling [--clients 6] [--deadline 300]

Starts a Ray of its own whose head has no GPU, with an autoscaler that adds nodes of one pretended GPU each; engines ask
for a GPU and compute on the CPU, with the demo model. The first request comes while there is no engine, and waits for
one. The front door must answer all the time, and every request must be answered. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from serve_app.commands.local_ray import APPLICATION, disconnect, prepare_environment, start_ray, start_serve

prepare_environment()

import httpx  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from rich.table import Table  # noqa: E402

from serve_app.cluster.app import ENGINES, build  # noqa: E402
from serve_app.commands.console import console, say, step  # noqa: E402
from serve_app.config import AppArgs  # noqa: E402
from tests.support.fake_cluster import fake_cluster, free_ports  # noqa: E402

NODE_IDLE_SECONDS = 6.0
REST_SECONDS = 10.0  # how long nothing may start at the end, though all but turns is asked for
ARGS = AppArgs.model_validate(
    {
        "model": "smollm2",
        "device": "cpu",
        "replicas": 0,
        "min_replicas": 0,
        "max_replicas": 2,
        "gpus_per_replica": 1,
        "cpus_per_replica": 0.5,
        "threads": 1,
        "kv_memory": "128MiB",
        "max_batch_size": 4,
        "upscale_delay_seconds": 2.0,
        "downscale_delay_seconds": 5.0,
        "graceful_shutdown_timeout_seconds": 60.0,
    }
)
QUIET_PATHS = ("/health", "/v1/models", "/v1/sessions", "/ready")


@dataclass(frozen=True, slots=True)
class Seen:
    """Engines that take turns, those that start or stop, and nodes with a GPU."""

    running: int = 0
    moving: int = 0
    nodes: int = 0


@dataclass
class Bench:
    http: httpx.AsyncClient
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    seen: Seen = field(default_factory=Seen)
    failures: list[str] = field(default_factory=list)
    answers: int = 0
    polls: int = 0
    slowest_poll: float = 0.0
    times: list[tuple[str, float]] = field(default_factory=list)

    def say(self, text: str) -> None:
        say(f"{time.monotonic() - self.begun:7.1f} s  {text}")

    async def watch(self) -> None:
        """Looks at engines and nodes, and says what has changed."""
        while True:
            seen = await asyncio.to_thread(look)
            if seen != self.seen:
                self.seen = seen
                self.say(f"engines: {seen.running} run, {seen.moving} start or stop; nodes with a GPU: {seen.nodes}")
            await asyncio.sleep(0.1)

    async def poll(self) -> None:
        """What must be answered with any number of engines."""
        while True:
            for path in QUIET_PATHS:
                begun = time.monotonic()
                try:
                    status = (await self.http.get(path, timeout=20)).status_code
                except httpx.HTTPError as error:
                    self.failures.append(f"{path}: {type(error).__name__}")
                else:
                    if status != 200:
                        self.failures.append(f"{path}: {status}")
                self.polls += 1
                self.slowest_poll = max(self.slowest_poll, time.monotonic() - begun)
            await asyncio.sleep(0.2)

    async def ask(self, session: str, tokens: int = 64) -> None:
        body = {
            "messages": [{"role": "user", "content": "Write about rain."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = await self.http.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
        self.answers += 1
        if answer.status_code != 200:
            self.failures.append(f"a turn: {answer.status_code} {answer.text}")

    @asynccontextmanager
    async def load(self, clients: int) -> AsyncIterator[None]:
        """So many clients that ask one question after the other."""
        over = asyncio.Event()

        async def keep_asking(number: int) -> None:
            while not over.is_set():
                await self.ask(f"client-{number}")

        self.say(f"load: {clients} clients")
        asking = asyncio.gather(*(keep_asking(number) for number in range(clients)))
        try:
            yield
        finally:
            over.set()
            await asking

    async def until(self, what: str, condition: Callable[[Seen], bool], since: float | None = None) -> None:
        begun = time.monotonic() if since is None else since
        while not condition(self.seen):
            if time.monotonic() > begun + self.deadline:
                raise TimeoutError(f"{what}: not within {self.deadline:.0f} s; there are {self.seen}")
            await asyncio.sleep(0.05)
        self.times.append((what, time.monotonic() - begun))

    async def timed(self, what: str, awaited: Awaitable[None]) -> None:
        begun = time.monotonic()
        await asyncio.wait_for(awaited, self.deadline)
        self.times.append((what, time.monotonic() - begun))


def look() -> Seen:
    application = serve.status().applications.get(APPLICATION)
    engines = application.deployments.get(ENGINES) if application else None
    states = dict(engines.replica_states) if engines else {}
    running = states.pop("RUNNING", 0)
    nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU"))
    return Seen(running, sum(states.values()), nodes)


async def course(bench: Bench, clients: int) -> None:
    """Up and down again."""
    begun = time.monotonic()
    bench.say("no engine; the first request is sent")
    first = asyncio.create_task(bench.timed("0 -> 1: the first request is answered", bench.ask("first")))
    await bench.until("0 -> 1: a node", lambda seen: seen.nodes >= 1, begun)
    await bench.until("0 -> 1: the engine runs", lambda seen: seen.running >= 1, begun)
    await first
    async with bench.load(clients):
        begun = time.monotonic()
        await bench.until("1 -> 2: another engine is wanted", lambda s: s.running + s.moving >= 2, begun)
        await bench.until("1 -> 2: another node", lambda seen: seen.nodes >= 2, begun)
        await bench.until("1 -> 2: two engines run", lambda seen: seen.running == 2, begun)
        await asyncio.sleep(3)
    async with bench.load(1):
        begun = time.monotonic()
        await bench.until("2 -> 1: one engine runs", lambda seen: seen.running == 1, begun)
        await bench.until("2 -> 1: the other is gone", lambda s: s.running == 1 and not s.moving, begun)
        await bench.until("2 -> 1: its node is gone", lambda seen: seen.nodes == 1, begun)
    begun = time.monotonic()
    bench.say("no load")
    await bench.until("1 -> 0: no engine", lambda seen: seen.running + seen.moving == 0, begun)
    await bench.until("1 -> 0: no node", lambda seen: seen.nodes == 0, begun)
    await asyncio.sleep(REST_SECONDS)
    if bench.seen != Seen():
        bench.failures.append(f"without a turn there are {bench.seen}")


async def measure(options: argparse.Namespace, url: str) -> int:
    limits = httpx.Limits(max_connections=options.clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=options.deadline, limits=limits) as http:
        bench = Bench(http, options.deadline)
        background = [asyncio.create_task(bench.watch()), asyncio.create_task(bench.poll())]
        try:
            await course(bench, options.clients)
        except TimeoutError as error:
            bench.failures.append(str(error))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
    table = Table("step", "seconds after its cause")
    for what, seconds in bench.times:
        table.add_row(what, f"{seconds:.1f}")
    console.print(table)
    say(f"{bench.answers} turns; {bench.polls} other requests, the slowest took {bench.slowest_poll:.2f} s")
    for failure in sorted(set(bench.failures)):
        say(f"failed {bench.failures.count(failure)} times: {failure}")
    return int(bool(bench.failures))


def catch_signals() -> None:
    """Both leave by KeyboardInterrupt, so that nothing is left behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def start(address: str) -> str:
    [port] = free_ports(1)
    with step("Serve, and the application without an engine"):
        session = replace(start_ray(address), owned=True)  # we have started it, so one proxy is enough
        catch_signals()  # Ray has put its own handlers in their place
        start_serve(session, "127.0.0.1", port)
        serve.run(build(ARGS), name=APPLICATION)
    return f"http://127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=6, help="that ask at a time when the load is high")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds that any step may take")
    options = parser.parse_args()
    code = 130
    catch_signals()
    with contextlib.suppress(KeyboardInterrupt), ExitStack() as stack:
        with step("a cluster without a GPU"):
            cluster = fake_cluster(head_cpus=2, node_cpus=1, most_nodes=2, idle_seconds=NODE_IDLE_SECONDS)
            address = stack.enter_context(cluster)
        stack.callback(disconnect)
        code = asyncio.run(measure(options, start(address)))
    sys.exit(code)


if __name__ == "__main__":
    main()
