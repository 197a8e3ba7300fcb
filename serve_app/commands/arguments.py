"""From the flags of a command and a file to AppArgs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.config import AppArgs, describe_errors

DEFAULT_MODEL = "smollm2"


class StartFailed(Exception):
    """The server could not be started; the message is for the user."""


def read_args(config: Path | None, flags: Mapping[str, Any]) -> AppArgs:
    """Flags over the file over the defaults. Raises StartFailed, one line a field."""
    fields: dict[str, Any] = {"model": DEFAULT_MODEL}
    if config is not None:
        try:
            loaded = yaml.safe_load(config.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise StartFailed(f"--config {config}: {error}") from None
        if not isinstance(loaded, dict | None):
            raise StartFailed(f"--config {config}: wanted fields and their values, found {type(loaded).__name__}")
        fields |= loaded or {}
    try:
        return AppArgs.model_validate({**fields, **flags})
    except ValidationError as error:
        raise StartFailed("\n".join(describe_errors(error))) from None
