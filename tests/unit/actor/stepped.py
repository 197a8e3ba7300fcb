"""An EngineActor whose steps a test makes one by one, and whose answers end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from engine_actor.actor.actor import EngineActor
from engine_actor.decoding.decoder import PackedStep
from engine_actor.messages import TurnAccepted, TurnEnded, TurnRefused, TurnRequest, TurnTokens
from tests.support.doubles import SyntheticDecoder, next_token
from tests.unit.actor.helpers import Answer, start_actor

EOS = 1


class SteppedDecoder(SyntheticDecoder):
    """Whoever's first token is in `over` says EOS next; nobody does before."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab, EOS)
        self.over: set[int] = set()
        self._steps = threading.Semaphore(0)
        self._let = self._made = 0
        self.choose = self._choose

    def _choose(self, sequence: list[int]) -> int:
        token = next_token(sequence, self.manifest.vocab_size)
        return EOS if sequence[0] in self.over else 2 if token == EOS else token

    def forward(self, step: PackedStep) -> np.ndarray:
        assert self._steps.acquire(timeout=30), "the test has made no step"
        self._made += 1
        return super().forward(step)

    def make_step(self, times: int = 1) -> None:
        """Or the next one, where there is nothing to compute now."""
        self._let += times
        self._steps.release(times)

    @property
    def waits(self) -> bool:
        """No step is made before the next `make_step`."""
        return self._let == self._made

    def keep_going(self) -> None:
        """One more step if the last one is made."""
        if self.waits:
            self.make_step()


class Asked:
    """One turn, and what has been heard of it."""

    def __init__(self, actor: EngineActor, request: TurnRequest) -> None:
        self.answer = Answer()
        self.task = asyncio.create_task(self._listen(actor, request))

    async def _listen(self, actor: EngineActor, request: TurnRequest) -> None:
        async for delta in actor.stream_turn(request):
            match delta:
                case TurnAccepted():
                    self.answer.accepted = delta
                case TurnTokens():
                    self.answer.tokens += delta.token_ids
                case TurnEnded():
                    self.answer.ended = delta
                case TurnRefused():
                    self.answer.refused = delta

    @property
    def begun(self) -> bool:
        return self.answer.accepted is not None


class Stage:
    def __init__(self, actor: EngineActor, decoder: SteppedDecoder) -> None:
        self.actor, self.decoder = actor, decoder

    async def ask(self, *requests: TurnRequest) -> list[Asked]:
        """In this order. Returns when the engine has heard of all of them, and they of it."""
        asked = []
        for request in requests:
            asked.append(Asked(self.actor, request))
            await asyncio.sleep(0)
        await self.settle()
        return asked

    async def settle(self) -> dict[str, float]:
        """Some steps, so that what was asked is done and has been told; then the engine's stats."""
        for _ in range(4):
            stats: dict[str, float] = await self.during(self.actor.stats())
        return stats

    async def during(self, call: Any) -> Any:
        """The result of a call, while steps are made."""
        task = asyncio.ensure_future(call)
        while not task.done():
            self.decoder.keep_going()
            await asyncio.sleep(0.001)
        return await task

    async def end(self, *first_tokens: int) -> None:
        self.decoder.over.update(first_tokens)
        await self.settle()

    async def leave(self, *asked: Asked) -> None:
        for one in asked:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in asked), return_exceptions=True)
        await self.settle()


@asynccontextmanager
async def staged(blocks: int = 4000, vocab: int = 1000, **options: Any) -> AsyncIterator[Stage]:
    decoder = SteppedDecoder(vocab)
    actor = await start_actor(decoder, blocks, **options)
    stage = Stage(actor, decoder)
    try:
        yield stage
        if actor.failure() is None:
            await stage.during(actor.check_integrity())
    finally:
        decoder.make_step(100_000)
        await actor.stop()
