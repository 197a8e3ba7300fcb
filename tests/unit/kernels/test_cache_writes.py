"""Writing into the paged cache, and copying its blocks."""

from __future__ import annotations

import pytest
import torch

from kernels.block_copy import copy_blocks
from kernels.kv_write import kv_write, kv_write_reference


def caches(dtype: torch.dtype, heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (9, 16, heads, head_size)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "head_size"), [(1, 1, 8), (7, 3, 64), (140, 4, 128), (5, 1, 24)])
def test_writes_the_named_slots_and_no_others(tokens: int, heads: int, head_size: int, dtype: torch.dtype) -> None:
    keys, values = caches(dtype, heads, head_size)
    expected_keys, expected_values = keys.clone(), values.clone()
    wide = torch.randn(tokens, 2 * heads + 1, head_size)
    k, v = wide[:, :heads], wide[:, heads : 2 * heads]
    slots = torch.randperm(9 * 16)[:tokens]
    kv_write(k, v, keys, values, slots)
    kv_write_reference(k, v, expected_keys, expected_values, slots)
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


def test_rounds_to_bf16_as_torch_does() -> None:
    # Ties to even in both directions, a carry into the exponent, overflow to infinity, denormals and the specials.
    bits = [0x3F808000, 0x3F818000, 0x3F7F8000, 0x7F7FFFFF, 0x00000001, 0x80008000, 0x7F800000, 0xFF800000, 0x7FFFFFFF]
    bits += [0x3F808001, 0x3F807FFF, 0x80000000, 0x7F800001, 0xFFC00000, 0x00008000, 0x40490FDB]
    row = torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)
    k = row.view(1, 1, 16)
    keys, values = torch.zeros(2, 1, 16, 1, 16, dtype=torch.bfloat16)
    kv_write(k, k, keys, values, torch.tensor([3]))
    assert torch.equal(keys[0, 3, 0].isnan(), row.isnan())
    numbers = ~row.isnan()
    expected = row.to(torch.bfloat16)
    assert torch.equal(keys[0, 3, 0][numbers].view(torch.int16), expected[numbers].view(torch.int16))
    assert torch.equal(values[0, 3, 0][numbers].view(torch.int16), expected[numbers].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_blocks_of_both_caches_and_touches_no_others(dtype: torch.dtype) -> None:
    keys, values = caches(dtype, 2, 8)
    before = keys.clone(), values.clone()
    copy_blocks(keys, values, [(1, 5), (7, 2)])
    source = torch.tensor([0, 1, 7, 3, 4, 1, 6, 7, 8])
    assert torch.equal(keys, before[0][source]) and torch.equal(values, before[1][source])
    copy_blocks(keys, values, [])
    assert torch.equal(keys, before[0][source])


def test_a_chain_of_copies_reads_what_was_there_before() -> None:
    keys, values = caches(torch.float32, 1, 8)
    before = keys.clone()
    copy_blocks(keys, values, [(1, 2), (2, 3)])
    assert torch.equal(keys[2], before[1]) and torch.equal(keys[3], before[2])
