"""The rope scalings of published checkpoints, as divisors of each pair's frequency."""

from __future__ import annotations

import math


def linear_divisors(head_size: int, factor: float) -> tuple[float, ...]:
    """Positions are squeezed by `factor`: every pair turns that much slower. () for a factor of 1."""
    return () if factor == 1.0 else (float(factor),) * (head_size // 2)


def llama3_divisors(
    head_size: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> tuple[float, ...]:
    """Llama 3.1's scaling. A pair that turns more than `high_freq_factor` times within the original context stays as
    it is, one that turns less than `low_freq_factor` times is slowed by `factor`, those between are interpolated."""
    divisors = []
    for pair in range(head_size // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_size)
        turns = original_context / wavelength
        if turns > high_freq_factor:
            divisors.append(1.0)
        elif turns < low_freq_factor:
            divisors.append(float(factor))
        else:
            share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
            divisors.append(1.0 / ((1.0 - share) / factor + share))
    return tuple(divisors)
