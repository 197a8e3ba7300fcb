"""What it costs to bring a conversation to another replica: its cache copied, or its tokens computed again.

    python -m tests.benchmarks.bench_moving --model smollm2.gguf --tokens 1000 --threads 2

Two EngineActors in one process; between them a message is pickled as Ray's object store does it (protocol 5, buffers
copied once). Prints medians in milliseconds over the repeats, and how long the next turn's first token took with
either. The first repeats write into memory that the system has not handed out yet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

OWNER = "bench"
LARGE = 2**40


def _arguments() -> argparse.Namespace:
    home = Path(os.environ.get("MOORAGE_HOME") or Path.home() / ".cache" / "moorage")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=home / "models" / "smollm2" / "model.gguf")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=1000, help="length of each conversation")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


class Times:
    """Milliseconds by what was done."""

    def __init__(self) -> None:
        self._of: dict[str, list[float]] = {}

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = function()
        self._add(name, started)
        return result

    async def wait(self, name: str, awaitable: Awaitable[Any]) -> Any:
        started = time.perf_counter()
        result = await awaitable
        self._add(name, started)
        return result

    def _add(self, name: str, started: float) -> None:
        self._of.setdefault(name, []).append(1000 * (time.perf_counter() - started))

    def report(self) -> str:
        return "\n".join(f"  {name:<42}{statistics.median(times):9.1f}" for name, times in self._of.items())


async def _measure(arguments: argparse.Namespace) -> None:
    from engine_actor.actor.actor import EngineActor
    from engine_actor.actor_options import ActorOptions
    from engine_actor.messages import TurnEnded, TurnRequest
    from engine_actor.options import SamplingParams

    options = ActorOptions(str(arguments.model), kv_memory=2.0**30, threads=arguments.threads)
    old, new = EngineActor(options, "old"), EngineActor(options, "new")
    await old.start()
    await new.start()
    times = Times()

    async def turn(actor: EngineActor, session: str, prompt: tuple[int, ...]) -> TurnEnded:
        """A turn of one token: as long as its prompt takes."""
        ended = None
        async for delta in actor.stream_turn(TurnRequest("bench", OWNER, session, prompt, SamplingParams(), 1)):
            ended = delta
        assert isinstance(ended, TurnEnded), ended
        return ended

    for i in range(arguments.repeats):
        # Beginnings differ, so that nothing is found in the prefix index.
        prompt = (100 + i, *(1000 + (7 * at) % 2000 for at in range(arguments.tokens - 1)))
        longer = (*prompt, *range(3000, 3010))
        await turn(old, f"copied {i}", prompt)
        moved = await times.wait("read out of the pool", old.take_along(OWNER, f"copied {i}", LARGE))
        assert moved.kv is not None
        buffers: list[pickle.PickleBuffer] = []
        message = times.call("pickle", partial(pickle.dumps, moved, 5, buffer_callback=buffers.append))
        copied = times.call("copy into the object store", partial(list, map(bytes, buffers)))
        arrived = times.call("unpickle", partial(pickle.loads, message, buffers=copied))
        await times.wait("write into the other pool", new.adopt(arrived))
        ended = await times.wait("next turn, first token: cache moved", turn(new, f"copied {i}", longer))
        assert ended.cached_tokens >= arguments.tokens, ended
        await new.close_session(OWNER, f"copied {i}")
        other = (200 + i, *longer[1:])
        ended = await times.wait("next turn, first token: tokens moved", turn(new, f"computed {i}", other))
        assert ended.cached_tokens == 0, ended
    megabytes = moved.kv.content.nbytes / 2**20
    print(f"{arguments.tokens} tokens, {megabytes:.1f} MiB, {arguments.threads} threads; milliseconds:")
    print(times.report())
    await asyncio.gather(old.stop(), new.stop())


def main() -> None:
    arguments = _arguments()
    # Before torch: thread pools read these once, and spinning threads slow a shared machine down.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    asyncio.run(_measure(arguments))


if __name__ == "__main__":
    main()
