"""The engine alone, on a real model: decode and prefill throughput, TTFT, and the share of a step outside the decoder.

    python -m tests.benchmarks.bench_engine [--model PATH] [--threads 2] [--dtype bfloat16] [--context 200] [--new 32]

Prints one table. Times are wall time on this machine; compare figures of one run only.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, here or by what follows

import torch

from engine_actor.core.engine import Engine
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.block_table import blocks_for
from engine_actor.options import SamplingParams, TurnOptions
from engine_actor.requests.events import EventFlags
from serve_app.model_store import resolve_model
from tests.support.engines import engine_of

MAX_EVENTS = 4096


def finish_prefill(engine: Engine, rows: int) -> None:
    seen = 0
    while seen < rows:
        seen += sum(bool(event.flags & EventFlags.TOKEN) for event in engine.run(MAX_EVENTS))


def decode(
    engine: Engine, vocab: int, rows: int, context: int, new: int, sampling: SamplingParams
) -> tuple[float, float]:
    """(tokens/s, share of a step outside the decoder) of steps in which all rows decode."""
    rng = random.Random(f"{rows} {sampling}")  # no two runs share a prefix
    requests = [engine.create_request() for _ in range(rows)]
    options = TurnOptions(new + 2, sampling, ignore_eos=True)
    for request in requests:
        request.begin_turn([rng.randrange(100, vocab) for _ in range(context)], options)
    finish_prefill(engine, rows)
    steps, outside, tokens = [], [], 0
    for _ in range(new):
        started = time.perf_counter()
        tokens += len(engine.run(MAX_EVENTS))
        steps.append(time.perf_counter() - started)
        outside.append(1 - engine.last_report.decoder_seconds / steps[-1])
    for request in requests:
        request.close()
    return tokens / sum(steps), statistics.median(outside)


def prefill(engine: Engine, vocab: int, length: int) -> tuple[float, float]:
    """(tokens/s, TTFT in seconds) of one prompt on an idle engine."""
    rng = random.Random(length)
    request = engine.create_request()
    started = time.perf_counter()
    request.begin_turn([rng.randrange(100, vocab) for _ in range(length)], TurnOptions(1, ignore_eos=True))
    finish_prefill(engine, 1)
    seconds = time.perf_counter() - started
    request.close()
    return length / seconds, seconds


def continuation(engine: Engine, vocab: int, history: int, new: int) -> tuple[float, float]:
    """TTFT of a turn of `new` tokens on a history of `history`, and TTFT of the same `new` tokens alone."""
    rng = random.Random(history)
    request = engine.create_request()
    request.begin_turn([rng.randrange(100, vocab) for _ in range(history)], TurnOptions(1, ignore_eos=True))
    finish_prefill(engine, 1)
    tokens = [rng.randrange(100, vocab) for _ in range(new)]
    times = []
    for target in (request, engine.create_request()):
        started = time.perf_counter()
        target.begin_turn(tokens, TurnOptions(1, ignore_eos=True))
        finish_prefill(engine, 1)
        times.append(time.perf_counter() - started)
        target.close()
    return times[0], times[1]


def shared_prompt(engine: Engine, vocab: int, shared: int, own: int) -> tuple[float, float]:
    """TTFT of the first and of the second session whose prompts begin with the same `shared` tokens and go on with
    `own` different ones: medians of three pairs."""
    rng = random.Random(shared)
    pairs = []
    for _ in range(3):
        system = [rng.randrange(100, vocab) for _ in range(shared)]
        times = []
        for _ in range(2):
            request = engine.create_request()
            started = time.perf_counter()
            rest = [rng.randrange(100, vocab) for _ in range(own)]
            request.begin_turn(system + rest, TurnOptions(1, ignore_eos=True))
            finish_prefill(engine, 1)
            times.append(time.perf_counter() - started)
            request.close()
        pairs.append(times)
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a known name, a Hugging Face folder or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--weights", default="auto", choices=["auto", "stored", "expanded"])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--new", type=int, default=32, help="decode steps measured at each batch size")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    decoder = TorchDecoder.load(resolve_model(args.model), dtype=args.dtype, weights=args.weights)
    loaded = time.perf_counter() - started
    blocks = 34 * blocks_for(args.context + args.new + 4, 16) + 160
    engine = engine_of(decoder, num_blocks=blocks, max_batch_size=32)
    vocab = decoder.manifest.vocab_size
    form = f"weights {args.weights}, {decoder.weight_bytes / 2**20:.0f} MiB"
    print(
        f"{args.model}, {args.dtype}, {form}, {args.threads} threads, context {args.context}; loaded in {loaded:.1f} s"
    )
    print(f"{'':24}{'tokens/s':>10}{'outside decoder':>18}")
    decode(engine, vocab, 2, 20, 3, SamplingParams())  # warm-up
    for rows in (1, 8, 32):
        speed, outside = decode(engine, vocab, rows, args.context, args.new, SamplingParams())
        print(f"{f'decode, {rows} rows':24}{speed:10.1f}{outside:18.1%}")
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=1)
    speed, outside = decode(engine, vocab, 32, args.context, args.new, sampled)
    print(f"{'decode, 32 rows, sampled':24}{speed:10.1f}{outside:18.1%}")
    for length in (128, 512):
        speed, seconds = prefill(engine, vocab, length)
        print(f"{f'prefill, {length} tokens':24}{speed:10.1f}    TTFT {seconds * 1e3:.0f} ms")
    resident, alone = continuation(engine, vocab, 1000, 64)
    print(
        f"64 new tokens after 1000: TTFT {resident * 1e3:.0f} ms; alone: {alone * 1e3:.0f} ms; "
        f"ratio {resident / alone:.2f}"
    )
    first, second = shared_prompt(engine, vocab, 500, 20)
    print(
        f"500 shared tokens + 20 own: TTFT of the first session {first * 1e3:.0f} ms, of the second "
        f"{second * 1e3:.0f} ms; ratio {second / first:.2f}"
    )


if __name__ == "__main__":
    main()
