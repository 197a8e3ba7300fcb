"""The random numbers: known answers, range, distribution, independence of company."""

from __future__ import annotations

import numpy as np
import pytest

from engine_actor.sampling import philox
from engine_actor.sampling.philox import philox_4x32, uniforms

# counter, key, result: the known answers published with Random123.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def reference_block(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in plain integers, as the paper writes it."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    out = philox_4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert out.tolist() == [expected]
    assert reference_block(counter, key) == expected


def test_rows_are_computed_alone() -> None:
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (50, 4), np.uint32)
    key = rng.integers(0, 2**32, (50, 2), np.uint32)
    together = philox_4x32(counter, key)
    for i in range(50):
        assert together[i].tolist() == reference_block(counter[i].tolist(), key[i].tolist())


def test_uniforms_are_a_function_of_seed_position_and_draw_alone() -> None:
    seeds, positions = [1, 2, 2**64 - 1, 1], [7, 7, 0, 8]
    together = uniforms(seeds, positions)
    alone = [float(uniforms([s], [p])[0]) for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert uniforms([1], [7], draw=1)[0] != together[0]


def test_all_64_bits_of_the_seed_and_large_positions_count() -> None:
    seeds = [0] + [1 << bit for bit in range(64)]
    assert len(set(uniforms(seeds, [3] * len(seeds)).tolist())) == len(seeds)
    positions = [0, 1, 2**31, 2**32, 2**32 + 1, 2**40]
    assert len(set(uniforms([5] * len(positions), positions).tolist())) == len(positions)


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_the_extreme_words_stay_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    monkeypatch.setattr(philox, "philox_4x32", lambda counter, key: np.full((1, 4), word, np.uint32))
    [u] = uniforms([0], [0])
    assert 0.0 < u < 1.0


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_uniforms_are_well_distributed(axis: str) -> None:
    n, bins = 64_000, 64
    seeds, positions = ([11] * n, list(range(n))) if axis == "positions" else (list(range(n)), [11] * n)
    u = uniforms(seeds, positions)
    counts = np.bincount((u * bins).astype(int), minlength=bins)
    chi_square = ((counts - n / bins) ** 2 / (n / bins)).sum()
    assert 20 < chi_square < 130  # 63 degrees of freedom: mean 63, deviation 11
    pairs = np.corrcoef(u[:-1], u[1:])[0, 1]
    assert abs(pairs) < 0.02
