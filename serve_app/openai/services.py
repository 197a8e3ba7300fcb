"""What the routes work with."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.settings import IngressSettings
from serve_app.ingress.side_process import SideProcess
from serve_app.ingress.turn_slots import TurnSlots
from serve_app.openai.desk import Desk
from serve_app.openai.responses.store import ResponseStore
from serve_app.text.token_bytes import TokenBytes
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Services:
    """`desk` reads small bodies here, the one in the `side` process large ones."""

    desk: Desk
    side: SideProcess
    client: EngineClient
    store: ResponseStore
    slots: TurnSlots

    @property
    def settings(self) -> IngressSettings:
        return self.desk.settings

    @property
    def tokenizer(self) -> Tokenizer:
        return self.desk.prompts.tokenizer

    @property
    def spelling(self) -> TokenBytes:
        return self.tokenizer.token_bytes

    async def context_limit(self) -> int | None:
        """Longest sequence; None where neither the settings nor a replica has said it yet."""
        return self.settings.context_limit or await self.client.context_limit()
