"""A server through HTTP: streamed tokens/s, TTFT and ITL at 1, 8 and 32 streams, and of a second turn.

    python -m tests.benchmarks.bench_http [--url http://127.0.0.1:8000] [--api-key KEY] [--new 64] [--streams 1,8,32]

Without --url it starts one of its own (the demo model, one replica) and stops it in the end. Prints one table. Only
addresses of this machine are accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

TEXT = "the harbour lies on the north side of the bay and the water stays calm when the wind turns to the west"
WORDS = TEXT.split()


@dataclass
class Measured:
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    prompt: int = 0
    text: str = ""


async def stream(
    client: httpx.AsyncClient, model: str, messages: list[dict[str, str]], new: int, session: str
) -> Measured:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    measured = Measured()
    started = last = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": session}) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                usage = event["usage"]
                measured.tokens, measured.prompt = usage["completion_tokens"], usage["prompt_tokens"]
                measured.cached = usage["prompt_tokens_details"]["cached_tokens"]
            elif event["choices"] and event["choices"][0]["delta"].get("content"):
                now = time.perf_counter()
                if measured.text:
                    measured.gaps.append(now - last)
                else:
                    measured.ttft = now - started
                last = now
                measured.text += event["choices"][0]["delta"]["content"]
    return measured


def prompt(index: int, words: int = 120) -> list[dict[str, str]]:
    text = " ".join(WORDS[(index + i) % len(WORDS)] for i in range(words))
    return [{"role": "user", "content": f"Text {index}: {text}. Go on with the story."}]


def row(name: str, results: list[Measured], seconds: float) -> str:
    gaps = sorted(gap for result in results for gap in result.gaps) or [0.0]
    share = sum(r.cached for r in results) / max(1, sum(r.prompt for r in results))
    return (
        f"{name:24}{sum(r.tokens for r in results) / seconds:10.1f}"
        f"{statistics.median(r.ttft for r in results) * 1e3:12.0f}{statistics.median(gaps) * 1e3:10.1f}"
        f"{gaps[int(len(gaps) * 0.99)] * 1e3:10.1f}{share:9.0%}"
    )


async def measure(url: str, key: str | None, new: int, streams: list[int]) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        await stream(client, model, prompt(0, 10), 4, "warm-up")
        print(f"{'':24}{'tokens/s':>10}{'TTFT p50 ms':>12}{'ITL p50':>10}{'ITL p99':>10}{'cached':>9}")
        for count in streams:
            names = [uuid.uuid4().hex for _ in range(count)]
            started = time.perf_counter()
            first = await asyncio.gather(*[stream(client, model, prompt(i), new, name) for i, name in enumerate(names)])
            print(row(f"{count} streams, turn 1", first, time.perf_counter() - started))
            histories = [
                [*prompt(i), {"role": "assistant", "content": result.text}, {"role": "user", "content": "And then?"}]
                for i, result in enumerate(first)
            ]
            started = time.perf_counter()
            second = await asyncio.gather(
                *[stream(client, model, history, new, name) for history, name in zip(histories, names, strict=True)]
            )
            print(row(f"{count} streams, turn 2", second, time.perf_counter() - started))
            for name in names:
                await client.delete(f"/v1/sessions/{name}")


@contextmanager
def own_server() -> Iterator[str]:
    """`moorage serve` on a free port, ready; stopped as by Ctrl-C."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "serve_app.cli", "serve", "--port", str(port), "--kv-memory", "2GiB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not become ready")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="default: a server of its own")
    parser.add_argument("--api-key")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--streams", default="1,8,32")
    args = parser.parse_args()
    if args.url and urlsplit(args.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        parser.error("only a server on this machine is loaded")
    with nullcontext(args.url) if args.url else own_server() as url:
        asyncio.run(measure(url, args.api_key, args.new, [int(part) for part in args.streams.split(",")]))


if __name__ == "__main__":
    main()
