"""Profiles of the property tests: no clock and no chance decides whether a change passes;
`--hypothesis-profile=thorough` looks much longer, and elsewhere each time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=10_000, derandomize=False)
settings.load_profile("quick")
