"""Engines around a decoder, in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from engine_actor.actor_options import ActorOptions
from engine_actor.core.engine import Engine
from engine_actor.decoding.decoder import Decoder
from engine_actor.limits import EngineLimits, Numerics
from engine_actor.memory.layout import plan_pools
from engine_actor.sampling.vocabulary import Vocabulary


def engine_of(
    decoder: Decoder,
    *,
    num_blocks: int,
    max_residents: int | None = None,
    max_length: int | None = None,
    vocabulary: Callable[[], Vocabulary] | None = None,
    **limits: Any,
) -> Engine:
    """`limits`: those of EngineLimits."""
    chosen = EngineLimits(**limits)
    pools = plan_pools(
        decoder.manifest, chosen, num_blocks=num_blocks, max_residents=max_residents, max_length=max_length
    )
    return Engine(decoder, chosen, pools, vocabulary)


def actor_options(model: str, **values: Any) -> ActorOptions:
    """Fields of ActorOptions and of its limits side by side. Doubles are exact by construction, and their steps are
    counted, so the start does not probe them unless the test chooses so."""
    values.setdefault("numerics", Numerics.FAST)
    names = {field.name for field in fields(EngineLimits)}
    limits = EngineLimits(**{name: value for name, value in values.items() if name in names})
    return ActorOptions(model, limits=limits, **{name: value for name, value in values.items() if name not in names})
