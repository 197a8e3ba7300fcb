"""Quantized GGUF blocks as codes and scales: the very numbers of the library, and no more memory than they take."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from engine_actor.weights.gguf_blocks import as_stored
from engine_actor.weights.gguf_layouts import LAYOUTS
from engine_actor.weights.opening import open_checkpoint
from kernels import native
from kernels.quantized_linear import QuantizedLinear
from tests.support import tiny_models
from tests.support.gguf_writing import write_gguf

KINDS = sorted(LAYOUTS)
BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 3) -> np.ndarray:
    """Bytes at random; those of float16 scales are exponents of finite numbers, small and large."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
    for start in {Kind.Q6_K: (208,)}.get(
        kind, (0, 2) if kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K) else (0,)
    ):
        high = raw[:, start + 1]
        high[(high & 0x7C) == 0x7C] &= 0xBF
    return raw.reshape(-1)


@kinds
def test_every_value_is_the_librarys(kind: Kind) -> None:
    rows, columns = 1030, 512  # two whole pieces and a rest
    raw = random_blocks(kind, rows, columns)
    values = dequantize(raw.reshape(rows, -1), kind)
    assert np.isfinite(values).all() and len(np.unique(values)) > 1000
    expected = torch.from_numpy(values.copy())
    stored = as_stored(raw, kind, rows, columns)
    assert (stored.shape, stored.bits) == ((rows, columns), BITS.get(kind, 8))
    assert torch.equal(stored.expanded(), expected)
    if native.shared_object() is not None:
        assert torch.equal(QuantizedLinear(stored).rows(torch.arange(rows)), expected)


@kinds
def test_scale_times_code_needs_no_rounding(kind: Kind) -> None:
    """So that it does not matter whether it is rounded before the minimum is added."""
    stored = as_stored(random_blocks(kind, 4, 2048), kind, 4, 2048)
    scales = stored.scales.float().repeat_interleave(stored.group, 1)
    pairs = zip(scales.view(-1).tolist(), stored.codes.view(-1).tolist(), strict=True)
    for scale, code in pairs:
        assert Fraction(scale) * code == Fraction(float(np.float32(scale) * np.float32(code)))


@kinds
def test_reading_takes_little_more_memory_than_the_codes(kind: Kind) -> None:
    rows, columns = 4096, 4096
    raw = random_blocks(kind, rows, columns)
    tracemalloc.start()
    try:
        stored = as_stored(raw, kind, rows, columns)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    result = stored.codes.nbytes + stored.scales.nbytes * (1 if stored.minimums is None else 2)
    assert result < 2 * rows * columns
    # Expanded to float32 it would be 64 MiB. Unpacking scales makes small temporaries of their own.
    assert peak < result + 24 * 2**20


def test_a_checkpoint_gives_matrices_as_stored_with_the_rows_in_the_order_of_the_others(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("llama"), Kind.Q5_1, others={"attn_v": Kind.F16})
    checkpoint = open_checkpoint(path)
    q, k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    for name, rows in ((q, 64), (k, 32), ("model.embed_tokens.weight", tiny_models.VOCAB)):
        stored = checkpoint.stored(name, (rows, 64))
        assert stored is not None and torch.equal(stored.expanded(), checkpoint.tensor(name, (rows, 64)))
    assert checkpoint.stored(v, (32, 64)) is None


def test_the_fingerprint_tells_stored_from_expanded_and_one_code_from_another(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("llama"), Kind.Q8_0)
    other = tmp_path / "other.gguf"
    damaged = bytearray(path.read_bytes())
    name = "model.layers.0.mlp.down_proj.weight"
    start = next(t.data_offset for t in GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    damaged[start + 2] ^= 1  # the first code, after its scale
    other.write_bytes(damaged)

    def fingerprint(file: Path, stored: bool) -> str:
        checkpoint = open_checkpoint(file)
        (checkpoint.stored if stored else checkpoint.tensor)(name, (64, 96))
        return checkpoint.fingerprint

    prints = [fingerprint(file, stored) for file in (path, other) for stored in (True, False)]
    assert len(set(prints)) == 4 and fingerprint(path, True) == prints[0]
