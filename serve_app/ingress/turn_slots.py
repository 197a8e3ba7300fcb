"""How many turns may be open at a time, for one key and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_app.ingress.errors import retry_later
from serve_app.ingress.settings import IngressSettings


@dataclass(frozen=True, eq=False, slots=True)
class _Slot:
    tenant: str


class TurnSlots:
    """The open turns themselves are kept, and counted when there is a question: a count can't drift from them."""

    def __init__(self, settings: IngressSettings) -> None:
        self._settings = settings
        self._open: set[_Slot] = set()

    def check(self, tenant: str) -> None:
        """Raises ApiError 429 where no place is left: before more is done for a request than need be."""
        limits, after = self._settings, self._settings.retry_after_seconds
        if len(self._open) >= limits.max_turns:
            raise retry_later(429, "The server has as many turns as it takes.", "server_busy", after)
        if limits.max_turns_per_key is not None and self.open_turns()[tenant] >= limits.max_turns_per_key:
            message = f"{limits.max_turns_per_key} turns of this key are open, which is all it may have at a time."
            raise retry_later(429, message, "too_many_turns", after)

    @contextmanager
    def occupy(self, tenant: str) -> Iterator[None]:
        """A place for the time of the block. Raises ApiError 429 where none is left."""
        self.check(tenant)
        slot = _Slot(tenant)
        self._open.add(slot)
        try:
            yield
        finally:
            self._open.discard(slot)

    def open_turns(self) -> Counter[str]:
        """By tenant."""
        return Counter(slot.tenant for slot in self._open)
