"""Linears and attention of SmolLM2-135M: the kernels against torch's own, in one run.

    OMP_NUM_THREADS=2 python -m tests.benchmarks.bench_kernels [--layers 30] [--repeats 5]

Every figure is the best of some repeats, in ms over all layers; in brackets its speed over the baseline's of the same
run, so more than 1 is faster. Each layer has its own weights and cache, as in a model: caches don't flatter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native, onednn
from kernels.linear import PackedLinear
from kernels.linear.in_parts import OneDnnLinear
from kernels.paged_attention import paged_attention
from kernels.quantized_linear import QuantizedLinear, QuantizedMatrix

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # qkv, output, gate and up, down
QUERY_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
Variant = tuple[str, Callable[[], object]]


def best_times(variants: Sequence[Variant], repeats: int) -> list[float]:
    """Milliseconds of each variant. They take turns, so that a busy moment of the machine meets all of them."""
    times = [float("inf")] * len(variants)
    for _ in range(repeats):
        for i, (_, run) in enumerate(variants):
            start = time.perf_counter()
            run()
            times[i] = min(times[i], (time.perf_counter() - start) * 1e3)
    return times


def print_row(title: str, variants: Sequence[Variant], repeats: int) -> None:
    times = best_times(variants, repeats)
    cells = [f"{value:9.2f} ({times[0] / value:5.2f}x)" for value in times]
    print(f"{title:>14} " + " ".join(cells))


def print_head(title: str, names: Sequence[str]) -> None:
    print(f"\n{title}; baseline: {names[0]}\n{'':>14} " + " ".join(f"{name:>18}" for name in names))


def quantized(n: int, k: int, bits: int) -> QuantizedMatrix:
    """Random codes in groups of 32, with minimums in 4 bits: the forms of GGUF's Q4_1 and Q8_0."""
    low = 0 if bits == 4 else -128
    codes = torch.randint(low, low + (1 << bits), (n, k)).to(torch.int8)
    scales = torch.full((n, k // 32), 2.0**-bits / k**0.5, dtype=torch.float16)
    return QuantizedMatrix(codes, scales, torch.full_like(scales, -0.5 / k**0.5) if bits == 4 else None, bits)


def bench_linears(layers: int, repeats: int) -> None:
    sizes = SHAPES * layers
    weights = [torch.randn(n, k) / k**0.5 for n, k in sizes]
    halves = [weight.bfloat16() for weight in weights]
    packed: dict[str, list[Callable[[Tensor], Tensor]]] = {}
    if onednn.available():
        packed["onednn fp32"] = [OneDnnLinear(weight, None) for weight in weights]
    if onednn.takes_bfloat16():
        packed["onednn bf16"] = [OneDnnLinear(weight, None) for weight in halves]
    packed["ours fp32"] = [PackedLinear(weight) for weight in weights]
    packed["ours bf16"] = [PackedLinear(weight) for weight in halves]
    if native.shared_object() is not None:
        for activations, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            for bits in (4, 8):
                packed[f"q{bits} {name}"] = [
                    QuantizedLinear(quantized(n, k, bits), activations=activations) for n, k in sizes
                ]
    print_head("Linears, ms", ["F.linear fp32", "F.linear bf16", *packed])
    for rows in (1, 4, 8, 32, 512):
        x = {k: torch.randn(rows, k) for _, k in SHAPES}

        def plain(matrices: list[Tensor], x: dict[int, Tensor] = x) -> None:
            for weight in matrices:
                F.linear(x[weight.shape[1]].to(weight.dtype), weight)

        def ours(functions: list[Callable[[Tensor], Tensor]], x: dict[int, Tensor] = x) -> None:
            for i, function in enumerate(functions):
                function(x[SHAPES[i % len(SHAPES)][1]])

        variants: list[Variant] = [
            ("F.linear fp32", lambda: plain(weights)),
            ("F.linear bf16", lambda: plain(halves)),
            *((name, lambda functions=functions: ours(functions)) for name, functions in packed.items()),
        ]
        print_row(f"{rows} rows", variants, max(2, repeats // 2) if rows > 100 else repeats)


def bench_attention(layers: int, repeats: int) -> None:
    names = ["gather + SDPA", "ours fp32 cache", "ours bf16 cache"]
    print_head("Attention, ms", names)
    for rows, queries, past in [(1, 1, 200), (1, 1, 4000), (8, 1, 1000), (32, 1, 200), (1, 512, 0)]:
        length = past + queries
        columns = -(-length // BLOCK_SIZE)
        blocks = rows * columns
        shape = (blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        # No more caches than fill 1 GiB; layers go round over them.
        count = max(1, min(layers, (1 << 30) // (2 * blocks * BLOCK_SIZE * KV_HEADS * HEAD_SIZE * 4)))
        caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(count)]
        halves = [(k.bfloat16(), v.bfloat16()) for k, v in caches]
        table = torch.randperm(blocks).to(torch.int32).view(rows, columns)
        q = torch.randn(rows * queries, QUERY_HEADS, HEAD_SIZE)
        cumulative = (torch.arange(rows + 1) * queries).to(torch.int32)
        position = torch.full((rows,), past, dtype=torch.int32)
        arguments = (table, cumulative, position, HEAD_SIZE**-0.5)

        def ours(pairs: list[tuple[Tensor, Tensor]], q: Tensor = q, arguments: tuple[Any, ...] = arguments) -> None:
            for i in range(layers):
                paged_attention(q, *pairs[i % len(pairs)], *arguments)

        def gather(
            pairs: list[tuple[Tensor, Tensor]] = caches, q: Tensor = q, table: Tensor = table, length: int = length
        ) -> None:
            heads = q.view(table.shape[0], -1, QUERY_HEADS, HEAD_SIZE).transpose(1, 2)
            causal = heads.shape[2] > 1
            for i in range(layers):
                k, v = (cache[table.long()].flatten(1, 2)[:, :length] for cache in pairs[i % len(pairs)])
                F.scaled_dot_product_attention(
                    heads, k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
                )

        runs = [gather, lambda caches=caches: ours(caches), lambda halves=halves: ours(halves)]
        print_row(f"{rows}x{queries} at {past}", list(zip(names, runs, strict=True)), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, native: {native.status()[1]}")
    with torch.inference_mode():
        bench_linears(options.layers, options.repeats)
        bench_attention(options.layers, options.repeats)


if __name__ == "__main__":
    main()
