"""One uniform number as a pure function of (seed, position): Philox4x32-10 (Salmon et al., SC 2011).

No state is kept, so a checkpoint costs nothing, a rollback needs nothing, and a replay elsewhere draws the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox_4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds. counter uint32 [n, 4], key uint32 [n, 2] -> uint32 [n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = k0 + _W0, k1 + _W1
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seeds: list[int], positions: list[int], draw: int = 0) -> NDArray[np.float64]:
    """float64 [n] in (0, 1), neither end included: key = the 64-bit seed, counter = (position, draw). 52 random bits
    each, so that the half that keeps them off zero is exact."""
    seed = np.array(seeds, np.uint64)
    position = np.array(positions, np.uint64)
    key = np.stack([seed & _LOW, seed >> _SHIFT], axis=1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0] = (position & _LOW).astype(np.uint32)
    counter[:, 1] = (position >> _SHIFT).astype(np.uint32)
    counter[:, 2] = draw
    words = philox_4x32(counter, key).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(20)) ^ (words[:, 1] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
