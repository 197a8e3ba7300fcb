"""One small product of each type, by the paths that a start would choose on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels import native
from kernels.linear import PackedLinear, linear_reference
from kernels.paged_attention import PAGED_ATTENTION, paged_attention, paged_attention_reference
from kernels.quantized_linear import QuantizedLinear, QuantizedMatrix

# Of results of size about 1, by way of bfloat16 activations and results at the coarsest.
_TOLERANCE = 5e-2
_ROWS, _OUTPUTS, _INPUTS = 5, 96, 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """`path`: the implementation that ran, where one could be made. `failure`: empty if the result was right."""

    product: str
    path: str
    failure: str


def check_products(device: torch.device) -> Iterator[Outcome]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, _INPUTS, generator=random)
    weight = torch.randn(_OUTPUTS, _INPUTS, generator=random) / _INPUTS**0.5
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield _outcome(f"{name} weights", partial(_linear, x, weight.to(dtype), device))
    for bits in (8, 4):
        yield _outcome(f"{bits}-bit weights", partial(_quantized, x, _in_bits(weight, bits), device))
    yield _outcome("attention", partial(_attention, random, device))


def _outcome(product: str, run: Callable[[], tuple[str, Tensor, Tensor]]) -> Outcome:
    try:
        path, result, expected = run()
    except Exception as error:  # whatever a library raises: to find it out is what this is for
        return Outcome(product, "", f"{type(error).__name__}: {error}")
    distance = (result.cpu() - expected).abs().max().item()
    right = distance <= _TOLERANCE  # not so for NaN
    return Outcome(product, path, "" if right else f"{path} is off by {distance:.2g}")


def _linear(x: Tensor, weight: Tensor, device: torch.device) -> tuple[str, Tensor, Tensor]:
    layer = PackedLinear(weight.to(device))
    return layer.kind, layer(x.to(device)), linear_reference(x, weight)


def _in_bits(weight: Tensor, bits: int) -> QuantizedMatrix:
    groups = weight.view(len(weight), -1, 32)
    scales = (groups.abs().amax(2) / ((1 << (bits - 1)) - 1)).half()
    codes = (groups / scales.float()[:, :, None]).round().clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return QuantizedMatrix(codes.to(torch.int8).view(weight.shape), scales, None, bits)


def _quantized(x: Tensor, matrix: QuantizedMatrix, device: torch.device) -> tuple[str, Tensor, Tensor]:
    if device.type != "cpu" or native.shared_object() is None:
        path, result, _ = _linear(x, matrix.expanded().bfloat16(), device)
        return f"expanded, {path}", result, linear_reference(x, matrix.expanded())
    layer = QuantizedLinear(matrix, activations=torch.bfloat16)
    return layer.kind, layer(x), linear_reference(x, matrix.expanded())


def _attention(random: torch.Generator, device: torch.device) -> tuple[str, Tensor, Tensor]:
    """Two rows over blocks of 16: a prompt of 20 and a decode at 70."""
    heads, kv_heads, size = 4, 2, 64
    cache = torch.randn(2, 8, 16, kv_heads, size, generator=random).bfloat16()
    q = torch.randn(21, heads, size, generator=random)
    table = torch.tensor([[3, 1, -1, -1, -1], [0, 2, 4, 6, 7]], dtype=torch.int32)
    cumulative, past = torch.tensor([0, 20, 21], dtype=torch.int32), torch.tensor([0, 70], dtype=torch.int32)

    def run(attention: Callable[..., Tensor], where: torch.device) -> Tensor:
        tensors = (tensor.to(where) for tensor in (q, *cache, table, cumulative, past))
        return attention(*tensors, size**-0.5)

    return (
        PAGED_ATTENTION.kind(device.type == "cuda"),
        run(paged_attention, device),
        run(paged_attention_reference, torch.device("cpu")),
    )
