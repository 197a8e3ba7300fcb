"""What the routes work with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.settings import IngressSettings
from serve_app.ingress.side_process import SideProcess
from serve_app.ingress.turn_slots import TurnSlots
from serve_app.openai.desk import Desk
from serve_app.openai.responses.store import ResponseStore
from serve_app.text.token_bytes import TokenBytes
from serve_app.text.tokenizer import Tokenizer

logger = logging.getLogger("moorage.ingress")

_MOST_FIELDS, _LONGEST_FIELD = 8, 200  # in a line of the log


@dataclass(frozen=True, slots=True)
class Services:
    """`desk` reads small bodies here, the one in the `side` process large ones."""

    desk: Desk
    side: SideProcess
    client: EngineClient
    store: ResponseStore
    slots: TurnSlots
    count_left_out: Callable[[int], None] | None = None

    @property
    def settings(self) -> IngressSettings:
        return self.desk.settings

    @property
    def tokenizer(self) -> Tokenizer:
        return self.desk.prompts.tokenizer

    @property
    def spelling(self) -> TokenBytes:
        return self.tokenizer.token_bytes

    def note_left_out(self, fields: Sequence[str]) -> None:
        """Fields of a request's tools that its answer is not kept to."""
        if fields:
            shown = ", ".join(ascii(field)[1:-1][:_LONGEST_FIELD] for field in fields[:_MOST_FIELDS])
            more = f" and {len(fields) - _MOST_FIELDS} more" if len(fields) > _MOST_FIELDS else ""
            logger.warning("tools say what no grammar can keep to, left out: %s%s", shown, more)
            if self.count_left_out is not None:
                self.count_left_out(len(fields))

    async def context_limit(self) -> int | None:
        """Longest sequence; None where neither the settings nor a replica has said it yet."""
        return self.settings.context_limit or await self.client.context_limit()
