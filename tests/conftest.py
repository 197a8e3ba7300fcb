"""Fixtures for all suites."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.commands.local_ray import prepare_environment

pytest_plugins = ["tests.support.parity", "tests.support.property_tests"]

# Before torch and transformers are imported. Idle OpenMP threads must not spin: suites share their cores, and so do the
# processes of one that runs in several.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
prepare_environment()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's GGUF file, where `moorage` keeps fetched models."""
    home = Path(os.environ.get("MOORAGE_HOME") or Path.home() / ".cache" / "moorage")
    path = home / "models" / "smollm2" / "model.gguf"
    if not path.is_file():
        message = f"the demo model is not at {path}; `make serve` or `make test` fetches it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path
