"""Tokens per second of TorchDecoder.forward next to a plain transformers forward with its cache, in bfloat16.

Weights of a quantized file are measured as stored and expanded to bfloat16; transformers has them expanded.
Same model file, batch, context and threads, one process; the sides take turns, so that a change of the machine's speed
hits all. No scheduler and no sampling on any side. Figures are medians; with one thread they are of its CPU time,
which other work on the machine disturbs least.

    python -m tests.benchmarks.bench_decoder --model smollm2.gguf --threads 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = 200
PREFILL = 512
BATCHES = (1, 4, 8, 32)
BLOCK_SIZE = 16


def _arguments() -> argparse.Namespace:
    home = Path(os.environ.get("MOORAGE_HOME") or Path.home() / ".cache" / "moorage")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=home / "models" / "smollm2" / "model.gguf")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=12, help="timed calls of each side per case")
    return parser.parse_args()


def _peer(model: Path) -> Any:
    """transformers with dense bfloat16 weights. From a GGUF file it would keep them packed and unpack them in every
    call, which is no fair opponent, so they are filled in from our own reader."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine_actor.weights.opening import open_checkpoint

    where = {"gguf_file": model.name} if model.is_file() else {}
    config = AutoConfig.from_pretrained(model.parent if where else model, **where)
    peer = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    checkpoint = open_checkpoint(model)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.copy_(checkpoint.tensor(name, tuple(parameter.shape), torch.bfloat16))
    return peer


def _take_turns(repeats: int, *sides: Callable[[], float]) -> list[float]:
    """Median seconds of each side; a side returns the seconds of one call."""
    for side in sides:
        side()
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, taken in zip(sides, times, strict=True):
            taken.append(side())
    return [statistics.median(taken) for taken in times]


def _timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def main() -> None:
    arguments = _arguments()
    # Before torch: thread pools read these once, and spinning threads slow a shared machine down.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import DynamicCache

    from engine_actor.decoding.torch_decoder import TorchDecoder
    from engine_actor.memory.layout import PoolGeometry
    from tests.support.packed import Row, pack

    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    blocks_each = max(CONTEXT + 1, PREFILL) // BLOCK_SIZE + 1
    decoders = []
    for weights in ("auto", "expanded"):
        start = time.perf_counter()
        decoder = TorchDecoder.load(arguments.model, dtype="bfloat16", device="cpu", weights=weights)
        seconds = time.perf_counter() - start
        print(f"weights {weights}: loaded in {seconds:.1f} s, {decoder.weight_bytes / 2**20:.0f} MiB")
        decoder.allocate(PoolGeometry(1 + blocks_each * max(BATCHES), BLOCK_SIZE))
        decoders.append(decoder)
    print(f"{arguments.threads} threads; torch {torch.__version__}")
    peer = _peer(arguments.model)
    tokens = torch.randint(3, decoders[0].manifest.vocab_size, (max(BATCHES), PREFILL)).tolist()

    def blocks(row: int) -> range:
        return range(1 + row * blocks_each, 1 + (row + 1) * blocks_each)

    print(f"\n{'tokens/s':24}{'auto':>10}{'expanded':>10}{'ratio':>8}{'transformers':>14}{'ratio':>8}{'auto ms':>10}")
    with torch.inference_mode():

        def report(case: str, count: int, step: Any, theirs: Callable[[], float]) -> None:
            ours = [lambda decoder=decoder: _timed(lambda: decoder.forward(step), clock) for decoder in decoders]
            auto, expanded, other = _take_turns(arguments.repeats, *ours, theirs)
            rates = f"{count / auto:10.0f}{count / expanded:10.0f}{expanded / auto:8.2f}"
            print(f"{case:24}{rates}{count / other:14.0f}{other / auto:8.2f}{auto * 1e3:10.2f}", flush=True)

        for batch in BATCHES:
            cache = DynamicCache(config=peer.config)
            prompt = torch.tensor([row[:CONTEXT] for row in tokens[:batch]])
            peer(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
            for decoder in decoders:
                for row in range(batch):
                    decoder.forward(pack([Row(tokens[row][:CONTEXT], 0, blocks(row))], []))
            last = torch.tensor([[row[CONTEXT]] for row in tokens[:batch]])
            step = pack([Row(tokens[row][CONTEXT : CONTEXT + 1], CONTEXT, blocks(row)) for row in range(batch)])

            def decode_peer(cache: DynamicCache = cache, last: torch.Tensor = last) -> float:
                taken = _timed(lambda: peer(last, past_key_values=cache, use_cache=True), clock)
                cache.crop(-1)
                return taken

            report(f"decode, batch {batch}", batch, step, decode_peer)

        step = pack([Row(tokens[0], 0, blocks(0))], [PREFILL - 1])
        prompt = torch.tensor([tokens[0]])
        report(
            f"prefill, {PREFILL} tokens",
            PREFILL,
            step,
            lambda: _timed(
                lambda: peer(prompt, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1), clock
            ),
        )


if __name__ == "__main__":
    main()
