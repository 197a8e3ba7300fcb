"""Engines of a job's own: Ray actors that end with it, however it ends.

job (this process)                               actors
ASGI app -> PoolClient -- whole turn -->  BatchEngine: EngineActor, one GPU
                       <- all deltas --

An engine whose process dies, which fails, or which hangs is lost. Its turns go to the others, and Ray starts it again
in a new process; a few times, and as often again once it has answered something. One that is lost for good leaves the
pool.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from engine_actor.actor_options import ActorOptions
from engine_actor.messages import (
    DeleteOutcome,
    EndReason,
    ForkOutcome,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
)
from serve_app.commands.arguments import StartFailed
from serve_app.commands.console import say
from serve_app.config import AppArgs
from serve_app.ingress.engine_client import ResidentSessions
from serve_app.model_store import resolve_model
from serve_app.text.tokenizer import load_tokenizer

_REPLACEMENTS = 3  # of an engine, without an answer in between
_LOSSES = 3  # engines that a turn may cost
_START_TRIES = 5  # while Ray has not noticed yet that a process is gone, or has no place for the next one
_PAUSE_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0


class BatchEngine:
    """One engine. Turns are anonymous, so it keeps no sessions, but it shares the prefixes of prompts."""

    def __init__(self, options: ActorOptions) -> None:
        self._options = options

    async def start(self) -> int:
        """The longest sequence, when the model is loaded. A second call waits for the first one."""
        if not hasattr(self, "_starting"):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> int:
        from engine_actor.actor.actor import EngineActor

        path = await asyncio.to_thread(resolve_model, self._options.model)
        options = replace(self._options, model=str(path))
        name = f"batch-{os.getpid()}"
        self._actor = EngineActor(options, name, vocabulary=lambda: load_tokenizer(path).vocabulary())
        await self._actor.start()
        return self._actor.context_length

    async def run_turn(self, request: TurnRequest) -> list[TurnDelta]:
        """Ends as unavailable where the engine hangs."""
        await self.start()  # an actor that Ray has restarted is empty
        turn = asyncio.create_task(self._run(request))
        try:
            while not (await asyncio.wait([turn], timeout=_LOOK_SECONDS))[0]:
                if (failure := self._actor.failure()) is not None:
                    return [TurnRefused(RefusalCode.UNAVAILABLE, failure)]
            return await turn
        finally:
            turn.cancel()

    async def _run(self, request: TurnRequest) -> list[TurnDelta]:
        async with aclosing(self._actor.stream_turn(request)) as deltas:
            return [delta async for delta in deltas]


class _EngineLost(Exception):
    """The engine that had the turn, and whether its process is there still."""

    def __init__(self, why: str, *, process_is_there: bool) -> None:
        super().__init__(why)
        self.process_is_there = process_is_there


@dataclass(eq=False, slots=True)
class _Engine:
    actor: ActorHandle
    number: int
    open: int = 0
    ready: bool = True
    lives: int = 1
    losses: int = 0  # since its last answer


class PoolClient:
    """Implements `serve_app.ingress.engine_client.EngineClient` over a pool: the engine with the fewest turns takes the
    next one. While none is ready, turns wait for one that is started again."""

    def __init__(self, actors: Sequence[ActorHandle], context_limit: int) -> None:
        self._engines = [_Engine(actor, number) for number, actor in enumerate(actors, start=1)]
        self._context_limit = context_limit
        self._news = asyncio.Condition()
        self._replacing: set[asyncio.Task[None]] = set()
        self._last_loss = ""

    async def stream_turn(self, request: TurnRequest, *, routing_key: str | None) -> AsyncGenerator[TurnDelta, None]:
        """See the protocol. All deltas come at once, at the end."""
        for _ in range(_LOSSES):
            if (engine := await self._free_engine()) is None:
                text = f"the engines of this job are lost: {self._last_loss}"
                yield TurnRefused(RefusalCode.UNAVAILABLE, text, retry_after=1.0)
                return
            life = engine.lives
            try:
                deltas = await self._run(engine, request)
            except _EngineLost as lost:
                if engine.lives == life:  # else another turn has told it already
                    self._note_loss(engine, lost)
                continue
            if engine.lives == life:
                engine.losses = 0
            for delta in deltas:
                yield delta
            return
        # It may be to blame: that is a failure, and no lack of engines.
        yield TurnAccepted("", request.prompt_tokens, 0)
        for choice in range(request.choices):
            text = f"{_LOSSES} engines were lost that had this request: {self._last_loss}"
            yield TurnEnded(EndReason.FAILED, request.prompt_tokens, 0, 0, text, choice)

    async def _free_engine(self) -> _Engine | None:
        """None if there is no engine any more."""
        async with self._news:
            await self._news.wait_for(lambda: not self._engines or any(engine.ready for engine in self._engines))
        return min((engine for engine in self._engines if engine.ready), key=lambda engine: engine.open, default=None)

    async def _run(self, engine: _Engine, request: TurnRequest) -> list[TurnDelta]:
        """Raises _EngineLost with the reason."""
        answer = engine.actor.run_turn.remote(request)
        ended = False
        engine.open += 1
        try:
            deltas: list[TurnDelta] = await answer
            ended = True
        except RayActorError as error:
            ended = True
            raise _EngineLost(_first_line(error), process_is_there=False) from None
        finally:
            engine.open -= 1
            if not ended:
                ray.cancel(answer)
        if (failure := _failure(deltas[-1])) is not None:
            raise _EngineLost(failure, process_is_there=True)
        return deltas

    def _note_loss(self, engine: _Engine, lost: _EngineLost) -> None:
        self._last_loss = str(lost)
        engine.ready = False
        engine.lives += 1
        engine.losses += 1
        task = asyncio.create_task(self._replace(engine, lost))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, engine: _Engine, lost: _EngineLost) -> None:
        if engine.losses <= _REPLACEMENTS:
            say(f"engine {engine.number} is lost, and is started again ({engine.losses} of {_REPLACEMENTS}): {lost}")
            if lost.process_is_there:
                ray.kill(engine.actor, no_restart=False)
            engine.ready = await self._starts(engine)
        if not engine.ready:
            ray.kill(engine.actor)
            self._engines.remove(engine)
            say(f"engine {engine.number} is lost for good, and {len(self._engines)} are left: {self._last_loss}")
        async with self._news:
            self._news.notify_all()

    async def _starts(self, engine: _Engine) -> bool:
        for attempt in range(1, _START_TRIES + 1):
            await asyncio.sleep(_PAUSE_SECONDS * attempt)
            starting = asyncio.ensure_future(engine.actor.start.remote())
            while not (await asyncio.wait([starting], timeout=_PATIENCE_SECONDS))[0]:
                say(f"engine {engine.number} is not ready yet")
            try:
                starting.result()
            except RayActorError as error:
                self._last_loss = _first_line(error)
            except RayTaskError as error:
                self._last_loss = f"{type(error.cause).__name__}: {error.cause}"
                break
            else:
                say(f"engine {engine.number} is ready again")
                return True
        return False

    async def sessions(self, cache_scope: str) -> ResidentSessions:
        return ResidentSessions(())

    async def delete_session(self, cache_scope: str, session_id: str) -> DeleteOutcome:
        return DeleteOutcome.UNKNOWN

    async def fork_session(self, cache_scope: str, session_id: str, new_session_id: str) -> ForkOutcome:
        return ForkOutcome.UNKNOWN

    async def ready(self) -> bool:
        return True

    async def context_limit(self) -> int | None:
        return self._context_limit


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _failure(last: TurnDelta) -> str | None:
    """Why the engine that ended a turn so can run no other; None if it can."""
    if isinstance(last, TurnRefused):
        return last.message if last.code is RefusalCode.UNAVAILABLE else None
    return last.message if isinstance(last, TurnEnded) and last.resumable else None


async def start_pool(args: AppArgs, on_ready: Callable[[int], None]) -> PoolClient:
    """`args.replicas` engines, loaded; `on_ready` is called with how many are. Raises StartFailed."""
    cores = os.cpu_count() or 1
    resources = args.engine_resources(cores, ray.cluster_resources().get("GPU", 0.0))
    options = args.actor_options(cores=cores, on_gpu=resources["num_gpus"] > 0)
    actor = ray.remote(BatchEngine).options(
        **resources,
        max_restarts=-1,  # the pool counts
        max_concurrency=options.queue_limit + options.running_limit,
    )
    engines: list[Any] = [actor.remote(options) for _ in range(args.replicas)]
    waiting = {asyncio.ensure_future(engine.start.remote()) for engine in engines}
    limits: list[int] = []
    try:
        while waiting:
            started, waiting = await asyncio.wait(
                waiting, timeout=_PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            limits += [task.result() for task in started]
            on_ready(len(limits))
            if not started:
                say(_still_waiting(len(limits), args.replicas, resources))
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        raise StartFailed(f"an engine could not start: {type(cause).__name__}: {cause}") from None
    return PoolClient(engines, min(limits))


def _still_waiting(ready: int, total: int, resources: dict[str, Any]) -> str:
    """What an operator needs to see why: the model may be large, or others may have the places."""
    free = ray.available_resources()
    return (
        f"{ready} of {total} engines are ready; each wants {resources['num_cpus']:g} CPUs and "
        f"{resources['num_gpus']:g} GPUs, and {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"
    )
