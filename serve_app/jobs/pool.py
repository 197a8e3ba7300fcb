"""Engines of a job's own: Ray actors that end with it, however it ends.

job (this process)                               actors
ASGI app -> PoolClient -- whole turn -->  BatchEngine: EngineActor, one GPU
                       <- all deltas --
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from engine_actor.actor_options import ActorOptions
from engine_actor.turns import (
    ForkOutcome,
    RefusalCode,
    SessionInfo,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
)
from serve_app.commands.console import say
from serve_app.commands.serve import StartFailed
from serve_app.config import AppArgs
from serve_app.model_store import resolve_model
from serve_app.text.tokenizer import load_tokenizer

_RESTARTS = 3
_TRIES = 5
_PAUSE_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0


class BatchEngine:
    """One engine. Turns are anonymous, so it keeps no sessions, but it shares the prefixes of prompts."""

    def __init__(self, options: ActorOptions) -> None:
        self._options = options

    async def start(self) -> int:
        """The longest sequence, when the model is loaded. A second call waits for the first one."""
        if not hasattr(self, "_starting"):
            self._starting = asyncio.create_task(self._start())
        return await self._starting

    async def _start(self) -> int:
        from engine_actor.actor import EngineActor

        path = await asyncio.to_thread(resolve_model, self._options.model)
        options = replace(self._options, model=str(path))
        name = f"batch-{os.getpid()}"
        self._actor = EngineActor(options, name, vocabulary=lambda: load_tokenizer(path).vocabulary())
        await self._actor.start()
        return self._actor.context_length

    async def run_turn(self, request: TurnRequest) -> list[TurnDelta]:
        await self.start()  # an actor that Ray has restarted is empty
        async with aclosing(self._actor.stream_turn(request)) as deltas:
            return [delta async for delta in deltas]


class PoolClient:
    """Implements `serve_app.ingress.engine_client.EngineClient` over a pool: the engine with the fewest turns takes the
    next one. A turn that loses its engine goes to the others first, since one that fails at once has the fewest turns
    for ever."""

    def __init__(self, engines: Sequence[ActorHandle], context_limit: int) -> None:
        self._open = dict.fromkeys(engines, 0)
        self._context_limit = context_limit

    async def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncGenerator[TurnDelta, None]:
        """See the protocol. All deltas come at once, at the end."""
        lost: set[ActorHandle] = set()
        for attempt in range(_TRIES):
            if len(lost) == len(self._open):
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
                lost.clear()
            engine = min((e for e in self._open if e not in lost), key=self._open.__getitem__)
            self._open[engine] += 1
            answer = engine.run_turn.remote(request)
            done = False
            try:
                deltas: list[TurnDelta] = await answer
                done = True
            except RayActorError:
                done = True
                lost.add(engine)
                continue
            finally:
                self._open[engine] -= 1
                if not done:
                    ray.cancel(answer)
            if _stopped(deltas[-1]):
                lost.add(engine)
                continue
            for delta in deltas:
                yield delta
            return
        yield TurnRefused(RefusalCode.UNAVAILABLE, "the engines of this job are lost", retry_after=10.0)

    async def sessions(self, owner: str) -> list[SessionInfo]:
        return []

    async def close_session(self, owner: str, session_id: str) -> bool:
        return False

    async def fork_session(self, owner: str, session_id: str, new_session_id: str) -> ForkOutcome:
        return ForkOutcome.UNKNOWN

    async def ready(self) -> bool:
        return True

    async def context_limit(self) -> int | None:
        return self._context_limit


def _stopped(last: TurnDelta) -> bool:
    """Whether the turn ended since its engine had stopped."""
    if isinstance(last, TurnRefused):
        return last.code is RefusalCode.UNAVAILABLE
    return isinstance(last, TurnEnded) and last.resumable


async def start_pool(args: AppArgs, told: Callable[[int], None]) -> PoolClient:
    """`args.replicas` engines, loaded; `told` is called with how many are. Raises StartFailed."""
    cores = os.cpu_count() or 1
    resources = args.engine_resources(cores, ray.cluster_resources().get("GPU", 0.0))
    options = args.actor_options(cores=cores, on_gpu=resources["num_gpus"] > 0)
    actor = ray.remote(BatchEngine).options(
        **resources,
        max_restarts=_RESTARTS,
        max_concurrency=options.queue_limit + options.running_limit,
    )
    engines: list[Any] = [actor.remote(options) for _ in range(args.replicas)]
    waiting = {asyncio.ensure_future(engine.start.remote()) for engine in engines}
    limits: list[int] = []
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=_PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            limits += [task.result() for task in done]
            told(len(limits))
            if not done:
                say(_still_waiting(len(limits), args.replicas, resources))
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        raise StartFailed(f"an engine could not start: {type(cause).__name__}: {cause}") from None
    return PoolClient(engines, min(limits))


def _still_waiting(ready: int, wanted: int, resources: dict[str, Any]) -> str:
    """What an operator needs to see why: the model may be large, or others may have the places."""
    free = ray.available_resources()
    return (
        f"{ready} of {wanted} engines are ready; each wants {resources['num_cpus']:g} CPUs and "
        f"{resources['num_gpus']:g} GPUs, and {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"
    )
