"""Replicas behind a handle that all give one answer, until the script says that one dies, stops or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from engine_actor.messages import EndReason, Failure, TurnAccepted, TurnDelta, TurnEnded, TurnRequest, TurnTokens
from engine_actor.options import SamplingParams
from serve_app.cluster.channel.call import TurnElsewhere, TurnPlaced
from serve_app.cluster.client import HandleEngineClient
from serve_app.cluster.routing.known_replicas import KnownReplicas, known_replicas
from serve_app.cluster.routing.sticky_router import AVOID, ONLY

ANSWER = (31, 32, 33, 34, 35)
PROMPT = (1, 2, 3)
DIES, SILENT, STOPS, ENDS = "dies", "silent", "stops", "ends early"


def request(**fields: Any) -> TurnRequest:
    return TurnRequest("r", "public", None, PROMPT, SamplingParams(), **fields)


@dataclass
class Script:
    """One call: how many items it gives, and what comes then. `instead`: a refusal, or other items."""

    items: int = 100
    then: str | None = None
    instead: Sequence[Any] | None = None


def items_of(replica: str, asked: TurnRequest, cached: int = 2) -> list[Any]:
    """What a replica says to a turn: its id, then one token a delta."""
    done = asked.resumed_tokens or 0
    rest = ANSWER[done:]
    if asked.max_generated_tokens:
        rest = ANSWER[done : asked.max_generated_tokens]
    prompt = asked.prompt_tokens
    reason = EndReason.STOP if done + len(rest) == len(ANSWER) else EndReason.LENGTH
    ended = TurnEnded(reason, prompt, cached, done + len(rest))
    placed = TurnPlaced(replica, channel=None)
    return [placed, TurnAccepted(replica, prompt, cached), *(TurnTokens((token,)) for token in rest), ended]


class Call:
    def __init__(self, items: Sequence[Any], then: str | None, ticks: int = 0) -> None:
        """`ticks` of the event loop pass before each item."""
        self._items = iter(items)
        self._ticks = ticks
        self._then = then
        self._placed = False
        self._goes_on = asyncio.Event()
        self.cancelled = False

    def let_go(self, items: Sequence[Any]) -> None:
        """It is silent no more, and says this."""
        self._items, self._then = iter(items), None
        self._goes_on.set()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        for _ in range(self._ticks):
            await asyncio.sleep(0)
        for item in self._items:
            self._placed = True
            return item
        if self._then == DIES:
            raise RayActorError
        if self._then == SILENT:
            await self._goes_on.wait()
            return await anext(self)
        if self._then == STOPS:
            self._then = None
            return TurnEnded(EndReason.FAILED, 3, 0, 0, "the engine stopped", failure=Failure.UNAVAILABLE)
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Of a call that no replica could take, Serve raises why once more."""
        self.cancelled = True
        if self._then == DIES and not self._placed:
            raise RayActorError


class Sign:
    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer
        self.cancelled = False

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        answer = self._answer()
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A handle. Call number i is taken by replica `a`, `b`, ... and follows script i; calls without one succeed. What a
    client asks each replica by itself is answered by `answers`: by method, what replica `a`, `b`, ... says (None:
    nothing, ever; an exception is raised)."""

    app_name, deployment_name = "app", "engines"

    def __init__(self, *scripts: Script, works: dict[str, Any] | None = None, **answers: list[Any]) -> None:
        self._scripts = list(scripts)
        self._method = ""
        self._answers = answers
        self.works = works if works is not None else {}
        self.ticks = 0
        self.requests: list[TurnRequest] = []
        self.avoided: list[tuple[str, ...]] = []
        self.meant: list[str] = []
        self.calls: list[Call] = []
        self.signs: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        for running in ("", "abcdefgh"):  # the first forgets who was silent in the test before
            self.known.set_running(running)

    @property
    def known(self) -> KnownReplicas:
        return known_replicas(self.app_name, self.deployment_name)

    def options(self, method_name: str | None = None, **_: Any) -> Replicas:
        if method_name is None:
            return self
        view = object.__new__(Replicas)
        view.__dict__ = {**self.__dict__, "_method": method_name}
        return view

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if self._method == "sign_of_life":
            replica = kwargs[ONLY]
            self.signs.append(replica)
            return Sign(lambda: self.works.get(replica, (replica, True)))
        if self._method in self._answers:
            replica = kwargs[ONLY]
            self.asked.append((self._method, replica, *args))
            return Sign(lambda: self._answers[self._method][ord(replica) - ord("a")])
        if self._method == "renew":
            return Sign(lambda: True)
        if self._method == "channel":
            return Call([], SILENT)
        number = len(self.calls)
        script = self._scripts[number] if number < len(self._scripts) else Script()
        replica = chr(ord("a") + number)
        self.requests.append(args[0])
        self.avoided.append(kwargs[AVOID])
        self.meant.append(kwargs.get(ONLY, ""))
        items = script.instead if script.instead is not None else items_of(replica, args[0], cached=2 + number)
        if not isinstance(items[0], TurnPlaced | TurnElsewhere):
            items = [TurnPlaced(replica, channel=None), *items]
        self.calls.append(Call(items[: script.items], script.then, self.ticks))
        return self.calls[-1]

    def broadcast(self, method: str) -> Any:
        """The first call of a process, by which it comes to know who runs."""
        assert method == "accepting"
        return NobodyRuns()


class NobodyRuns:
    async def results_async(self, **_: Any) -> list[Any]:
        raise DeploymentUnavailableError(DeploymentID(name="engines", app_name="app"))


def client_of(
    replicas: Replicas,
    placement_timeout: float = 5.0,
    *,
    replacement_timeout: float | None = None,
    starts_on_demand: bool = False,
) -> HandleEngineClient:
    return HandleEngineClient(
        replicas,
        placement_timeout=placement_timeout,
        replacement_timeout=replacement_timeout,
        starts_on_demand=starts_on_demand,
    )


async def told(
    replicas: Replicas,
    asked: TurnRequest | None = None,
    placement_timeout: float = 5.0,
    replacement_timeout: float | None = None,
) -> list[TurnDelta]:
    client = client_of(replicas, placement_timeout, replacement_timeout=replacement_timeout)
    return [delta async for delta in client.stream_turn(asked or request(), routing_key="k")]
