"""What the engine itself costs in a decode step: everything except the model.

    python -m tests.benchmarks.bench_engine_host [--rows 1 8 32 128 512] [--steps 300] [--sampled]

The decoder is a double that returns logits computed before; greedy unless --sampled. Prints microseconds per step and
per row, split by phase: the median over the steps of the thread's CPU time, so that neighbours on the machine disturb
little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine_actor.core.engine import Engine
from engine_actor.core.step import StepTransaction
from engine_actor.decoding.decoder import PackedStep
from engine_actor.manifest import DecoderManifest, PagedState
from engine_actor.memory.layout import PoolGeometry
from engine_actor.options import SamplingParams, TurnOptions
from tests.support.engine_view import view
from tests.support.engines import engine_of
from tests.support.logits_decoder import HostSampled

VOCAB = 64
PHASES = ("plan", "reserve", "checkpoint", "pack", "sample", "stage", "prepare", "commit", "publish", "other")


class InstantDecoder(HostSampled):
    """Returns the same logits for every row."""

    row_invariant = True

    def __init__(self, rows: int) -> None:
        self.manifest = DecoderManifest(VOCAB, 1 << 20, frozenset({1}), PagedState((0,), 1, 1, 8))
        self._logits = np.zeros((rows, VOCAB), np.float32)
        self._logits[:, 5] = 100.0

    def allocate(self, pools: PoolGeometry) -> None:
        pass

    def forward(self, step: PackedStep) -> np.ndarray[Any, Any]:
        return self._logits[: len(step.logits_rows)]

    def read_blocks(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        raise NotImplementedError("its blocks cannot move")

    def write_blocks(self, blocks: Sequence[int], content: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError("its blocks cannot move")


class Stopwatch:
    """Adds up the time of wrapped calls by phase."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PHASES, 0.0)

    def wrap(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args)
            finally:
                self.spent[phase] += time.thread_time() - started

        return timed


def watch(engine: Engine, stopwatch: Stopwatch) -> Callable[[], None]:
    """Times the engine's phases; returns what undoes it."""
    wrap, parts = stopwatch.wrap, view(engine)
    parts.scheduler.plan = wrap("plan", parts.scheduler.plan)  # type: ignore[method-assign]
    parts.packer.pack = wrap("pack", parts.packer.pack)  # type: ignore[method-assign]
    parts.scheduler.note_committed = wrap("publish", parts.scheduler.note_committed)  # type: ignore[method-assign]
    methods: dict[Callable[..., None], str] = {
        StepTransaction.reserve: "reserve",
        StepTransaction.checkpoint: "checkpoint",
        StepTransaction.collect: "sample",
        StepTransaction.stage: "stage",
        StepTransaction.prepare: "prepare",
        StepTransaction.commit: "commit",
        StepTransaction.publish_events: "publish",
        StepTransaction.share_full_blocks: "publish",
    }
    for method, phase in methods.items():
        setattr(StepTransaction, method.__name__, wrap(phase, method))

    def restore() -> None:
        for method in methods:
            setattr(StepTransaction, method.__name__, method)

    return restore


def measure(rows: int, steps: int, sampling: SamplingParams) -> dict[str, float]:
    """Median microseconds a step by phase, and in total without the stopwatch."""
    blocks = rows * (2 * steps // 16 + 4)
    engine = engine_of(
        InstantDecoder(rows), num_blocks=blocks, max_batch_size=rows, max_scheduled_tokens=max(2048, rows)
    )
    requests = [engine.create_request() for _ in range(rows)]
    for i, request in enumerate(requests):
        request.begin_turn([2 + i % 60, 3 + i // 60], TurnOptions(sampling=sampling, ignore_eos=True))
    engine.run(2 * rows)
    gc.collect()
    gc.disable()
    whole = []
    for _ in range(steps):
        started = time.thread_time()
        engine.run(2 * rows)
        whole.append(time.thread_time() - started)
    result = {"step": statistics.median(whole) * 1e6}
    samples: dict[str, list[float]] = {phase: [] for phase in PHASES}
    stopwatch = Stopwatch()
    restore = watch(engine, stopwatch)
    try:
        for _ in range(steps):
            stopwatch.spent = dict.fromkeys(PHASES, 0.0)
            started = time.thread_time()
            engine.run(2 * rows)
            total = time.thread_time() - started
            stopwatch.spent["other"] = total - sum(stopwatch.spent.values())
            for phase, spent in stopwatch.spent.items():
                samples[phase].append(spent)
    finally:
        restore()
        gc.enable()
    return result | {phase: statistics.median(values) * 1e6 for phase, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sampled", action="store_true")
    args = parser.parse_args()
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=7) if args.sampled else SamplingParams()
    print(f"{'rows':>5} {'us/step':>9} {'us/row':>7} | " + " ".join(f"{phase:>10}" for phase in PHASES))
    for rows in args.rows:
        figures = measure(rows, args.steps, sampling)
        split = " ".join(f"{figures[phase]:10.1f}" for phase in PHASES)
        print(f"{rows:5d} {figures['step']:9.1f} {figures['step'] / rows:7.2f} | {split}")


if __name__ == "__main__":
    main()
