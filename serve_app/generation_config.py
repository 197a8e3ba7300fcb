"""Sampling defaults that a model brings along: `generation_config.json` in its folder."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from serve_app.ingress.settings import SamplingDefaults

NAME = "generation_config.json"


def sampling_defaults(model: Path) -> SamplingDefaults:
    """What the file in a Hugging Face folder, or beside a GGUF file, says; OpenAI's defaults for the rest, and for a
    model without it. Raises ValueError that names the file and the field for a value that can't be used.
    """
    file = (model if model.is_dir() else model.parent) / NAME
    if not file.is_file():
        return SamplingDefaults()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object")
    values = {name: content[name] for name in SamplingDefaults.model_fields if content.get(name) is not None}
    if values.get("top_k") == -1:  # another word for no limit
        values["top_k"] = 0
    try:
        return SamplingDefaults.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{file}: {first['loc'][0]}: {first['msg']}, not {first['input']!r}") from error
