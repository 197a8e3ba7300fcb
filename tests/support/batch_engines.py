"""Actors of a batch job's pool that answer as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

from engine_actor.messages import (
    EndReason,
    Failure,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
)
from engine_actor.options import SamplingParams

REQUEST = TurnRequest("r", "public", None, (1, 2), SamplingParams())
GOOD: list[TurnDelta] = [TurnAccepted("e", 2, 0), TurnTokens((7,)), TurnEnded(EndReason.STOP, 2, 0, 1)]
STOPPED: list[TurnDelta] = [
    TurnAccepted("e", 2, 0),
    TurnTokens((7,)),
    TurnEnded(EndReason.FAILED, 2, 0, 0, "the engine stopped", failure=Failure.UNAVAILABLE),
]
UNAVAILABLE: list[TurnDelta] = [TurnRefused(RefusalCode.UNAVAILABLE, "the engine stopped")]


class ScriptedEngine:
    """An actor that answers as it is told, the last of it again and again; and so with its starts."""

    def __init__(self, *outcomes: list[TurnDelta] | Exception, starts: Sequence[Exception | None] = (None,)) -> None:
        self._outcomes = list(outcomes)
        self._starts = list(starts)
        self.asked = 0
        self.started = 0
        self.kills: list[bool] = []  # whether it may be started again
        self.run_turn = SimpleNamespace(remote=self._run)
        self.start = SimpleNamespace(remote=self._start)

    async def _run(self, request: TurnRequest) -> list[TurnDelta]:
        self.asked += 1
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _start(self) -> int:
        self.started += 1
        outcome = self._starts.pop(0) if len(self._starts) > 1 else self._starts[0]
        if outcome is not None:
            raise outcome
        return 100
