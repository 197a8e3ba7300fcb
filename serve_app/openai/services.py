"""What the routes work with."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.settings import IngressSettings
from serve_app.text.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class Services:
    settings: IngressSettings
    client: EngineClient
    prompts: PromptBuilder
