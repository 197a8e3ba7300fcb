"""What the routes work with."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.settings import IngressSettings
from serve_app.ingress.turn_slots import TurnSlots
from serve_app.openai.responses.store import ResponseStore
from serve_app.text.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class Services:
    settings: IngressSettings
    client: EngineClient
    prompts: PromptBuilder
    store: ResponseStore
    slots: TurnSlots

    async def context_limit(self) -> int | None:
        """Longest sequence; None where neither the settings nor a replica has said it yet."""
        return self.settings.context_limit or await self.client.context_limit()
