"""PackedLinear against float64, and the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels import native, onednn, processor
from kernels.linear import PackedLinear, in_parts, linear_reference
from kernels.linear.cpu import NativeLinear
from kernels.linear.in_parts import rows_agree

BF16, F32 = torch.bfloat16, torch.float32
needs_native = pytest.mark.skipif(not native.status()[0], reason=native.status()[1])

# Panels are 8, 16 or 32 columns and register tiles 6 or 12 rows: shapes on, beside and far from these.
SHAPES = [(1, 1), (5, 3), (31, 64), (32, 17), (33, 64), (64, 576), (97, 100), (576, 1536), (960, 576)]
ROWS = [1, 2, 3, 5, 6, 7, 11, 12, 13, 24, 25, 40, 65, 129, 512]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def problem(n: int, k: int, dtype: torch.dtype, rows: int = max(ROWS)) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, a weight and a bias for outputs of size about 1."""
    random = torch.Generator().manual_seed(n * 10007 + k)
    weight = (torch.randn(n, k, generator=random) / k**0.5).to(dtype)
    return torch.randn(rows, k, generator=random), weight, torch.randn(n, generator=random)


@needs_native
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_native_matches_float64(n: int, k: int, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = problem(n, k, dtype)
    layer = native_layer(weight, bias if with_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    for rows in ROWS:
        # bf16 weights are widened exactly, so float32's rounding over a chain of K terms is all there is.
        assert (layer(x[:rows]) - expected[:rows]).abs().max() < 1e-5


@needs_native
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_native_rows_have_the_same_bits_in_any_batch(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = problem(n, k, dtype)
    layer = native_layer(weight, bias)
    whole = layer(x)
    for rows in ROWS:
        for start in (0, len(x) - rows):
            assert torch.equal(layer(x[start : start + rows]), whole[start : start + rows])


@needs_native
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_thread_count_leaves_the_bits_alone(dtype: torch.dtype) -> None:
    x, weight, bias = problem(960, 576, dtype)
    layer = native_layer(weight, bias)
    two = [layer(x[:rows]) for rows in ROWS]
    torch.set_num_threads(1)
    assert all(torch.equal(layer(x[:rows]), expected) for rows, expected in zip(ROWS, two, strict=True))


@needs_native
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_activations_need_not_be_dense(dtype: torch.dtype) -> None:
    x, weight, _ = problem(33, 64, dtype)
    layer = native_layer(weight, None)
    wide = torch.randn(len(x), 100)
    wide[:, 10:74] = x
    assert torch.equal(layer(wide[:, 10:74]), layer(x))


def test_keeps_its_own_copy_of_the_weight() -> None:
    x, weight, bias = problem(64, 576, BF16, rows=3)
    layer = PackedLinear(weight, bias)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_chosen_layer_says_what_it_is_and_is_what_it_says(dtype: torch.dtype) -> None:
    x, weight, bias = problem(97, 100, dtype)
    layer = PackedLinear(weight, bias)
    assert (layer.out_features, layer.in_features) == (97, 100)
    assert layer.row_invariant == rows_agree(layer, 100)
    if native.shared_object() is not None:
        assert layer.row_invariant
    tolerance = 3e-2 if layer.kind == "onednn-bf16" else 1e-5  # oneDNN rounds activations and results to bf16
    assert (layer(x) - linear_reference(x, weight, bias)).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("one_dnn", [True, False])
def test_without_a_compiler_what_torch_has_on_this_processor_takes_over(
    dtype: torch.dtype, one_dnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "shared_object", lambda: None)
    if not one_dnn:
        monkeypatch.setattr(onednn, "available", lambda: False)
    x, weight, bias = problem(97, 100, dtype, rows=129)
    layer = PackedLinear(weight, bias)
    rounds = one_dnn and dtype == BF16 and processor.has_bf16_arithmetic()
    assert layer.kind == ("onednn-bf16" if rounds else "onednn-fp32" if one_dnn else "torch-fp32")
    assert layer.row_invariant == rows_agree(layer, 100)
    assert layer.nbytes == 97 * (100 * (2 if rounds else 4) + 4)
    tolerance = 3e-2 if rounds else 1e-5
    for rows in (1, 2, 129):
        y = layer(x[:rows])
        assert y.shape == (rows, 97) and y.dtype == F32
        assert (y - linear_reference(x[:rows], weight, bias)).abs().max() < tolerance


@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_native), False])
def test_a_processor_without_bfloat16_arithmetic_multiplies_bfloat16_weights_in_float32(
    compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(native, "shared_object", lambda: None)
    monkeypatch.setattr(processor, "has_bf16_arithmetic", lambda: False)
    x, weight, bias = problem(97, 100, BF16)
    layer = PackedLinear(weight, bias)
    assert layer.kind == ("native-bf16" if compiler else "onednn-fp32")
    assert (layer(x) - linear_reference(x, weight, bias)).abs().max() < 1e-5


def test_without_a_compiler_the_first_path_whose_rows_keep_their_bits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "shared_object", lambda: None)
    monkeypatch.setattr(in_parts, "_probed", {})
    _, weight, _ = problem(33, 64, F32)

    def chosen(invariant: Callable[[in_parts.InParts], bool]) -> PackedLinear:
        in_parts._probed.clear()
        monkeypatch.setattr(in_parts, "rows_agree", lambda layer, width: invariant(layer))
        return PackedLinear(weight)

    assert chosen(lambda layer: True).kind == "onednn-fp32"
    one_by_one = chosen(lambda layer: layer.counts == (1,))
    assert (one_by_one.kind, one_by_one.row_invariant) == ("torch-fp32", True)
    assert rows_agree(one_by_one, 64)
    none = chosen(lambda layer: False)
    assert (none.kind, none.row_invariant) == ("onednn-fp32", False)


@needs_native
@pytest.mark.skipif(not onednn.takes_bfloat16(), reason="oneDNN takes no bfloat16 on this processor")
def test_one_dnn_is_passed_over_when_its_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "has_bf16_arithmetic", lambda: True)
    monkeypatch.setattr(in_parts, "_probed", {})
    monkeypatch.setattr(in_parts, "rows_agree", lambda function, width: True)
    _, weight, _ = problem(33, 64, BF16)
    assert PackedLinear(weight).kind == "onednn-bf16"
    monkeypatch.setattr(in_parts, "_probed", {})
    monkeypatch.setattr(in_parts, "rows_agree", lambda function, width: False)
    assert PackedLinear(weight).kind == "native-bf16"


def test_the_probe_notices_a_row_that_depends_on_its_batch() -> None:
    assert rows_agree(lambda x: x * 2, 8)
    assert not rows_agree(lambda x: x + x.shape[0] * 1e-6, 8)


def native_layer(weight: Tensor, bias: Tensor | None) -> NativeLinear:
    library = native.shared_object()
    assert library is not None
    return NativeLinear(library, weight, bias)


@pytest.mark.parametrize("compiler", [True, False])
def test_logits_are_never_rounded_to_bfloat16(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "has_bf16_arithmetic", lambda: True)
    if not compiler:
        monkeypatch.setattr(native, "shared_object", lambda: None)
    x, weight, _ = problem(97, 100, BF16)
    layer = PackedLinear(weight, float_output=True)
    assert layer.kind != "onednn-bf16"
    assert (layer(x) - linear_reference(x, weight, None)).abs().max() < 1e-5


def test_onednn_sees_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps something for each of them, for ever."""
    layer = in_parts.OneDnnLinear(torch.randn(24, 16), torch.randn(24))
    product, seen = layer._product, set()

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return product(x)

    monkeypatch.setattr(layer, "_product", watched)
    batch = torch.randn(1100, 16)
    whole = layer(batch)
    for rows in [*range(1, 140), 255, 256, 257, 511, 512, 513, 1024, 1100]:
        result = layer(batch[:rows])
        assert result.shape == (rows, 24) and result.dtype == torch.float32
        assert torch.allclose(result, whole[:rows], rtol=2e-2, atol=2e-2)
    assert seen <= set(in_parts.ROW_COUNTS)
