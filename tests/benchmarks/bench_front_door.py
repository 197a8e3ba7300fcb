"""What lies between an engine and its client: added latency, and streamed tokens/s, at 1, 16 and 64 streams.

    python -m tests.benchmarks.bench_front_door [--new 256] [--streams 1,16,64] [--rounds 3] [--step 5]

The engine makes one token for every turn each 5 ms and costs nothing, so that all time is the way. Compared are the
engine called in the same process, the same API behind a bare uvicorn, and Moorage on Ray Serve: behind Serve's proxy in
Python, and behind HAProxy in its place. Each runs alone, with the client in a process of its own, on 127.0.0.1.

Below each way is the CPU time of its processes: for a token at each number of streams, and for a request without
tokens. Where all ways keep up with the engine, a shorter step (--step, in ms) shows what they can carry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine_actor.messages import TurnRequest, TurnTokens
from engine_actor.options import SamplingParams
from serve_app.model_store import resolve_model
from tests.benchmarks.process_cpu import cpu_seconds, cpu_seconds_since

MODEL = "smollm2"
_TEXT = re.compile(rb'"content":"[^"]')
WAYS = ("bare uvicorn", "Moorage, Python proxy", "Moorage, HAProxy")


@dataclass
class Measured:
    """Times to the first token in seconds, tokens, and the seconds of all streams together."""

    first: list[float]
    tokens: int
    seconds: float


# -- servers: this module again, in a process of its own --------------------------------------------------------------


def serve_bare(port: int, step: float) -> None:
    import uvicorn

    from serve_app.api import create_app
    from serve_app.config import AppArgs
    from serve_app.generation_config import sampling_defaults
    from serve_app.openai.desk import open_desk, side_desk
    from serve_app.openai.responses.memory_store import MemoryResponseStore
    from tests.support import paced_engine

    paced_engine.STEP_SECONDS = step
    args, path = AppArgs(model=MODEL), resolve_model(MODEL)
    settings = args.ingress_settings((), sampling=sampling_defaults(path))
    store = MemoryResponseStore(args.store_limits())
    with closing(side_desk(settings, path)) as side:
        app = create_app(open_desk(settings, path), side, paced_engine.PacedClient(), store)
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def serve_moorage(port: int, step: float) -> None:
    from serve_app.commands.local_ray import APPLICATION, disconnect, prepare_environment, start_ray, start_serve

    prepare_environment()  # before ray is imported
    from ray import cloudpickle, serve

    from serve_app.cluster.app import assemble
    from serve_app.config import AppArgs
    from tests.support import paced_engine

    paced_engine.STEP_SECONDS = step
    cloudpickle.register_pickle_by_value(paced_engine)
    session = start_ray(None)
    try:
        start_serve(session, "127.0.0.1", port)
        serve.run(assemble(AppArgs(model=MODEL, threads=1), paced_engine.PacedEngine), name=APPLICATION)
        sys.stdin.read()  # until the parent closes it, or dies
    finally:
        disconnect()


@contextmanager
def server(way: str, step: float) -> Iterator[tuple[int, int]]:
    """The port of a server that answers, and its process."""
    port, statistics_port, metrics_port = _free_ports(3)
    with tempfile.TemporaryDirectory() as folder:
        haproxy = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }
        command = [sys.executable, "-m", "tests.benchmarks.bench_front_door", "--serve", way, "--port", str(port)]
        command += ["--step", str(step)]
        environment = {**os.environ, **(haproxy if way == WAYS[2] else {})}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2], env=environment)
        try:
            deadline = time.monotonic() + 180
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{way}: the server did not become ready")
                time.sleep(0.3)
            yield port, process.pid
        finally:
            assert process.stdin is not None
            process.stdin.close()
            if way == WAYS[0]:
                process.terminate()
            process.wait(90)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


# -- clients ----------------------------------------------------------------------------------------------------------


async def over_http(port: int, streams: int, new: int) -> Measured:
    """By hand over sockets: a client library would cost more than what is measured."""
    first: list[float] = []
    tokens = 0

    async def one(number: int) -> None:
        nonlocal tokens
        waiting = True
        content = {"messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": new, "stream": True}
        body = json.dumps({"model": MODEL, **content, "stream_options": {"include_usage": True}}).encode()
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        head += f"connection: close\r\nx-session-id: s{number}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        tail = b""
        while data := await reader.read(65536):
            if waiting and _TEXT.search(data):
                waiting = False
                first.append(time.perf_counter() - begun)
            tail = (tail + data)[-1000:]
        writer.close()
        if b"[DONE]" not in tail:
            raise SystemExit(f"a stream ended early: {tail!r}")
        tokens += int(tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0])

    begun = time.perf_counter()
    await asyncio.gather(*map(one, range(streams)))
    return Measured(first, tokens, time.perf_counter() - begun)


async def in_process(streams: int, new: int, step: float) -> Measured:
    from tests.support import paced_engine

    paced_engine.STEP_SECONDS = step / 1e3
    actor = paced_engine.PacedActor("here")
    first: list[float] = []

    async def one() -> int:
        begun, count = time.perf_counter(), 0
        request = TurnRequest("bench", "o", None, (1, 2, 3), SamplingParams(), max_generated_tokens=new)
        async for delta in actor.stream_turn(request):
            if isinstance(delta, TurnTokens):
                if not count:
                    first.append(time.perf_counter() - begun)
                count += len(delta.token_ids)
        return count

    begun = time.perf_counter()
    tokens = sum(await asyncio.gather(*[one() for _ in range(streams)]))
    return Measured(first, tokens, time.perf_counter() - begun)


def row(way: str, streams: int, rounds: list[Measured], bare: float | None) -> float:
    """Prints one line; the tokens/s of the best round."""
    first = sorted(seconds for measured in rounds for seconds in measured.first)
    best = max(measured.tokens / measured.seconds for measured in rounds)
    share = f"{best / bare:9.2f}" if bare else f"{'':9}"
    p99 = first[min(len(first) - 1, int(len(first) * 0.99))]
    print(f"{way:24}{streams:8}{best:12.0f}{share}{statistics.median(first) * 1e3:13.1f}{p99 * 1e3:13.1f}", flush=True)
    return best


def measure(streams: list[int], new: int, rounds: int, step: float) -> None:
    print(f"{'':24}{'streams':>8}{'tokens/s':>12}{'of bare':>9}{'TTFT p50 ms':>13}{'TTFT p99 ms':>13}")
    for count in streams:
        row("the engine itself", count, [asyncio.run(in_process(count, new, step)) for _ in range(rounds)], None)
    bare: dict[int, float] = {}
    for way in WAYS:
        with server(way, step) as (port, pid):
            for count in (1, max(streams)):  # connections, channels and code that is used for the first time
                asyncio.run(over_http(port, count, 32))
            costs = []
            for count in streams:
                before = cpu_seconds(pid)
                results = [asyncio.run(over_http(port, count, new)) for _ in range(rounds)]
                costs.append((f"us a token at {count}", cpu_seconds_since(before, pid), 1e6 / (rounds * count * new)))
                best = row(way, count, results, bare.get(count))
                bare.setdefault(count, best)
            before = cpu_seconds(pid)
            for _ in range(rounds):
                asyncio.run(over_http(port, max(streams), 1))
            costs.append(("ms a request", cpu_seconds_since(before, pid), 1e3 / (rounds * max(streams))))
            for what, spent, scale in costs:
                cpu_row(what, spent, scale)


def cpu_row(what: str, spent: dict[str, float], scale: float) -> None:
    shown = "  ".join(
        f"{name} {seconds * scale:.1f}" for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
    )
    print(f"    CPU {what:20} {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=float, default=5.0, help="milliseconds between two tokens of the engine")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve == WAYS[0]:
        serve_bare(args.port, args.step / 1e3)
    elif args.serve:
        serve_moorage(args.port, args.step / 1e3)
    else:
        measure([int(part) for part in args.streams.split(",")], args.new, args.rounds, args.step)


if __name__ == "__main__":
    main()
