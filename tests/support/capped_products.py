"""Run as a program: the products of the kernels, a decoder's logits and what was chosen for them, in a process that
MOORAGE_CPU holds to a lesser processor.

    python -m tests.support.capped_products INPUTS RESULTS MODEL

INPUTS and RESULTS are files of torch.save: the dictionaries of `inputs()` and `results()`. MODEL is a small GGUF file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_actor.actor_options import ActorOptions
from engine_actor.decoding.load import load_decoder
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.layout import PoolGeometry
from kernels import native, processor
from kernels.activation import gated_gelu_tanh, gated_silu
from kernels.kv_write import kv_write
from kernels.linear import PackedLinear
from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention
from kernels.quantized_linear import QuantizedLinear, QuantizedMatrix
from kernels.rotary import apply_rotary
from kernels.selfcheck import check_products
from tests.support.packed import Row, pack, run_in_chunks

# Bits, type of the scales, whether there are minimums.
FORMS = [
    (4, torch.float16, False),
    (4, torch.float16, True),
    (4, torch.float32, True),
    (8, torch.float16, False),
    (8, torch.float16, True),
    (8, torch.float32, False),
    (8, torch.float32, True),
]
ROWS = (1, 2, 7, 13, 65)
_TOKENS = [(7 * i) % 97 for i in range(45)]


def inputs() -> dict[str, Any]:
    """Made in one process for all: torch's random numbers depend on the vectors that it uses."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    n, k, group = 130, 272, 16
    quantized = []
    for bits, dtype, with_minimums in FORMS:
        low = 0 if bits == 4 and with_minimums else -(1 << bits) // 2
        codes = torch.randint(low, low + (1 << bits), (n, k), generator=random).to(torch.int8)
        scales = (torch.rand(n, k // group, generator=random) - 0.5) * (4 / (1 << bits) / k**0.5)
        minimums = (normal(n, k // group) / k**0.5).to(dtype) if with_minimums else None
        quantized.append((codes, scales.half().to(dtype), minimums, bits))
    return {
        "x": normal(max(ROWS), k),
        "weight": normal(n, k) / k**0.5,
        "bias": normal(n),
        "quantized": quantized,
        "gate_up": normal(9, 2 * 157) * 4,
        "heads": normal(21, 4, 64),
        "angle": normal(21, 32) * 5,
        "cache": normal(2, 8, 16, 2, 64),
    }


def results(given: dict[str, Any], model: Path) -> dict[str, Any]:
    """`bits`: tensors whose bits do not depend on the width of vectors where multiply-adds are fused; `close`: other
    tensors; `chosen`: which implementations ran."""
    x, weight, bias = given["x"], given["weight"], given["bias"]
    bits: dict[str, Tensor] = {}
    close: dict[str, Tensor] = {}
    chosen = {outcome.product: outcome.failure or outcome.path for outcome in check_products(torch.device("cpu"))}
    is_native = native.shared_object() is not None
    for dtype in (torch.float32, torch.bfloat16):
        layer = PackedLinear(weight.to(dtype), bias)
        chosen[f"row-invariant {dtype}"] = str(layer.row_invariant)
        found = bits if is_native and layer.kind.startswith("native") else close
        found |= {f"{dtype} {rows}": layer(x[:rows]) for rows in ROWS}
    if is_native:
        for form, parts in zip(FORMS, given["quantized"], strict=True):
            quantized = QuantizedLinear(QuantizedMatrix(*parts), bias)
            bits |= {f"{form} {rows}": quantized(x[:rows]) for rows in ROWS}
            bits[f"{form} rows"] = quantized.rows(torch.arange(len(bias)))
        every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
        every = every[every.isfinite()][:, None]
        codes = torch.ones(len(every), 32, dtype=torch.int8)
        scales = QuantizedLinear(QuantizedMatrix(codes, every, None, 8))
        bits["float16 scales"] = scales.rows(torch.arange(len(every)))
    close["silu"], close["gelu"] = gated_silu(given["gate_up"]), gated_gelu_tanh(given["gate_up"])
    close["norm"] = rms_norm(x, x[0], 1e-5)
    heads, angle = given["heads"].clone(), given["angle"]
    close["rotary"] = apply_rotary(heads, angle.cos(), angle.sin())
    table = torch.tensor([[3, 1, -1, -1, -1], [0, 2, 4, 6, 7]], dtype=torch.int32)
    cumulative, past = torch.tensor([0, 20, 21], dtype=torch.int32), torch.tensor([0, 70], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        keys, values = given["cache"].to(dtype)
        kv_write(given["heads"][:2, :2], given["heads"][2:4, :2], keys, values, torch.tensor([5, 90]))
        bits[f"cache {dtype}"] = torch.stack([keys, values]).float()
        close[f"attention {dtype}"] = paged_attention(given["heads"], keys, values, table, cumulative, past, 0.125)
    close |= _logits(model, chosen)
    return {"bits": bits, "close": close, "chosen": chosen | {"march": processor.march()}}


def _logits(model: Path, chosen: dict[str, str]) -> dict[str, Tensor]:
    """Of the decoder that a start would load: a prompt in chunks, and the same bits beside another row."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        loaded = load_decoder(ActorOptions(str(model), dtype=dtype, device="cpu"))
        chosen["notes"] = "; ".join(loaded.notes)
        decoder = loaded.decoder
        assert isinstance(decoder, TorchDecoder)
        decoder.allocate(PoolGeometry(16, 16))
        found[f"logits {dtype}"] = run_in_chunks(decoder, _TOKENS, 32, [1, 2, 3])
        company = decoder.forward(pack([Row([5] * 9, 0, [8]), Row(_TOKENS, 0, [4, 5, 6])]))[9:]
        same = torch.equal(company, found[f"logits {dtype}"])
        chosen[f"decoder {dtype}"] = f"invariant {decoder.row_invariant}, same bits {same}"
    return found


def main() -> None:
    given, target, model = map(Path, sys.argv[1:])
    with torch.inference_mode():
        torch.save(results(torch.load(given), model), target)


if __name__ == "__main__":
    main()
