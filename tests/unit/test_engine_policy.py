"""How many engines an application should have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.cluster.autoscaling import PRESSURE, EnginePolicy, pressure, wanted_engines
from serve_app.config import AppArgs

IDLE = {
    "running": 0.0,
    "waiting": 0.0,
    "waiting_sequences": 0.0,
    "blocks_active": 0.0,
    "blocks_usable": 100.0,
    "tokens_due": 0.0,
}


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({}, 0.0),
        ({"running": 4.0}, 0.5),
        ({"running": 4.0, "waiting": 2.0, "waiting_sequences": 6.0}, 1.5),
        ({"running": 1.0, "blocks_active": 90.0}, 0.9),
        ({"running": 1.0, "tokens_due": 800.0}, 2.0),
    ],
)
def test_what_limits_an_engine_most_is_its_pressure(stats: dict[str, float], expected: float) -> None:
    assert pressure({**IDLE, **stats}, max_batch_size=8, max_scheduled_tokens=100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pressures", "engines"),
    [([], 0), ([0.0] * 2, 0), ([0.01], 1), ([0.7], 1), ([0.72], 1), ([0.8], 2), ([1.0] * 2, 3), ([0.2] * 4, 2)],
)
def test_as_many_engines_as_carry_it_at_the_target(pressures: list[float], engines: int) -> None:
    assert wanted_engines(pressures, 0.7) == engines


def context(pressures: dict[str, float] | None, running: list[str], target: int) -> Any:
    metrics = None if pressures is None else {PRESSURE: pressures}
    return SimpleNamespace(aggregated_metrics=metrics, running_replicas=running, target_num_replicas=target)


def test_engines_that_have_not_reported_keep_the_number_from_falling() -> None:
    policy = EnginePolicy(target=0.7)
    assert policy(context({"a": 0.1, "b": 0.1}, ["a", "b"], 2)) == (1, {})
    assert policy(context({"a": 0.1}, ["a", "b"], 2)) == (2, {})
    assert policy(context({"a": 3.0}, ["a", "b"], 2)) == (5, {})
    assert policy(context(None, ["a"], 1)) == (1, {})
    assert policy(context(None, [], 0)) == (0, {})


@pytest.mark.parametrize(
    ("fields", "bounds", "autoscales"),
    [
        ({}, (1, 1), False),
        ({"replicas": 3}, (3, 3), False),
        ({"max_replicas": 4}, (1, 4), True),
        ({"replicas": 2, "min_replicas": 0, "max_replicas": 4}, (0, 4), True),
        ({"replicas": 0, "min_replicas": 0, "max_replicas": 2}, (0, 2), True),
        ({"replicas": 0, "max_replicas": 2}, (0, 2), True),
        ({"replicas": 2, "min_replicas": 1}, (1, 2), True),
    ],
)
def test_the_bounds_of_replicas(fields: dict[str, int], bounds: tuple[int, int], autoscales: bool) -> None:
    args = AppArgs(model="m", **fields)
    assert args.replica_bounds() == bounds
    assert args.autoscales is autoscales
    assert args.resolved_placement_timeout() == (900.0 if bounds[0] == 0 else 10.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 0},
        {"replicas": 5, "max_replicas": 4},
        {"min_replicas": 2},
        {"min_replicas": 3, "max_replicas": 2, "replicas": 2},
        {"max_replicas": 0},
        {"target_pressure": 0},
        {"target_pressure": 1.5},
    ],
)
def test_bounds_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"replicas|target_pressure"):
        AppArgs(model="m", **fields)
