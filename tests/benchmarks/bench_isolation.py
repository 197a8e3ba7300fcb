"""How long a stream pauses while another client sends the worst that a body may hold.

One stream has a token each few milliseconds, from an engine that costs nothing, behind Serve's proxy. Meanwhile bodies
of 4 MiB arrive, one kind after the other; each is sent several times at once. For each kind: the longest time in which
the stream's client heard nothing, how long the answers took, and what they were. Then the memory of the ingress and of
its side process at their worst.

    python -m tests.benchmarks.bench_isolation
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil

from tests.benchmarks.bench_front_door import MODEL, WAYS, server

LARGE = 4 * 2**20 - 300


def filled(before: str, item: str, after: str) -> bytes:
    return (before + ",".join([item] * ((LARGE - len(before) - len(after)) // (len(item) + 1))) + after).encode()


HI = '"messages": [{"role": "user", "content": "Hi"}]'
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROSE = "The quick brown fox said 1,234 times that it was late. \n"
TOOL = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "enum": ['
BIASES = json.dumps({"logit_bias": dict.fromkeys(range(300_000), 1)})
BODIES: dict[str, tuple[str, bytes]] = {
    "tools: zeros": (CHAT, filled(f'{{{HI}, "tools": [', "0", "]}")),
    "tools: one huge schema": (CHAT, filled(f"{{{HI}, {TOOL}", '"aaaaaaa"', "]}}}]}")),
    "messages: empty objects": (CHAT, filled('{"messages": [', "{}", "]}")),
    "messages: one of 4 MB": (CHAT, json.dumps({"messages": [{"role": "user", "content": "a" * LARGE}]}).encode()),
    "messages: 4,096 of 1 kB": (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "a b c " * 160}] * 4096}).encode(),
    ),
    "input: 400,000 items": (RESPONSES, filled('{"input": [', '{"a": 0}', "]}")),
    "logit_bias: 300,000": (CHAT, f"{{{HI}, {BIASES[1:]}".encode()),
    "prompt: ids": (COMPLETIONS, filled('{"prompt": [', "80", "]}")),
    "prompt: a text of a letter": (COMPLETIONS, json.dumps({"prompt": "a" * LARGE}).encode()),
    "deepest JSON": (CHAT, b'{"messages": ' + b"[" * LARGE),
    "/tokenize: prose": ("/tokenize", json.dumps({"prompt": PROSE * (LARGE // 60)}).encode()),
    "/tokenize: digits": ("/tokenize", json.dumps({"prompt": "7" * LARGE}).encode()),
    "/detokenize: ids": ("/detokenize", filled('{"tokens": [', "80", "]}")),
}


@dataclass
class Listener:
    """A client of a stream that notes the longest time in which it hears nothing."""

    longest: float = 0.0
    last: float = field(default_factory=time.perf_counter)

    async def listen(self, http: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 4000}
        while True:
            async with http.stream("POST", COMPLETIONS, json=body) as response:
                async for _ in response.aiter_bytes():
                    self.look()

    def look(self) -> None:
        now = time.perf_counter()
        self.longest, self.last = max(self.longest, now - self.last), now

    def begin(self) -> None:
        self.longest, self.last = 0.0, time.perf_counter()


def memory(pid: int, worst: dict[str, int]) -> None:
    for process in psutil.Process(pid).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
            name = "side process" if "side_worker" in line else "ingress" if "Ingress" in line else None
            if name is not None:
                worst[name] = max(worst.get(name, 0), process.memory_info().rss)
        except psutil.Error:
            continue


async def measure(port: int, pid: int, times: int) -> None:
    worst: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
        listener = Listener()
        listening = asyncio.create_task(listener.listen(http))
        await asyncio.sleep(2)
        listener.begin()
        await asyncio.sleep(5)
        listener.look()
        print(f"{'nothing else':28}{listener.longest * 1e3:10.0f}", flush=True)
        for name, (path, body) in BODIES.items():
            headers = {"content-type": "application/json"}
            listener.begin()
            begun = time.perf_counter()
            sending = [asyncio.create_task(http.post(path, content=body, headers=headers)) for _ in range(times)]
            while not all(task.done() for task in sending):
                await asyncio.wait(sending, timeout=0.1)
                memory(pid, worst)
            took = time.perf_counter() - begun
            await asyncio.sleep(0.5)
            listener.look()
            answers = Counter(task.result().status_code for task in sending)
            shown = ", ".join(f"{count} x {status}" for status, count in answers.items())
            print(f"{name:28}{listener.longest * 1e3:10.0f}{took:10.1f}   {shown}", flush=True)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    for name, size in worst.items():
        print(f"most memory of the {name}: {size / 2**20:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="how often each body is sent at once")
    parser.add_argument("--step", type=float, default=20.0, help="milliseconds between two tokens")
    args = parser.parse_args()
    print(f"{'while there arrives':28}{'pause ms':>10}{'took s':>10}   answers")
    with server(WAYS[1], args.step) as (port, pid):
        asyncio.run(measure(port, pid, args.times))


if __name__ == "__main__":
    main()
