"""A server under clients that behave badly, and under many small requests: nothing may be left, and memory stays flat.

    python -m tests.benchmarks.soak_http [--closing 1000] [--leaving 200] [--streams 64] [--requests 2000]

Starts a Ray and an application of its own (the demo model, one replica whose pool holds about eight answers), and stops
both in the end. The phases, one after the other:

    closing    connections that close 0 to 5 ms after their request, half of them by a reset
    leaving    streams whose client goes after the third token
    streams    that many answers at a time on the pool for eight; some are then compared with the same request alone
    requests   small ones; the memory of replica and ingress is sampled, from a quarter of them on to the end it must
               stay within 5 %

After each phase no turn runs or waits, every block is free or held by the index of prefixes alone, and the engine's own
check of its state passes. Prints one table; ends with status 1 if something was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress

from serve_app.commands.local_ray import APPLICATION, disconnect, start_ray, start_serve
from serve_app.config import AppArgs

if TYPE_CHECKING:
    # Ray is imported when its environment is prepared.
    from ray.serve.handle import DeploymentHandle

CHAT = "/v1/chat/completions"
POOL = "12MiB"  # 34 blocks of the demo model; an answer of `streams` needs four
AT_A_TIME = 40
SAMPLES = 40
ALLOWED_GROWTH = 0.05
RESET = b"\x01\0\0\0\0\0\0\0"  # SO_LINGER of no time: close sends a reset, as of a process that was killed


@dataclass
class Soak:
    url: str
    http: httpx.AsyncClient
    engines: DeploymentHandle
    rows: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def row(self, name: str, value: str) -> None:
        self.rows.append((name, value))

    def require(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    async def stats(self) -> dict[str, float]:
        (answer,) = await self.engines.broadcast("stats").results_async(timeout_s=60)
        return dict(answer)

    async def settle(self, phase: str) -> None:
        """Waits until no turn is left, and looks at what is."""
        for _ in range(1200):
            stats = await self.stats()
            if stats["running"] == stats["waiting"] == 0:
                break
            await asyncio.sleep(0.05)
        else:
            self.faults.append(f"{phase}: turns are left: {stats}")
            return
        self.require(stats["requests"] == stats["sessions"] == 0, f"{phase}: requests are left: {stats}")
        free, usable = stats["blocks_free"] + stats["blocks_idle"], stats["blocks_usable"]
        self.require(free == usable, f"{phase}: {free:.0f} of {usable:.0f} blocks are free: {stats}")
        try:
            await self.engines.broadcast("check_integrity").results_async(timeout_s=60)
        except Exception as error:
            self.faults.append(f"{phase}: {error}")
        good = await self.http.post(CHAT, json=asked("Hello.", max_tokens=1))
        self.require(good.status_code == 200, f"{phase}: the next request got {good.status_code}: {good.text[:200]}")


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for the time of the block; gives what moves it on by one."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


async def in_turn(what: str, jobs: Iterable[Awaitable[None]], total: int) -> None:
    """So many jobs at a time, with a bar."""
    places = asyncio.Semaphore(AT_A_TIME)
    with progress(what, total) as advance:

        async def one(job: Awaitable[None]) -> None:
            async with places:
                await job
            advance()

        await asyncio.gather(*map(one, jobs))


# -- the phases --------------------------------------------------------------------------------------------------------


async def connect_and_go(soak: Soak, stays: Callable[[asyncio.StreamReader], Awaitable[None]], *, reset: bool) -> None:
    """Sends a request for a long answer and closes as soon as `stays` returns."""
    host, port = soak.url.removeprefix("http://").split(":")
    content = json.dumps(asked("Count to one thousand.", max_tokens=300, stream=True, n=2, ignore_eos=True)).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        lines = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        writer.write(f"POST {CHAT} HTTP/1.1\r\n{lines}\r\n\r\n".encode() + content)
        await stays(reader)
    finally:
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def closing(soak: Soak, count: int) -> None:
    def after(milliseconds: int) -> Callable[[asyncio.StreamReader], Awaitable[None]]:
        return lambda _: asyncio.sleep(milliseconds / 1000)

    jobs = (connect_and_go(soak, after(i % 6), reset=i // 6 % 2 == 0) for i in range(count))
    await in_turn("closing", jobs, count)


async def third_token(reader: asyncio.StreamReader) -> None:
    seen = 0
    while seen < 3:
        line = await reader.readline()
        if not line:
            raise RuntimeError("the answer ended before its third token")
        seen += b'"content":"' in line and b'"role"' not in line


async def leaving(soak: Soak, count: int) -> None:
    await in_turn("leaving", (connect_and_go(soak, third_token, reset=i % 2 == 0) for i in range(count)), count)


async def streamed(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text = ""
    async with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        response.raise_for_status()
        lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    if lines.pop() != "[DONE]":
        raise RuntimeError("the stream has no end")
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        text += choice["delta"].get("content", "")
    return text


async def streams(soak: Soak, count: int) -> None:
    bodies = [
        asked(f"Count from {i} to one hundred.", temperature=0, max_tokens=24, ignore_eos=True) for i in range(count)
    ]
    texts = await asyncio.gather(*(streamed(soak.http, body) for body in bodies))
    for i in range(0, count, max(1, count // 8)):
        soak.require(await streamed(soak.http, bodies[i]) == texts[i], f"streams: answer {i} differs from itself alone")


async def requests(soak: Soak, count: int) -> None:
    processes = own_processes("EngineDeployment", "Ingress")
    series: dict[str, list[int]] = {name: [] for name in processes}
    step = max(1, count // SAMPLES)
    with progress("requests", count) as advance:

        async def one(number: int) -> None:
            body = asked(f"Question {number}: why?", max_tokens=2, n=1 + number % 2)
            (await soak.http.post(CHAT, json=body)).raise_for_status()
            advance()

        for first in range(0, count, step):
            await asyncio.gather(*map(one, range(first, min(count, first + step))))
            for name, process in processes.items():
                series[name].append(process.memory_info().rss)
    for name, sizes in series.items():
        later = sizes[len(sizes) // 4 :]
        spread = max(later) / min(later) - 1
        course = ", ".join(f"{later[(len(later) - 1) * i // 4] / 2**20:.1f}" for i in range(5))
        soak.row(f"  memory of {name}", f"{course} MiB: within {spread:.2%}")
        soak.require(spread <= ALLOWED_GROWTH, f"requests: memory of {name} is not flat: {spread:.2%}")


def own_processes(*deployments: str) -> dict[str, psutil.Process]:
    """The only replica of each, found by the title that Serve gives to a process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            for name in deployments:
                if title.startswith("ray::ServeReplica") and name in title:
                    found[name] = process
    if len(found) != len(deployments):
        raise SystemExit(f"processes of the application were not found: {found}")
    return found


# -- all of it ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def own_server(model: str) -> AsyncIterator[Soak]:
    session = start_ray(None)
    from ray import serve

    from serve_app.cluster.app import ENGINES, assemble
    from serve_app.cluster.deployments import EngineDeployment

    class ProbedEngine(EngineDeployment):
        """The real one, with its own check within reach."""

        async def check_integrity(self) -> None:
            await self._actor.check_integrity()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        start_serve(session, "127.0.0.1", port)
        args = AppArgs.model_validate({"model": model, "kv_memory": POOL, "graceful_shutdown_timeout_seconds": 5})
        await asyncio.to_thread(serve.run, assemble(args, ProbedEngine), name=APPLICATION)
        limits = httpx.Limits(max_connections=128)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            yield Soak(url, http, serve.get_deployment_handle(ENGINES, APPLICATION))
    finally:
        disconnect()


async def run(args: argparse.Namespace) -> int:
    phases = {"closing": closing, "leaving": leaving, "streams": streams, "requests": requests}
    async with own_server(args.model) as soak:
        for name, phase in phases.items():
            count = getattr(args, name)
            begun = time.monotonic()
            try:
                await phase(soak, count)
            except (httpx.HTTPError, RuntimeError, OSError) as error:
                soak.faults.append(f"{name}: {type(error).__name__}: {error}")
            soak.row(f"{name} ({count})", f"{time.monotonic() - begun:.1f} s")
            await soak.settle(name)
        stats = await soak.stats()
        for counter in ("committed_steps", "decode_tokens", "preemptions", "rollbacks"):
            soak.row(counter, f"{stats[counter]:.0f}")
    for name, value in soak.rows:
        print(f"{name:40}{value}")
    for fault in soak.faults:
        print(f"NOT AS IT MUST BE: {fault}")
    print("all as it must be" if not soak.faults else f"{len(soak.faults)} faults")
    return 1 if soak.faults else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a known name or a path (default: %(default)s)")
    for name, default in (("closing", 1000), ("leaving", 200), ("streams", 64), ("requests", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
