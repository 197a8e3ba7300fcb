"""Paged attention against the textbook formula, and the same bits however a query is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import paged_attention, paged_attention_reference
from tests.unit.kernels.paged_case import Conversation, call_arguments, conversation, exact_attention

Attention = Callable[..., Tensor]
BF16, F32 = torch.bfloat16, torch.float32

# Sums of up to 400 float32 terms of size about 1, in another order than float64's. bf16 caches hold the problem's keys
# and values exactly, so the same bound holds for them.
TOLERANCE = 5e-6


@pytest.fixture(params=["native", "reference"])
def attention(request: pytest.FixtureRequest) -> Attention:
    return paged_attention if request.param == "native" else paged_attention_reference


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_chunks(
    attention: Attention, talk: Conversation, length: int, chunk: int, dtype: torch.dtype, window: int
) -> Tensor:
    """The whole conversation, `chunk` positions a call, each call with its own placement of blocks."""
    parts = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        parts.append(attention(**call_arguments([(talk, start, end)], dtype=dtype, seed=start, window=window)))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [0, 1, 20, 64, 100])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_size"),
    [(2, 2, 8), (8, 2, 16), (3, 1, 24), (9, 3, 64), (2, 1, 80), (4, 1, 128), (2, 1, 256)],
)
def test_ragged_rows_match_the_formula(
    attention: Attention, q_heads: int, kv_heads: int, head_size: int, window: int, dtype: torch.dtype
) -> None:
    spans = [(0, 7), (5, 6), (130, 163), (64, 65), (0, 1), (127, 130), (390, 400), (0, 70)]
    talks = [conversation(end, q_heads, kv_heads, head_size, dtype, seed) for seed, (_, end) in enumerate(spans)]
    rows = [(talk, start, end) for talk, (start, end) in zip(talks, spans, strict=True)]
    answer = attention(**call_arguments(rows, dtype=dtype, window=window))
    expected = torch.cat([exact_attention(*row, window) for row in rows])
    assert (answer - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_chunks_give_the_bits_of_the_whole(attention: Attention, chunk: int, window: int, dtype: torch.dtype) -> None:
    length = 150 if attention is paged_attention_reference else 400
    talk = conversation(length, 9, 3, 64, dtype, seed=1)
    whole = attention(**call_arguments([(talk, 0, length)], dtype=dtype, window=window))
    assert torch.equal(in_chunks(attention, talk, length, chunk, dtype, window), whole)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_size"), [(2, 2, 8), (8, 2, 16), (9, 3, 64), (4, 1, 256)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    attention: Attention, q_heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    spans = [(200, 201), (0, 50), (33, 34), (100, 117), (64, 65), (0, 1), (63, 64)]
    talks = [conversation(end, q_heads, kv_heads, head_size, dtype, seed) for seed, (_, end) in enumerate(spans)]
    rows = [(talk, start, end) for talk, (start, end) in zip(talks, spans, strict=True)]
    batch = attention(**call_arguments(rows, dtype=dtype))
    alone = torch.cat([attention(**call_arguments([row], dtype=dtype, seed=9)) for row in rows])
    assert torch.equal(batch, alone)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_block_size_and_placement_leave_the_bits_alone(attention: Attention, dtype: torch.dtype) -> None:
    rows = [(conversation(end, 9, 3, 64, dtype, end), start, end) for start, end in [(120, 150), (77, 78), (0, 5)]]
    first, *others = (
        attention(**call_arguments(rows, block_size=block_size, dtype=dtype, seed=seed))
        for block_size in (4, 16, 32, 128)
        for seed in (0, 1)
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_thread_count_leaves_the_bits_alone(attention: Attention, dtype: torch.dtype) -> None:
    rows = [(conversation(end, 9, 3, 64, dtype, end), start, end) for start, end in [(0, 150), (277, 278), (0, 5)]]
    arguments = call_arguments(rows, dtype=dtype)
    two = attention(**arguments)
    torch.set_num_threads(1)
    assert torch.equal(attention(**arguments), two)


def test_queries_can_be_a_slice_of_a_wider_projection() -> None:
    arguments = call_arguments([(conversation(40, 4, 2, 16, F32, 0), 10, 40)])
    q = arguments["q"]
    wide = torch.randn(len(q), 8, 16)
    wide[:, 2:6] = q
    assert torch.equal(paged_attention(**arguments | {"q": wide[:, 2:6]}), paged_attention(**arguments))


def test_a_broken_key_is_not_hidden() -> None:
    talk = conversation(90, 4, 2, 16, F32, 0)
    talk.k[70, 1] = float("nan")
    answer = paged_attention(**call_arguments([(talk, 60, 90)]))
    assert answer[10:, 2:].isnan().all()
    assert not answer[:10].isnan().any() and not answer[:, :2].isnan().any()


def test_large_scores_neither_overflow_nor_vanish(attention: Attention) -> None:
    talk = conversation(100, 2, 1, 16, F32, 0)
    talk.q.mul_(300.0)
    answer = attention(**call_arguments([(talk, 0, 100)]))
    # Scores of size 1e3 are float32 numbers with an error of 1e-4, which the weights take over as a factor.
    assert (answer - exact_attention(talk, 0, 100)).abs().max() < 2e-3
