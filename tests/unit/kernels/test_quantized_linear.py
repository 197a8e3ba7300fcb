"""QuantizedLinear: against float32 weights bit for bit, and the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.linear.cpu import NativeLinear
from kernels.quantized_linear import QuantizedLinear, QuantizedMatrix, joined, quantized_linear_reference

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIBRARY = native.shared_object()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native.status()[1])
needs_dots = pytest.mark.skipif(
    LIBRARY is None or not LIBRARY.moorage_has_bf16_dots(), reason="this processor does not multiply bfloat16"
)

# Bits, type of the scales, whether there are minimums.
Form = tuple[int, torch.dtype, bool]
FORMS: list[Form] = [
    (4, F16, False),
    (4, F16, True),
    (4, F32, True),
    (8, F16, False),
    (8, F16, True),
    (8, F32, False),
    (8, F32, True),
]
# N, K, group. Panels are 16, 32 or 64 columns, stretches 128 k's: shapes on, beside and far from these.
SHAPES = [(1, 32, 32), (5, 16, 16), (63, 96, 32), (64, 64, 32), (97, 576, 32), (192, 160, 16), (130, 272, 16)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25, 36, 37, 65, 129, 240, 241, 500]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def matrix(n: int, k: int, group: int, form: Form) -> QuantizedMatrix:
    """Random codes over their whole range, for outputs of size about 1. scale * code is exact in float32."""
    bits, dtype, with_minimums = form
    random = torch.Generator().manual_seed(n * 10007 + k)
    low = 0 if bits == 4 and with_minimums else -(1 << bits) // 2
    codes = torch.randint(low, low + (1 << bits), (n, k), generator=random).to(torch.int8)
    scales = (torch.rand(n, k // group, generator=random) - 0.5) * (4 / (1 << bits) / k**0.5)
    scales = scales.half() if dtype == F16 else scales.half().float() * 61
    minimums = (torch.randn(n, k // group, generator=random) / k**0.5).to(dtype) if with_minimums else None
    return QuantizedMatrix(codes, scales, minimums, bits)


def problem(n: int, k: int, group: int, form: Form) -> tuple[Tensor, QuantizedMatrix, Tensor]:
    random = torch.Generator().manual_seed(n + k)
    weight = matrix(n, k, group, form)
    return torch.randn(max(ROWS), k, generator=random), weight, torch.randn(n, generator=random)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_has_the_bits_of_the_product_of_the_expanded_weights(n: int, k: int, group: int, form: Form) -> None:
    x, weight, bias = problem(n, k, group, form)
    assert LIBRARY is not None
    layer, expanded = QuantizedLinear(weight, bias), NativeLinear(LIBRARY, weight.expanded(), bias)
    assert (layer.kind, layer.out_features, layer.in_features) == (f"native-q{form[0]}", n, k)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), expanded(x[:rows]))
    reference = quantized_linear_reference(x, weight, bias)
    assert (layer(x) - reference).abs().max() < 1e-4 * reference.std().clamp(min=1.0)


@needs_dots
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_dots_round_the_activations_and_nothing_else(n: int, k: int, group: int, form: Form) -> None:
    x, weight, bias = problem(n, k, group, form)
    layer = QuantizedLinear(weight, bias, activations=BF16)
    assert layer.kind == f"native-q{form[0]}-bf16"
    expected = x.bfloat16().double() @ weight.expanded().double().T + bias.double()
    for rows in ROWS:
        assert (layer(x[:rows]) - expected[:rows]).abs().max() < 1e-5 * expected.std().clamp(min=1.0)


@pytest.mark.parametrize("activations", [F32, BF16])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES[2:])
def test_rows_have_the_same_bits_in_any_batch(n: int, k: int, group: int, form: Form, activations: torch.dtype) -> None:
    x, weight, bias = problem(n, k, group, form)
    layer = QuantizedLinear(weight, bias, activations=activations)
    whole = layer(x)
    for rows in ROWS:
        for start in (0, len(x) - rows):
            assert torch.equal(layer(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize("activations", [F32, BF16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_thread_count_leaves_the_bits_alone(form: Form, activations: torch.dtype) -> None:
    x, weight, bias = problem(192, 160, 16, form)
    two = QuantizedLinear(weight, bias, activations=activations)
    expected = [two(x[:rows]) for rows in ROWS]
    torch.set_num_threads(1)
    one = QuantizedLinear(weight, bias, activations=activations)
    for layer in (one, two):
        assert all(torch.equal(layer(x[:rows]), y) for rows, y in zip(ROWS, expected, strict=True))


@pytest.mark.parametrize("activations", [F32, BF16])
def test_activations_need_not_be_dense(activations: torch.dtype) -> None:
    x, weight, _ = problem(63, 96, 32, FORMS[1])
    layer = QuantizedLinear(weight, activations=activations)
    wide = torch.randn(len(x), 130)
    wide[:, 10:106] = x
    assert torch.equal(layer(wide[:, 10:106]), layer(x))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_rows_of_the_weight_are_those_of_the_expanded_one(n: int, k: int, group: int, form: Form) -> None:
    weight = matrix(n, k, group, form)
    layer = QuantizedLinear(weight)
    ids = torch.cat([torch.arange(n), torch.randint(0, n, (50,))])
    assert torch.equal(layer.rows(ids), weight.expanded()[ids])
    assert layer.rows(ids[:0]).shape == (0, k)
    for bad in (n, -1):
        with pytest.raises(IndexError, match=f"index out of range: the weight has {n} rows"):
            layer.rows(torch.tensor([0, bad]))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_matrices_of_one_form_become_one_and_rows_change_places(form: Form) -> None:
    one, two = matrix(5, 96, 32, form), matrix(63, 96, 32, form)
    both = joined([one, two])
    assert both.form == one.form and torch.equal(both.expanded(), torch.cat([one.expanded(), two.expanded()]))
    order = torch.randperm(68)
    assert torch.equal(both.at(order).expanded(), both.expanded()[order])


def test_takes_the_memory_of_its_bits() -> None:
    # 64 x 512: half a byte, and a float16 scale and minimum, 4 bytes, for 32.
    assert QuantizedLinear(matrix(64, 512, 32, (4, F16, True))).nbytes == 64 * 512 * (16 + 4) // 32
    assert QuantizedLinear(matrix(64, 512, 32, (8, F16, False)), torch.zeros(64)).nbytes == 64 * 512 * 34 // 32 + 256


def test_keeps_its_own_copy_of_the_weight() -> None:
    x, weight, bias = problem(63, 96, 32, FORMS[1])
    layer = QuantizedLinear(weight, bias)
    before = layer(x)
    for part in (weight.codes, weight.scales, weight.minimums):
        assert part is not None
        part.zero_()
    assert torch.equal(layer(x), before)


def test_every_float16_scale_is_read_as_torch_reads_it() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(F16)
    every = every[every.isfinite()][:, None]
    ones = torch.ones(len(every), 32, dtype=torch.int8)
    layer = QuantizedLinear(QuantizedMatrix(ones, every, None, 8))
    expected = every.float()
    assert torch.equal(layer.rows(torch.arange(len(every))), expected.expand(-1, 32))
    x = torch.zeros(1, 32)
    x[0, 7] = 1
    assert torch.equal(layer(x), expected.T)
