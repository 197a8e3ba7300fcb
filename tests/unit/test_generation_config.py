from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.generation_config import sampling_defaults
from serve_app.ingress.settings import SamplingDefaults
from serve_app.model_store import KNOWN_MODELS, KnownModel


def folder(path: Path, content: Any) -> Path:
    (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_models_own_values_are_taken_and_others_left_alone(tmp_path: Path) -> None:
    content = {
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "min_p": 0.1,
        "eos_token_id": [1, 2],
        "do_sample": True,
        "unknown": {},
    }
    assert sampling_defaults(folder(tmp_path, content)) == SamplingDefaults(
        temperature=0.6, top_p=1.0, top_k=20, repetition_penalty=1.05, min_p=0.1
    )


@pytest.mark.parametrize("content", [{}, {"temperature": None, "top_k": None}, {"top_k": -1}])
def test_what_says_nothing_changes_nothing(tmp_path: Path, content: dict[str, Any]) -> None:
    assert sampling_defaults(folder(tmp_path, content)) == SamplingDefaults()


def test_models_without_the_file_have_the_apis_defaults(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert sampling_defaults(gguf) == sampling_defaults(tmp_path / "none") == SamplingDefaults()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"temperature": "hot"}, "temperature"),
        ("{", "readable JSON"),
        ("[]", "JSON object"),
    ],
)
def test_a_value_that_can_not_be_used_is_refused_by_name(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        sampling_defaults(folder(tmp_path, content))
    assert "generation_config.json" in str(refused.value)


def test_a_gguf_file_has_its_defaults_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9}')
    assert sampling_defaults(model) == SamplingDefaults(temperature=0.2, top_p=0.9)


@pytest.mark.parametrize("model", KNOWN_MODELS.values(), ids=lambda model: model.name)
def test_what_is_recommended_for_a_known_model_can_be_used(tmp_path: Path, model: KnownModel) -> None:
    sampling_defaults(folder(tmp_path, dict(model.generation)))
