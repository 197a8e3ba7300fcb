"""The classes of the Serve deployments: engines, and the front door before them.

    client -> Serve proxy -> Ingress (HTTP, text) -> handle with StickyRouter -> EngineDeployment (one engine)
                                                  -> handle -> the store of responses (see handle_response_store)

`EngineActor` and the ASGI app know no Ray; what is Ray's is here. Both classes start their work on the event
loop that Serve runs user code on, which must never block: models load in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import SecretStr
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter

from engine_actor.actor_options import ActorOptions
from engine_actor.errors import EngineUnhealthy
from engine_actor.messages import ForkOutcome, MovedSession, SessionHolding, SessionInfo, TurnDelta, TurnRequest
from engine_actor.stopwatch import Stopwatch
from serve_app.api import create_app
from serve_app.cluster.autoscaling import PRESSURE, pressure
from serve_app.cluster.channel.call import TurnPlaced
from serve_app.cluster.channel.leases import Leases
from serve_app.cluster.channel.outbox import Batch, Outboxes
from serve_app.cluster.client import HandleEngineClient
from serve_app.cluster.handover import Handover
from serve_app.cluster.port_watch import head_watch
from serve_app.cluster.response_store import HandleResponseStore
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.config import AppArgs
from serve_app.generation_config import sampling_defaults
from serve_app.local_ports import require_key_beyond_loopback
from serve_app.model_store import resolve_model
from serve_app.openai.desk import open_desk, side_desk
from serve_app.telemetry.logs import join_serve_log
from serve_app.telemetry.metrics import EngineMetrics, open_in_ray
from serve_app.telemetry.observers import StepWatch, TurnWatch
from serve_app.telemetry.reporter import Reporter
from serve_app.text.stream import AnswerText
from serve_app.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from engine_actor.actor.actor import DecoderFactory, EngineActor

logger = logging.getLogger("moorage.engine")

STORE_TIMEOUT_SECONDS = 10.0


class EngineDeployment:
    """One engine and its model. Everything but `stream_turn` answers at once."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: ActorOptions, model_name: str
    ) -> None:
        """`model_name`: as clients and metrics know it."""
        join_serve_log()
        watch = Stopwatch()
        with watch.step("import the engine"):
            # Here, because it loads torch, which neither the driver nor an ingress needs.
            from engine_actor.decoding.load import load_decoder

        self._model_name = model_name
        self._options = options
        self._replica: str = serve.get_replica_context().replica_id.unique_id
        self._outboxes = Outboxes()
        with watch.step("fetch model"):
            path = await asyncio.to_thread(resolve_model, options.model)
        with watch.step("load tokenizer"):
            tokenizer = await asyncio.to_thread(load_tokenizer, path)
        self._metrics = EngineMetrics(partial(open_in_ray, model_name=model_name))
        self._actor = self._make_actor(replace(options, model=str(path)), tokenizer, load_decoder)
        self._report = await self._actor.start()
        self._start_seconds = watch.seconds | self._report.seconds
        steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._start_seconds.items())
        logger.info("%s: started: %s", self._replica, steps, extra={"start_seconds": self._start_seconds})
        context = serve.get_replica_context()
        engines = serve.get_deployment_handle(context.deployment, context.app_name)
        known = known_replicas(context.app_name, context.deployment)
        self._handover = Handover(self._replica, self._actor, engines, known)
        self._leases = Leases(lambda: self._handover.taken_out)
        self._background = [
            asyncio.create_task(Reporter(self._replica, self._metrics, self._actor.stats).run()),
            asyncio.create_task(self._handover.run()),
        ]

    def _make_actor(self, options: ActorOptions, tokenizer: Tokenizer, load: DecoderFactory) -> EngineActor:
        from engine_actor.actor.actor import EngineActor

        detokenize = partial(_answer_text, tokenizer)
        watch = StepWatch(self._metrics)
        return EngineActor(options, self._replica, detokenize, load, on_step=watch, vocabulary=tokenizer.vocabulary)

    async def stream_turn(
        self, request: TurnRequest, reader: str, number: int, avoid: tuple[str, ...] = ()
    ) -> AsyncGenerator[TurnPlaced | TurnDelta, None]:
        """Where the turn is, then its deltas; or nothing more, where they go to the channel of `reader` as those of its
        turn `number`. It is cancelled when its reader has gone. `avoid` is for the router alone."""
        with self._leases.hold(reader) as lease, self._outboxes.turn(reader, number) as outbox:
            yield TurnPlaced(self._replica, None if outbox is None else outbox.channel)
            async with aclosing(self._measured_turn(request)) as told, aclosing(lease.items(told)) as deltas:
                if outbox is not None:
                    await outbox.carry(deltas)
                else:
                    async for delta in deltas:
                        yield delta

    async def channel(self, reader: str, number: int, only: str) -> AsyncGenerator[Batch, None]:
        """The deltas of all turns of a reader that come while it is open. `only`: the replica that was meant; another
        one gives nothing, since turns there have a channel of their own."""
        if only == self._replica:
            with self._leases.hold(reader) as lease:
                async with (
                    aclosing(self._outboxes.read(reader, number)) as sent,
                    aclosing(lease.items(sent)) as batches,
                ):
                    async for batch in batches:
                        yield batch

    async def renew(self, reader: str, only: str) -> None:
        """This reader is there. `only` is for the router alone."""
        self._leases.renew(reader)

    async def _measured_turn(self, request: TurnRequest) -> AsyncGenerator[TurnDelta, None]:
        """Every turn comes to the engine this way, by whichever path it came to the replica."""
        with TurnWatch(self._metrics, request.choices) as watch:
            async with aclosing(self._actor.stream_turn(request)) as deltas:
                async for delta in deltas:
                    watch.note(delta)
                    yield delta

    # What `ControlCalls` asks. `only`: the replica that is meant; another one gives None.

    async def sessions(self, cache_scope: str | None, only: str) -> list[SessionInfo] | None:
        return await self._actor.sessions(cache_scope) if only == self._replica else None

    async def close_session(self, cache_scope: str, session_id: str, only: str) -> bool | None:
        return await self._actor.close_session(cache_scope, session_id) if only == self._replica else None

    async def session_holdings(
        self, cache_scope: str, session_ids: Sequence[str], only: str
    ) -> list[SessionHolding | None] | None:
        return await self._actor.session_holdings(cache_scope, session_ids) if only == self._replica else None

    async def fork_session(
        self, cache_scope: str, session_id: str, new_session_id: str, only: str
    ) -> ForkOutcome | None:
        if only != self._replica:
            return None
        return await self._actor.fork_session(cache_scope, session_id, new_session_id)

    async def context_limit(self, only: str) -> int | None:
        """Longest sequence that this replica can hold."""
        return self._actor.context_length if only == self._replica else None

    async def adopt(self, moved: MovedSession, avoid: tuple[str, ...] = ()) -> bool:
        """Takes over a conversation of a replica that is stopped; False if it is known or was deleted here. `avoid` is
        for the router alone."""
        return await self._actor.adopt(moved)

    async def deleted_sessions(self, within: float, only: str) -> list[str]:
        """Keys of the sessions that were deleted in the last `within` seconds. `only` is for the router alone."""
        return self._actor.deleted_sessions(within)

    async def forget_moved(self, keys: list[str], only: str) -> None:
        """What a replica that is stopped has sent here and was deleted meanwhile. `only` is for the router alone."""
        await self._actor.forget_moved(keys)

    async def accepting(self) -> bool:
        try:
            self._actor.check_health()
        except EngineUnhealthy:
            return False
        return True

    async def sign_of_life(self, only: str) -> tuple[str, bool]:
        """This replica's id, and whether its engine works. `only` is for the router alone."""
        return self._replica, await self.accepting()

    async def describe(self) -> dict[str, Any]:
        """What start-up found out, for an operator: plain values."""
        pools = self._report.pools
        return {
            "replica": self._replica,
            "model_name": self._model_name,
            "model": self._report.model,
            "dtype": self._report.dtype,
            "weight_bytes": self._report.weight_bytes,
            "blocks": pools.num_blocks,
            "block_size": pools.block_size,
            "pool_tokens": pools.tokens,
            "pool_bytes": pools.bytes,
            "longest_sequence": self._actor.context_length,
            "limited_by_pool": pools.limited_by_pool,
            "max_batch_size": self._options.limits.max_batch_size,
            "max_running_sequences": self._options.running_limit,
            "start_seconds": self._start_seconds,
            "numerics": self._report.numerics.value,
            "notes": self._report.notes,
        }

    async def stats(self) -> dict[str, float]:
        """Counters of the engine since its start, and its memory and requests of this moment."""
        return await self._actor.stats()

    def check_health(self) -> None:
        self._actor.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this where the application autoscales."""
        stats, limits = await self._actor.stats(), self._options.limits
        return {
            PRESSURE: pressure(
                stats, max_batch_size=limits.max_batch_size, max_scheduled_tokens=limits.max_scheduled_tokens
            )
        }

    def record_routing_stats(self) -> dict[str, object]:
        return self._actor.routing_stats()

    async def __del__(self) -> None:
        """Serve awaits this when the replica stops, after its turns have ended or their time has run out."""
        for task in getattr(self, "_background", ()):  # absent if the constructor failed
            task.cancel()
        handover, actor = getattr(self, "_handover", None), getattr(self, "_actor", None)
        if handover is not None:
            await handover.finish()
        if actor is not None:
            await actor.stop()


def _answer_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text that a client was sent for these tokens, and may send back as history."""
    answer = AnswerText(tokenizer)
    return answer.push(token_ids) + answer.finish()


class Ingress:
    """The OpenAI-compatible API. Holds the tokenizer and no model, and so does a process beside it for large bodies."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: AppArgs, keys: tuple[SecretStr, ...], engines: DeploymentHandle, responses: DeploymentHandle
    ) -> None:
        join_serve_log()
        # A config file binds 0.0.0.0 unless it says otherwise, so the rule of the command line holds here
        # too.
        require_key_beyond_loopback(_get_global_client().http_config.host, has_keys=bool(keys))
        path = await asyncio.to_thread(resolve_model, args.model)
        settings = args.ingress_settings(keys, sampling=await asyncio.to_thread(sampling_defaults, path))
        self._desk = await asyncio.to_thread(open_desk, settings, path)
        if self._desk.prompts.why_no_chat is not None:
            logger.warning("%s", self._desk.prompts.why_no_chat)
        self._side = side_desk(settings, path)
        self._client = HandleEngineClient(
            engines,
            placement_timeout=args.resolved_placement_timeout(),
            replacement_timeout=args.replacement_timeout_seconds,
            starts_on_demand=args.starts_on_demand,
            head=head_watch(),
        )
        self._store = HandleResponseStore(responses, timeout=STORE_TIMEOUT_SECONDS)
        self._left_out = Counter(
            "moorage_schema_parts_left_out",
            description="Fields of tools' schemas that no grammar can keep to, in requests that do not ask for strict.",
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this when the constructor is done."""
        return create_app(self._desk, self._side, self._client, self._store, self._left_out.inc)

    def __del__(self) -> None:
        """Serve calls this when the process stops, after its requests have ended."""
        for held in (getattr(self, "_side", None), getattr(self, "_client", None)):  # absent if the constructor failed
            if held is not None:
                held.close()
