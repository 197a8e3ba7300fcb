"""Many conversations on several replicas: what sticky routing keeps cached, and what happens when replicas come and go.

    python -m tests.benchmarks.bench_sessions [--sessions 200] [--turns 8] [--replicas 3] [--ingresses 3]
                                              [--parts sticky,round-robin,scale,roll]

Engines, caches, sessions and routers are real; the model only takes its time (8 ms a step, 1 ms a token), so that
several replicas fit on a small machine. Parts:

    sticky, round-robin   all sessions at once, turn after turn: cached share of the possible, TTFT, tokens/s
    scale                 one more replica and back again, in mid-conversation: errors, sessions that moved
    roll                  a new version of the application under streams longer than its drain time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

from serve_app.commands.local_ray import APPLICATION, disconnect, prepare_environment, start_ray, start_serve

MODEL = "smollm2"
SIMULATED = "tests.support.simulated_engine:build"
WORDS = ("harbour", "water", "north", "bay", "calm", "wind", "west", "side", "boat", "rope", "tide", "stone", "bird")


@dataclass
class Turn:
    replica: str
    prompt: int
    cached: int
    generated: int
    ttft: float
    seconds: float


@dataclass
class Session:
    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def possible(self, index: int) -> int:
        """Tokens of turn `index` that could be cached: the sequence of the turn before, but its last token, which was
        never fed to the model."""
        before = self.turns[index - 1]
        return before.prompt + before.generated - 1

    def moves(self, since: int = 1) -> int:
        pairs = zip(self.turns[since - 1 :], self.turns[since:], strict=False)
        return sum(a.replica != b.replica for a, b in pairs)


class SessionLoad:
    """Sessions that talk to one server at once, and what came of it."""

    def __init__(self, url: str, new: int, at_once: int, opening: int = 24) -> None:
        """`opening`: words of what is said first."""
        self.url = url
        self.opening = opening
        self.new = new
        self.at_once = at_once
        self.refused: Counter[int] = Counter()
        self.failed: list[str] = []

    async def turn(self, http: httpx.AsyncClient, session: Session) -> bool:
        """One turn, streamed. False if it was refused or failed."""
        question = " ".join(random.choices(WORDS, k=24 if session.messages else self.opening))
        session.messages.append({"role": "user", "content": question})
        body = {
            "model": MODEL,
            "messages": session.messages,
            "max_tokens": self.new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun, first, text, done = time.perf_counter(), 0.0, "", False
        usage: dict[str, Any] = {}
        try:
            async with http.stream(
                "POST", "/v1/chat/completions", json=body, headers={"x-session-id": session.name}
            ) as response:
                if response.status_code != 200:
                    self.refused[response.status_code] += 1
                    if response.status_code in (429, 503) and "retry-after" not in response.headers:
                        self.failed.append(f"{response.status_code} without Retry-After")
                    session.messages.pop()
                    return False
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            self.failed.append(str(chunk["error"]))
                        usage = chunk.get("usage") or usage
                        for choice in chunk.get("choices", ()):
                            if content := choice["delta"].get("content"):
                                first = first or time.perf_counter() - begun
                                text += content
                replica = response.headers["x-moorage-replica"]
        except httpx.HTTPError as error:
            self.failed.append(repr(error))
            return False
        if not done or usage.get("completion_tokens") != self.new:
            self.failed.append(f"an answer ended early: {usage}")
            return False
        session.messages.append({"role": "assistant", "content": text})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        seconds = time.perf_counter() - begun
        session.turns.append(Turn(replica, usage["prompt_tokens"], cached, self.new, first, seconds))
        return True

    async def converse(
        self,
        sessions: list[Session],
        turns: int,
        bar: tqdm[Any],
        between: Callable[[int], Any] | None = None,
    ) -> float:
        """All sessions, so many turns at once as there are places. Seconds."""
        limits = httpx.Limits(max_connections=len(sessions) + 8)
        places = asyncio.Semaphore(self.at_once)
        begun = time.perf_counter()
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits, trust_env=False) as http:

            async def one(session: Session) -> None:
                await asyncio.sleep(random.random())
                for index in range(turns):
                    async with places:
                        await self.turn(http, session)
                    bar.update()
                    if between is not None:
                        await between(index)

            await asyncio.gather(*map(one, sessions))
        return time.perf_counter() - begun


class Application:
    """The application as a config file deploys it. A change of `args` is a new version, which replaces all replicas; a
    change of the deployment's own number of replicas replaces none."""

    def __init__(self, builder: str, fields: dict[str, Any]) -> None:
        """`builder`: where the function is that builds it, as "module:name"."""
        self._builder = builder
        self._fields = fields
        self._replicas = fields["replicas"]

    def scale(self, replicas: int) -> None:
        self._replicas = replicas
        self.deploy()

    def deploy(self, **changed: Any) -> None:
        """Returns when it runs as wished."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from serve_app.cluster.app import ENGINES

        self._fields |= changed
        config = {
            "applications": [
                {
                    "name": APPLICATION,
                    "import_path": self._builder,
                    "args": {"model": MODEL, "served_model_name": MODEL, **self._fields},
                    "deployments": [{"name": ENGINES, "num_replicas": self._replicas}],
                }
            ]
        }
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            application = serve.status().applications.get(APPLICATION)
            if application is not None and application.status == "RUNNING":
                return
            if application is not None and application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise SystemExit(f"the application did not start: {application}")
            time.sleep(0.2)
        raise SystemExit("the application did not become ready")


def summary(name: str, sessions: list[Session], seconds: float | None, room: SessionLoad, since: int = 1) -> None:
    """`seconds`: that all turns took together; None where more than turns was going on."""
    later = [(s, i) for s in sessions for i in range(max(1, since), len(s.turns))]
    cached = sum(s.turns[i].cached for s, i in later)
    possible = sum(s.possible(i) for s, i in later) or 1
    first = sorted(s.turns[i].ttft for s, i in later) or [0.0]
    tokens = sum(turn.generated for s in sessions for turn in s.turns)
    spread = Counter(s.turns[-1].replica for s in sessions if s.turns)
    speed = "" if seconds is None else f"{tokens / seconds:.0f} tokens/s; "
    print(
        f"{name}: cached {cached / possible:.1%} of the possible; TTFT from turn 2 mean "
        f"{statistics.fmean(first) * 1e3:.0f} ms, p99 {first[int(len(first) * 0.99)] * 1e3:.0f} ms; "
        f"{speed}{sum(s.moves(since) > 0 for s in sessions)} of {len(sessions)} moved; "
        f"{len(room.failed)} failed, refused {dict(room.refused)}; on replicas {sorted(spread.values())}",
        flush=True,
    )
    for reason in room.failed[:3]:
        print(f"    {reason}")


def new_sessions(count: int, name: str) -> list[Session]:
    return [Session(f"{name}-{i}") for i in range(count)]


def routed(args: argparse.Namespace, url: str, name: str, builder: str) -> None:
    application = Application(builder, common(args))
    application.deploy()
    room, sessions = SessionLoad(url, args.new, args.at_once, args.opening), new_sessions(args.sessions, name)
    with tqdm(total=args.sessions * args.turns, desc=name) as bar:
        seconds = asyncio.run(room.converse(sessions, args.turns, bar))
    summary(name, sessions, seconds, room)


def scaled(args: argparse.Namespace, url: str) -> None:
    application = Application(SIMULATED, common(args))
    application.deploy()
    room, sessions = SessionLoad(url, args.new, args.at_once), new_sessions(args.sessions, "scale")
    with tqdm(total=args.sessions * 3 * args.turns, desc="scale") as bar:
        asyncio.run(room.converse(sessions, args.turns, bar))
        before = args.turns

        async def while_changing(replicas: int) -> None:
            change = asyncio.to_thread(application.scale, replicas)
            talk = room.converse(sessions, args.turns, bar)
            await asyncio.gather(change, talk)

        asyncio.run(while_changing(args.replicas + 1))
        summary(f"scale {args.replicas} -> {args.replicas + 1}", sessions, None, room, since=before)
        homes = Counter(s.turns[-1].replica for s in sessions)
        middle = min(len(s.turns) for s in sessions)
        asyncio.run(while_changing(args.replicas))
        summary(f"scale {args.replicas + 1} -> {args.replicas}", sessions, None, room, since=middle)
        left = set(homes) - {s.turns[-1].replica for s in sessions}
        print(f"    sessions of replicas that are gone: {sum(homes[replica] for replica in left)}")


def rolled(args: argparse.Namespace, url: str) -> None:
    application = Application(SIMULATED, {**common(args), "graceful_shutdown_timeout_seconds": 60.0})
    application.deploy()
    room, sessions = SessionLoad(url, 400, 24), new_sessions(24, "roll")
    with tqdm(total=24, desc="roll") as bar:
        asyncio.run(_roll(room, sessions, application, bar))
    summary("roll, drain time longer than the answers", sessions, None, room)
    application.deploy(graceful_shutdown_timeout_seconds=1.0, max_queued_turns=512)
    room, sessions = SessionLoad(url, 400, 24), new_sessions(24, "cut")
    with tqdm(total=24, desc="cut") as bar:
        asyncio.run(_roll(room, sessions, application, bar))
    summary("roll, drain time of 1 s", sessions, None, room)


async def _roll(room: SessionLoad, sessions: list[Session], application: Application, bar: tqdm[Any]) -> None:
    async def change() -> None:
        await asyncio.sleep(1.5)
        await asyncio.to_thread(application.deploy, max_queued_turns=511)  # another value: every replica is replaced

    await asyncio.gather(change(), room.converse(sessions, 1, bar))


def common(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "replicas": args.replicas,
        "ingress_replicas": args.ingresses,
        "kv_memory": "64MiB",
        "threads": 1,
        "cpus_per_replica": 0.1,
        "max_model_len": 8192,
        "max_sessions": 512,
        "max_queued_turns": 512,
        "graceful_shutdown_timeout_seconds": 30.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--opening", type=int, default=24, help="words of the first message (sticky, round-robin)")
    parser.add_argument("--at-once", type=int, default=32, help="turns that run at a time")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ingresses", type=int, default=3)
    parser.add_argument("--parts", default="sticky,round-robin,scale,roll")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    prepare_environment()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    parts = {
        "sticky": lambda: routed(args, url, "sticky", SIMULATED),
        "round-robin": lambda: routed(args, url, "round-robin", f"{SIMULATED}_round_robin"),
        "scale": lambda: scaled(args, url),
        "roll": lambda: rolled(args, url),
    }
    session = start_ray(None)
    try:
        start_serve(session, "127.0.0.1", port)
        for part in args.parts.split(","):
            parts[part]()
    finally:
        disconnect()


if __name__ == "__main__":
    main()
