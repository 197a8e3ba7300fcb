"""What a step of eight rows costs beside idle sessions: lines of the engine that it executes, and processor time.

python -m tests.benchmarks.bench_idle_sessions
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import FrameType
from typing import Any

from engine_actor.core.engine import Engine
from engine_actor.options import TurnOptions
from tests.support.doubles import SyntheticDecoder
from tests.support.engines import engine_of

ROWS = 8
IDLE = (0, 200, 2000)


def engine_beside(idle: int) -> tuple[Engine, list[Any]]:
    """An engine in the middle of eight answers, with so many idle residents; and the handles that keep both alive."""
    decoder = SyntheticDecoder(vocab=64, eos=1, context=4096)
    engine = engine_of(decoder, num_blocks=idle + ROWS * 300, max_batch_size=ROWS, max_residents=idle + ROWS)
    handles = []
    for number in range(idle):
        request = engine.create_request()
        request.begin_turn([2 + number % 60, 3, 4, 5], TurnOptions(max_generated_tokens=1))
        handles.append(request)
    while engine.has_pending_requests():
        engine.run(4096)
    for number in range(ROWS):
        request = engine.create_request()
        request.begin_turn([2 + number, 7, 8], TurnOptions(ignore_eos=True))
        handles.append(request)
    for _ in range(4):
        engine.run(64)
    return engine, handles


def lines_of_a_step(engine: Engine) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "engine_actor" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        engine.run(64)
        engine.stats()
    finally:
        sys.settrace(None)
    return count


def microseconds_of_a_step(engine: Engine, steps: int) -> float:
    spent = []
    for _ in range(steps):
        started = time.process_time()
        engine.run(64)
        engine.stats()
        spent.append((time.process_time() - started) * 1e6)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'idle sessions':>14} {'lines a step':>13} {'us a step':>10}")
    for idle in IDLE:
        engine, handles = engine_beside(idle)
        print(f"{idle:>14} {lines_of_a_step(engine):>13} {microseconds_of_a_step(engine, arguments.steps):>10.0f}")
        del handles


if __name__ == "__main__":
    main()
