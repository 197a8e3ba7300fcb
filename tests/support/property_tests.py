"""Profiles of the property tests: no clock decides, and `--hypothesis-profile=thorough` looks much longer."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("quick", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=10_000)
settings.load_profile("quick")
