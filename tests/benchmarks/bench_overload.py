"""More turns than fit: what those get that are accepted, what the others are told, and how soon it is over.

    python -m tests.benchmarks.bench_overload [--engine simulated] [--rows 16] [--seconds 30] [--rates 0.5,1,2,3]

An open loop: turns arrive by chance at a rate, whoever is served. First a closed loop that keeps every row busy finds
the capacity; the rates are multiples of it. Of the clients that are refused half come back when `Retry-After` says so
(and up to a quarter later, as good clients do), a bounded number of times; the others give up. Every completed answer
is compared with that of its prompt alone. When the arrivals stop, a probe asks until its first token comes as it did at
rest; that can't be before the last accepted turn has begun.

`--engine simulated`: engine, queue and front door are real; the model sleeps (8 ms a step, 1 ms a token), so that the
machine's cores are not what is measured. `--engine smollm2`: the model is real, too.

The last line of the table is the same load on an engine that begins every turn at once (`max_running_sequences` beyond
all of them): without a queue, rows are shared.
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
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from tqdm import tqdm

from serve_app.commands.local_ray import disconnect, prepare_environment, start_ray, start_serve
from tests.benchmarks.bench_sessions import MODEL, SIMULATED, WORDS, Application

BUILDERS = {"simulated": SIMULATED, "smollm2": "serve_app.cluster.app:build"}
TRIES = 5
PROMPTS = 24
WARM_UP = 0.25  # of a run: until the queue is what it will be
PROBE_SECONDS = 0.1
NORMAL = 2.0  # times the TTFT of an idle engine


@dataclass(frozen=True)
class Question:
    prompt: str
    tokens: int
    text: str = ""  # of the answer that it gets alone


@dataclass
class Tally:
    """Of one run; times by the event loop's clock."""

    first: list[float] = field(default_factory=list)
    last_begun: float = 0.0
    gaps: list[float] = field(default_factory=list)
    done: list[tuple[float, int]] = field(default_factory=list)  # when, and tokens
    retry_after: list[int] = field(default_factory=list)
    tries: int = 0
    came_back: list[bool] = field(default_factory=list)  # whether a try after a refusal was accepted
    ends: Counter[str] = field(default_factory=Counter)


class Load:
    def __init__(self, http: httpx.AsyncClient, questions: Sequence[Question]) -> None:
        self._http = http
        self.questions = questions
        self.tally = Tally()
        self.stopped = False

    async def once(self, question: Question) -> tuple[int | None, str]:
        """Seconds to wait if it was refused; the text if it was not."""
        now = asyncio.get_running_loop().time
        body = {
            "model": MODEL,
            "prompt": question.prompt,
            "max_tokens": question.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": uuid.uuid4().hex,  # each computes its prompt
        }
        begun, last, texts = now(), 0.0, []
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code in (429, 503):
                await response.aread()
                return int(response.headers["retry-after"]), ""
            response.raise_for_status()
            gaps, first = [], 0.0
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise httpx.ReadError(str(chunk["error"]))
                for choice in chunk["choices"]:
                    if choice["text"]:
                        at = now()
                        if last:
                            gaps.append(at - last)
                        else:
                            first = at - begun
                        last = at
                        texts.append(choice["text"])
        self.tally.first.append(first)
        self.tally.last_begun = max(self.tally.last_begun, begun + first)
        self.tally.gaps += gaps
        self.tally.done.append((now(), question.tokens))
        return None, "".join(texts)

    async def client(self, question: Question, tries: int) -> None:
        tally = self.tally
        for attempt in range(tries):
            if attempt and self.stopped:
                break
            tally.tries += 1
            try:
                seconds, text = await self.once(question)
            except httpx.HTTPError as error:
                tally.ends[f"failed: {type(error).__name__} {error}"] += 1
                return
            if attempt:
                tally.came_back.append(seconds is None)
            if seconds is None:
                tally.ends["answered" if text == question.text else "ANOTHER TEXT"] += 1
                return
            tally.retry_after.append(seconds)
            if attempt + 1 < tries:
                await asyncio.sleep(seconds * random.uniform(1.0, 1.25))
        tally.ends["not served"] += 1

    async def closed(self, clients: int, seconds: float) -> float:
        """Turns a second of so many clients that ask again at once."""
        loop = asyncio.get_running_loop()
        start, end = loop.time() + WARM_UP * seconds, loop.time() + (1 + WARM_UP) * seconds

        async def ask() -> None:
            while loop.time() < end:
                await self.client(random.choice(self.questions), 1)

        await asyncio.gather(*(ask() for _ in range(clients)))
        return sum(start < when <= end for when, _ in self.tally.done) / seconds

    async def open(self, rate: float, seconds: float) -> tuple[float, float, float]:
        """Tokens a second of completed answers after the warm-up, and seconds from the end of the arrivals: until the
        last accepted turn has its first token, and until a first token comes as it does at rest."""
        loop = asyncio.get_running_loop()
        begun = at = loop.time()
        async with asyncio.TaskGroup() as clients:
            with tqdm(total=round(seconds), unit="s", desc=f"{rate:.1f} turns/s", leave=False) as bar:
                while at < begun + seconds:
                    await asyncio.sleep(at - loop.time())
                    clients.create_task(self.client(random.choice(self.questions), random.choice((1, TRIES))))
                    at += random.expovariate(rate)
                    bar.update(int(loop.time() - begun) - bar.n)
            self.stopped = True
            end = loop.time()
            start = begun + WARM_UP * seconds
            recovery = clients.create_task(self._recover())
        tokens = sum(count for when, count in self.tally.done if start < when <= end)
        return tokens / (end - start), max(0.0, self.tally.last_begun - end), recovery.result()

    async def _recover(self) -> float:
        """Probes, one after the other: a short question each, which does not count."""
        loop = asyncio.get_running_loop()
        end = loop.time()
        probe = Load(self._http, [])
        while True:
            asked = loop.time()
            refused, _ = await probe.once(Question(self.questions[0].prompt, 1))
            if refused is None and probe.tally.first[-1] < NORMAL * self.at_rest:
                return asked - end
            await asyncio.sleep(PROBE_SECONDS)

    at_rest = 0.0


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


COLUMNS = (
    "load",
    "goodput, tokens/s",
    "tries refused",
    "turns not served",
    "Retry-After s, least / median / most",
    "came back and was taken",
    "TTFT s, p50 / p99",
    "ITL ms, p50 / p99",
    "last begun / normal again after s",
    "answered as alone",
)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def report(load: str, tokens: float, last_begun: float, recovery: float, tally: Tally) -> None:
    turns, unserved = sum(tally.ends.values()), tally.ends["not served"]
    waits, back = sorted(tally.retry_after), tally.came_back
    first = [percentile(tally.first, share) for share in (0.5, 0.99)]
    gaps = [1e3 * percentile(tally.gaps, share) for share in (0.5, 0.99)]
    odd = {end: n for end, n in tally.ends.items() if end not in ("answered", "not served")}
    print_row(
        load,
        f"{tokens:.0f}",
        f"{len(waits) / tally.tries:.0%}",
        f"{unserved / turns:.0%}",
        f"{waits[0]} / {statistics.median(waits):.0f} / {waits[-1]}" if waits else "-",
        f"{sum(back) / len(back):.0%}" if back else "-",
        f"{first[0]:.2f} / {first[1]:.2f}",
        f"{gaps[0]:.0f} / {gaps[1]:.0f}",
        f"{last_begun:.1f} / {recovery:.1f}",
        f"{tally.ends['answered']} of {turns - unserved} {odd or ''}",
    )


async def measure(args: argparse.Namespace, url: str, rates: list[float], capacity: float) -> float:
    """Prints a row for each rate. Returns the capacity, which is found if it is 0."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
        alone = Load(http, [])
        questions = []
        for i in range(PROMPTS):
            draw = random.Random(i)
            prompt = " ".join(draw.choices(WORDS, k=20))
            tokens = draw.randint(args.new // 2, args.new * 3 // 2)
            questions.append(Question(prompt, tokens, (await alone.once(Question(prompt, tokens)))[1]))
        Load.at_rest = statistics.median(alone.tally.first)
        print(
            f"\nat rest: TTFT {Load.at_rest:.3f} s, ITL {1e3 * statistics.median(alone.tally.gaps):.0f} ms", flush=True
        )
        if not capacity:
            load = Load(http, questions)
            capacity = await load.closed(2 * args.rows, args.seconds)
            capacity_tokens = capacity * statistics.fmean(question.tokens for question in questions)
            print(f"capacity: {capacity:.2f} turns/s, {capacity_tokens:.0f} tokens/s")
            report(f"closed loop, {2 * args.rows} clients", capacity_tokens, 0.0, 0.0, load.tally)
        print()
        print_row(*COLUMNS)
        print_row(*("---" for _ in COLUMNS))
        for rate in rates:
            load = Load(http, questions)
            in_time, last_begun, recovery = await load.open(rate * capacity, args.seconds)
            report(f"{rate:g} x capacity", in_time, last_begun, recovery, load.tally)
    return capacity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=BUILDERS, default="simulated")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer, on average")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rates", default="0.5,1,2,3")
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    prepare_environment()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    rates = [float(rate) for rate in args.rates.split(",")]
    application = Application(
        BUILDERS[args.engine],
        {
            "replicas": args.replicas,
            "kv_memory": "512MiB",
            "threads": 1,
            "cpus_per_replica": 0.1,
            "max_model_len": 1024,
            "max_batch_size": args.rows,
            "graceful_shutdown_timeout_seconds": 5.0,
        },
    )
    session = start_ray(None)
    try:
        start_serve(session, "127.0.0.1", port)
        application.deploy()
        began = time.monotonic()
        capacity = asyncio.run(measure(args, url, rates, 0.0))
        print("\nall begun at once:")
        application.deploy(max_running_sequences=65_536)
        asyncio.run(measure(args, url, rates[-1:], capacity))
        print(f"{time.monotonic() - began:.0f} s")
    finally:
        disconnect()


if __name__ == "__main__":
    main()
