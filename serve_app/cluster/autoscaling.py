"""How many engines an application should have: by what limits an engine, not by a count of requests.

An engine's *pressure* is the largest of three shares, and may exceed 1:

    rows      answers that run or wait, of the rows of a batch
    blocks    blocks of the KV pool that running turns hold; those of dormant conversations are only a cache
    prompts   prompt tokens that wait to be computed, of those that PROMPT_STEPS steps can take

The policy wants as many engines as carry the sum of all pressures at the target. Serve applies the bounds and the
delays of its `autoscaling_config` to that, and wakes a deployment that has none when a request waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

PRESSURE = "pressure"
PROMPT_STEPS = 4.0
# A share of an engine: beyond the target by less than this is no reason for another one.
_SLACK = 0.05


def pressure(stats: Mapping[str, float], *, max_batch_size: int, max_scheduled_tokens: int) -> float:
    """Of one engine, from the stats of its EngineActor."""
    sequences = stats["running"] + stats["waiting"] + stats["waiting_sequences"]
    return max(
        sequences / max_batch_size,
        stats["blocks_active"] / stats["blocks_usable"],
        stats["tokens_due"] / (PROMPT_STEPS * max_scheduled_tokens),
    )


def wanted_engines(pressures: Iterable[float], target: float) -> int:
    """Engines that carry these pressures together, each at the target or less; 0 only if nothing presses."""
    total = sum(pressures)
    return max(1, math.ceil(total / target - _SLACK)) if total > 0 else 0


class EnginePolicy:
    """A policy of Ray Serve, which makes it in its controller."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: an AutoscalingContext. While an engine has not reported, since it starts or hangs, the number does
        not fall."""
        pressures = (context.aggregated_metrics or {}).get(PRESSURE, {})
        engines = wanted_engines(pressures.values(), self._target)
        if any(replica not in pressures for replica in context.running_replicas):
            engines = max(engines, context.target_num_replicas)
        return engines, {}
