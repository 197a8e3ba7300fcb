"""Fixtures for all suites."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
