"""Turns of an engine that hangs in a step go on in another one, as soon as a step takes longer than it may."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine_actor.actor import step_bound
from engine_actor.actor.actor import EngineActor
from engine_actor.decoding.decoder import PackedStep
from engine_actor.messages import TurnDelta, TurnEnded, TurnRequest, TurnTokens
from serve_app.cluster.channel.call import TurnPlaced
from serve_app.cluster.client import HandleEngineClient
from serve_app.cluster.failover import watch as watch_module
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.cluster.routing.sticky_router import AVOID, ONLY
from tests.support.actor_view import owner_of
from tests.support.doubles import SyntheticDecoder, solo
from tests.support.failing_replicas import SILENT, Call, Sign
from tests.unit.actor.helpers import ask, start_actor, turn

STREAMS, TOKENS = 4, 30
PROMPTS = [[5, 9, 13 + i] for i in range(STREAMS)]


class HangingDecoder(SyntheticDecoder):
    """Its step number `hangs_at` takes until `go_on` is set."""

    def __init__(self, hangs_at: int) -> None:
        super().__init__(vocab=1000)
        self.hangs_at = hangs_at
        self.hangs = threading.Event()
        self.go_on = threading.Event()

    def forward(self, step: PackedStep) -> Any:
        if len(self.steps) == self.hangs_at:
            self.hangs.set()
            assert self.go_on.wait(60)
        return super().forward(step)


class ActorCall:
    """A handle call of `stream_turn`."""

    def __init__(self, replica: str, actor: EngineActor, asked: TurnRequest) -> None:
        self._items = self._run(replica, actor, asked)
        self._next: asyncio.Task[Any] | None = None

    async def _run(self, replica: str, actor: EngineActor, asked: TurnRequest) -> AsyncIterator[Any]:
        yield TurnPlaced(replica, channel=None)
        async for delta in actor.stream_turn(asked):
            yield delta

    def __aiter__(self) -> ActorCall:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        pass


class Engines:
    """A handle over actors of this process; a call goes to the first that it need not avoid."""

    app_name, deployment_name = "app", "hanging"

    def __init__(self, **actors: EngineActor) -> None:
        self.actors = actors
        self._method = ""
        known_replicas(self.app_name, self.deployment_name).set_running(list(actors))

    def options(self, method_name: str = "", **_: Any) -> Engines:
        view = object.__new__(Engines)
        view.__dict__ = {**self.__dict__, "_method": method_name or self._method}
        return view

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if self._method == "sign_of_life":
            replica = kwargs[ONLY]
            return Sign(lambda: (replica, self.actors[replica].failure() is None))
        if self._method == "channel":
            return Call([], SILENT)
        replica = next(name for name in self.actors if name not in kwargs[AVOID])
        return ActorCall(replica, self.actors[replica], args[0])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(watch_module, name, 0.01)
    monkeypatch.setattr(step_bound, "LEAST_BOUND_SECONDS", 0.5)
    monkeypatch.setattr(step_bound, "TIMES_THE_PACE", 0.0)


async def told(client: HandleEngineClient, prompt: list[int]) -> list[TurnDelta]:
    return [delta async for delta in client.stream_turn(turn(prompt, TOKENS), routing_key=None)]


@pytest.mark.parametrize(
    ("hangs_at", "bound"), [(0, 1.0), (step_bound.FIRST_STEPS + 10, 0.5)], ids=["in its first step", "later"]
)
async def test_turns_move_on_when_a_step_takes_longer_than_it_may_and_not_before(hangs_at: int, bound: float) -> None:
    decoder = HangingDecoder(hangs_at)
    hanging = await start_actor(decoder, max_step_seconds=1.0)
    sound = await start_actor(SyntheticDecoder(vocab=1000))
    client = HandleEngineClient(Engines(a=hanging, b=sound), placement_timeout=30.0)
    answering = asyncio.gather(*(told(client, prompt) for prompt in PROMPTS))
    await asyncio.to_thread(decoder.hangs.wait, 30)
    assert hanging.failure() is None and not answering.done()
    hanging.check_health()

    answers = await answering
    assert time.monotonic() - owner_of(hanging).heartbeat.last_round > bound
    assert hanging.failure() is not None and hanging.routing_stats()["accepting"] is False
    for prompt, deltas in zip(PROMPTS, answers, strict=True):
        tokens = [token for delta in deltas if isinstance(delta, TurnTokens) for token in delta.token_ids]
        assert tokens == solo(prompt, TOKENS, vocab=1000)
        assert isinstance(deltas[-1], TurnEnded) and deltas[-1].generated_tokens == TOKENS

    decoder.go_on.set()  # it was only slow after all: it is of use again
    assert (await ask(hanging, turn([5, 9], 3))).tokens == solo([5, 9], 3, vocab=1000)
    assert hanging.failure() is None
    await asyncio.gather(hanging.stop(), sound.stop())


async def test_an_engine_that_is_idle_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bound, "LEAST_BOUND_SECONDS", 1.5)
    actor = await start_actor(SyntheticDecoder(vocab=1000), max_step_seconds=1.5)
    await ask(actor, turn([5, 9, 13], 20))
    for _ in range(25):
        actor.check_health()
        await asyncio.sleep(0.1)
    await actor.stop()
