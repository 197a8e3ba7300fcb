"""What a row costs the host in a decode step when its answer follows a grammar, against the same row without one.

    python -m tests.benchmarks.bench_grammars MODEL [--rows 1 8 32] [--steps 200]

MODEL: a folder or GGUF file, for its vocabulary; its weights are not read. The decoder is a double that returns logits
computed before. Microseconds of the thread's CPU time, medians over the steps of a run, with both kinds of turns in
turn about:

    plain      a step of rows without a grammar
    guided     a step of the same rows, each with a JSON schema
    mixed      a step in which one row has it
    a row      what a guided row costs more than a plain one
    mask, read of a row: what the library takes for the mask, and for a token that is read
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_actor.core.engine import Engine
from engine_actor.decoding.decoder import PackedStep
from engine_actor.manifest import DecoderManifest, PagedState
from engine_actor.memory.layout import PoolGeometry
from engine_actor.options import GrammarKind, GrammarSpec, TurnOptions
from engine_actor.sampling.grammar_cursor import Cursor
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.engine_view import matcher_of
from tests.support.engines import engine_of
from tests.support.logits_decoder import HostSampled

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b", "c"]}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
PEOPLE = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


class InstantDecoder(HostSampled):
    """Random logits, the same for every step, against which each row is masked."""

    row_invariant = True

    def __init__(self, rows: int, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.vocab_size
        self.manifest = DecoderManifest(vocab, 1 << 20, tokenizer.eos_token_ids, PagedState((0,), 1, 1, 8))
        self._logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)

    def allocate(self, pools: PoolGeometry) -> None:
        pass

    def forward(self, step: PackedStep) -> np.ndarray[Any, Any]:
        return self._logits[: len(step.logits_rows)]

    def read_blocks(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        raise NotImplementedError("no session moves here")

    def write_blocks(self, blocks: Sequence[int], content: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError("no session moves here")


def filled(engine: Engine, rows: int, guided: int) -> list[Any]:
    requests = [engine.create_request() for _ in range(rows)]
    for i, request in enumerate(requests):
        spec = PEOPLE if i < guided else None
        request.begin_turn([2 + i, 3], TurnOptions(grammar=spec, ignore_eos=spec is None))
    engine.run(2 * rows)
    return requests


def measure(tokenizer: Tokenizer, rows: int, steps: int) -> dict[str, float]:
    engines = {}
    for name, guided in (("plain", 0), ("guided", rows), ("mixed", 1)):
        blocks, decoder = rows * (steps // 16 + 8), InstantDecoder(rows, tokenizer)
        engine = engine_of(decoder, num_blocks=blocks, max_batch_size=rows, vocabulary=tokenizer.vocabulary)
        engines[name] = engine, filled(engine, rows, guided)
    spent: dict[str, list[float]] = {name: [] for name in engines}
    gc.collect()
    gc.disable()
    for _ in range(steps):
        for name, (engine, _) in engines.items():
            begun = time.thread_time()
            engine.run(2 * rows)
            spent[name].append(time.thread_time() - begun)
    gc.enable()
    figures = {name: statistics.median(times) * 1e6 for name, times in spent.items()}
    answers = [request.tokens[2:] for request in engines["guided"][1]]
    return figures | library(engines["guided"][0], answers[0])


def library(engine: Engine, answer: list[int]) -> dict[str, float]:
    """A cursor over an answer, token by token."""
    cursor: Cursor = engine.grammars.cursor(PEOPLE)
    masks, reads = list[float](), list[float]()
    matcher, bits = matcher_of(cursor)
    for token in answer:
        for times, call in (
            (masks, lambda: matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)),
            (reads, lambda token=token: matcher.consume_token(token)),
        ):
            begun = time.thread_time()
            call()
            times.append(time.thread_time() - begun)
    return {"mask": statistics.mean(masks) * 1e6, "read": statistics.mean(reads) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    print(f"{'rows':>5} {'plain':>9} {'guided':>9} {'ratio':>6} {'mixed':>9} {'a row':>8} {'mask':>7} {'read':>6}")
    for rows in args.rows:
        f = measure(tokenizer, rows, args.steps)
        row = (f["guided"] - f["plain"]) / rows
        print(
            f"{rows:5d} {f['plain']:9.1f} {f['guided']:9.1f} {f['guided'] / f['plain']:6.2f} {f['mixed']:9.1f}"
            f" {row:8.1f} {f['mask']:7.1f} {f['read']:6.2f}"
        )


if __name__ == "__main__":
    main()
