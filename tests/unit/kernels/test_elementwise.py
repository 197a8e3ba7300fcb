"""Norm, rotary and gated activations against their references, and the same bits for a token in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.activation import gated_gelu_tanh, gated_gelu_tanh_reference, gated_silu, gated_silu_reference
from kernels.norm import rms_norm, rms_norm_reference
from kernels.rotary import apply_rotary, apply_rotary_reference

GATED = [(gated_silu, gated_silu_reference), (gated_gelu_tanh, gated_gelu_tanh_reference)]

# A few roundings of float32 on values of size up to about 10.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def assert_rows_keep_their_bits(operation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Whole batch on two threads, then pieces of it on one and on two."""
    whole = operation(x.clone())
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, end in [(0, 1), (1, 3), (0, len(x) - 1), (len(x) - 5, len(x)), (0, len(x))]:
            assert torch.equal(operation(x[start:end].clone()), whole[start:end])


@pytest.mark.parametrize("shape", [(1, 576), (37, 576), (5, 13), (200, 1536), (7, 3, 64), (7, 1, 8), (40, 9, 128)])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_rms_norm_matches_the_reference(shape: tuple[int, ...], eps: float) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    assert (rms_norm(x, weight, eps) - rms_norm_reference(x, weight, eps)).abs().max() < TOLERANCE


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_reference])
@pytest.mark.parametrize("shape", [(90, 576), (70, 13), (50, 9, 64)])
def test_rms_norm_keeps_a_rows_bits(norm: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape[-1])
    assert_rows_keep_their_bits(lambda x: norm(x, weight, 1e-5), torch.randn(shape))


def test_rms_norm_reads_a_slice_of_a_projection() -> None:
    projection, weight = torch.randn(6, 5, 16), torch.randn(16)
    part = projection[:, 1:4]
    assert torch.equal(rms_norm(part, weight, 1e-5), rms_norm(part.contiguous(), weight, 1e-5))
    flat = projection.flatten(1)[:, 3:35]
    weight = torch.randn(32)
    assert torch.equal(rms_norm(flat, weight, 1e-5), rms_norm(flat.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("shape", [(1, 1, 8), (7, 9, 64), (130, 3, 128), (5, 2, 24)])
def test_rotary_matches_the_reference_in_place(shape: tuple[int, int, int]) -> None:
    angle = torch.randn(shape[0], shape[2] // 2) * 5
    x = torch.randn(shape)
    expected = apply_rotary_reference(x.clone(), angle.cos(), angle.sin())
    assert apply_rotary(x, angle.cos(), angle.sin()) is x
    assert (x - expected).abs().max() < TOLERANCE


def test_rotary_turns_a_slice_and_leaves_its_surroundings() -> None:
    projection, angle = torch.randn(6, 5, 16), torch.randn(6, 8)
    before = projection.clone()
    apply_rotary(projection[:, 1:4], angle.cos(), angle.sin())
    expected = apply_rotary(before[:, 1:4].contiguous(), angle.cos(), angle.sin())
    assert torch.equal(projection[:, 1:4], expected)
    assert torch.equal(projection[:, [0, 4]], before[:, [0, 4]])


def test_rotary_keeps_a_tokens_bits() -> None:
    angle = torch.randn(1, 32)
    assert_rows_keep_their_bits(
        lambda x: apply_rotary(x, angle.cos().repeat(len(x), 1), angle.sin().repeat(len(x), 1)),
        torch.randn(90, 9, 64),
    )


@pytest.mark.parametrize(("gated", "reference"), GATED)
@pytest.mark.parametrize("shape", [(1, 2), (3, 26), (37, 3072)])
def test_gated_activations_match_the_reference(
    gated: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], shape: tuple[int, int]
) -> None:
    x = torch.randn(shape) * 4
    assert (gated(x) - reference(x)).abs().max() < TOLERANCE


@pytest.mark.parametrize(("gated", "reference"), GATED)
def test_gated_activations_at_the_ends_of_the_range(
    gated: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor]
) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 1e-3, 20.0, 88.0, 200.0, 1e12])
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    torch.testing.assert_close(gated(x), reference(x), rtol=1e-6, atol=1e-6)
    assert gated(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@pytest.mark.parametrize("gated", [gated_silu, gated_gelu_tanh])
def test_gated_activations_keep_a_rows_bits(gated: Callable[[Tensor], Tensor]) -> None:
    assert_rows_keep_their_bits(gated, torch.randn(60, 2 * 157))


@pytest.mark.parametrize("gated", [gated_silu, gated_gelu_tanh])
def test_a_gated_value_does_not_depend_on_its_place_in_the_row(gated: Callable[[Tensor], Tensor]) -> None:
    gate_up = torch.randn(1, 2).repeat_interleave(37, dim=1)  # whole vectors and a rest
    assert len(set(gated(gate_up).flatten().tolist())) == 1
