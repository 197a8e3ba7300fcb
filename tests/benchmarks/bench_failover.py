"""Kills replicas under streams: every answer must be the one it would have been, and the gap in it short.

    python -m tests.benchmarks.bench_failover [--kills 20] [--streams 32] [--new 48] [--replicas 3] [--signal KILL|STOP]

Starts a Ray of its own with the demo model, asks each question once undisturbed, and then keeps all streams busy with
the same questions, half of them greedy and half drawn with a seed and penalties, while replicas are killed at random
moments, one as soon as all are there again. With STOP they are stopped instead, until Serve has replaced them. Exit
code 1 if any answer differs or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.commands.local_ray import APPLICATION, disconnect, prepare_environment, start_ray, start_serve

prepare_environment()

import httpx  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.handle import DeploymentHandle  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress, TaskID  # noqa: E402

from serve_app.cluster.app import ENGINES, assemble  # noqa: E402
from serve_app.cluster.deployments import EngineDeployment  # noqa: E402
from serve_app.config import AppArgs  # noqa: E402

SUBJECTS = ("a cat", "the sea", "bread", "rain", "a train", "winter", "tea", "a tree", "salt", "a bridge")
KINDS = ("a story", "a poem", "three facts", "a letter")


class MortalEngine(EngineDeployment):
    async def process(self) -> tuple[str, int]:
        return self._replica, os.getpid()


@dataclass
class Answer:
    """`arrivals`: of each chunk, on the clock of `time.perf_counter`."""

    replica: str = ""
    text: str = ""
    error: str = ""
    arrivals: list[float] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    ended: float = float("inf")

    def gap_at(self, moment: float) -> float:
        """Seconds between the chunks before and after a moment."""
        marks = [self.begun, *self.arrivals]
        return next((b - a for a, b in itertools.pairwise(marks) if a <= moment < b), 0.0)


def question(number: int, new: int) -> dict[str, Any]:
    kind, subject = KINDS[number // 2 % len(KINDS)], SUBJECTS[number // 2 % len(SUBJECTS)]
    body = {
        "messages": [{"role": "user", "content": f"Write {kind} about {subject}, number {number}."}],
        "max_tokens": new,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0.0,
    }
    if number % 2:
        body |= {"temperature": 0.9, "seed": number, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    return body


async def ask(http: httpx.AsyncClient, body: dict[str, Any], hint: str, answer: Answer) -> Answer:
    headers = {"x-correlation-id": hint}
    done = False
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            answer.replica = response.headers.get("x-moorage-replica", "")
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        answer.error = str(chunk["error"])
                    for choice in chunk.get("choices", ()):
                        answer.arrivals.append(time.perf_counter())
                        answer.text += choice["delta"].get("content") or ""
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not done:
        answer.error = answer.error or "the stream ended without [DONE]"
    answer.ended = time.perf_counter()
    return answer


async def processes(engines: DeploymentHandle, wanted: int) -> dict[str, int]:
    """Replicas and their processes, once there are so many that answer."""
    while True:
        with contextlib.suppress(Exception):  # of a replica that is dying, or none
            answers = await engines.broadcast("process").results_async(timeout_s=5, return_exceptions=True)
            found: dict[str, int] = dict(answer for answer in answers if isinstance(answer, tuple))
            if len(found) == wanted:
                return found
        await asyncio.sleep(0.2)


@dataclass
class Run:
    """What happened: all answers, by their question, and the moments and victims of all kills."""

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)

    def gaps(self) -> list[float]:
        """Of the answers that began at a replica which was killed under them; where an answer went then, and what came
        over it there, is not told."""
        return [
            gap
            for moment, victim in self.kills
            for _, answer in self.answers
            if answer.replica == victim and answer.arrivals and answer.arrivals[0] <= moment < answer.ended
            if (gap := answer.gap_at(moment)) > 0
        ]


async def disturb(
    http: httpx.AsyncClient, engines: DeploymentHandle, options: argparse.Namespace, bar: tuple[Progress, TaskID]
) -> Run:
    run, over = Run(), asyncio.Event()

    async def keep_asking(number: int) -> None:
        for turn in itertools.count():
            if over.is_set():
                return
            answer = Answer()
            run.answers.append((number, answer))
            await ask(http, question(number, options.new), f"{number}-{turn}", answer)

    asking = asyncio.gather(*(keep_asking(number) for number in range(options.streams)))
    chance = random.Random(options.seed)
    known: set[str] = set()
    for _ in range(options.kills):
        while set(found := await processes(engines, options.replicas)) == known:
            await asyncio.sleep(0.2)
        known = set(found)
        await asyncio.sleep(chance.uniform(0.2, 3.0))
        victim = chance.choice(sorted(found))
        os.kill(found[victim], options.signal)
        run.kills.append((time.perf_counter(), victim))
        bar[0].advance(bar[1])
    over.set()
    await asking
    return run


def start(options: argparse.Namespace) -> tuple[str, DeploymentHandle]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_serve(start_ray(None), "127.0.0.1", port)
    home = Path(os.environ.get("MOORAGE_HOME") or Path.home() / ".cache" / "moorage")
    args = AppArgs.model_validate(
        {
            "model": str(home / "models" / "smollm2" / "model.gguf"),
            "served_model_name": "smollm2",
            "replicas": options.replicas,
            "threads": 1,
            "kv_memory": "192MiB",
            "placement_timeout_seconds": 60.0,
        }
    )
    serve.run(assemble(args, MortalEngine), name=APPLICATION)
    return f"http://127.0.0.1:{port}", serve.get_deployment_handle(ENGINES, APPLICATION)


def described(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "too few"
    shares = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"p50 {shares[49]:.2f} s, p99 {shares[98]:.2f} s, longest {max(seconds):.2f} s"


async def measure(options: argparse.Namespace, url: str, engines: DeploymentHandle, console: Console) -> int:
    limits = httpx.Limits(max_connections=options.streams + 8)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        with Progress(console=console) as progress:
            first = progress.add_task("undisturbed", total=options.streams)

            async def undisturbed(number: int) -> Answer:
                answer = await ask(http, question(number, options.new), f"{number}", Answer())
                progress.advance(first)
                return answer

            expected = await asyncio.gather(*(undisturbed(number) for number in range(options.streams)))
            kills = progress.add_task("kills", total=options.kills)
            run = await disturb(http, engines, options, (progress, kills))
    wrong = [(n, a) for n, a in run.answers if a.error or a.text != expected[n].text]
    for number, answer in wrong[:10]:
        console.print(f"question {number}: {answer.error or 'another text'}")
    usual = [b - a for answer in expected for a, b in itertools.pairwise(answer.arrivals)]
    gaps = run.gaps()
    console.print(f"{len(run.answers)} answers, {len(run.kills)} losses of one of {options.replicas} replicas")
    console.print(f"answers that failed or differ: {len(wrong) + sum(bool(a.error) for a in expected)}")
    console.print(f"gap between chunks, undisturbed: {described(usual)}")
    console.print(f"gap at the loss of the replica, in {len(gaps)} answers: {described(gaps)}")
    return int(bool(wrong) or any(answer.error for answer in expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="replicas to kill, one after the other")
    parser.add_argument("--streams", type=int, default=32, help="answers at a time")
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--replicas", type=int, default=3, help="replicas, one thread each")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of moments and replicas")
    parser.add_argument(
        "--signal", type=lambda name: signal.Signals[f"SIG{name}"], default="KILL", help="KILL, or STOP: it hangs"
    )
    options = parser.parse_args()
    console = Console()
    try:
        url, engines = start(options)
        code = asyncio.run(measure(options, url, engines, console))
    finally:
        disconnect()
    sys.exit(code)


if __name__ == "__main__":
    main()
