"""The class of the Serve deployment of engines.

    client -> Serve proxy -> Ingress (HTTP, text) -> handle with StickyRouter -> EngineDeployment (one engine)

`EngineActor` knows no Ray; what is Ray's is here. It starts its work on the event loop that Serve runs user code on,
which must never block: models load in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve

from engine_actor.actor_options import ActorOptions
from engine_actor.errors import EngineUnhealthy
from engine_actor.messages import (
    ForkOutcome,
    MovedSession,
    SessionHolding,
    SessionInfo,
    TurnDelta,
    TurnRequest,
    session_key,
)
from engine_actor.stopwatch import Stopwatch
from serve_app.cluster.autoscaling import PRESSURE, pressure
from serve_app.cluster.channel.call import TurnElsewhere, TurnPlaced
from serve_app.cluster.channel.leases import Leases
from serve_app.cluster.channel.outbox import Batch, Outboxes
from serve_app.cluster.control_calls import ControlCalls
from serve_app.cluster.handover import Handover
from serve_app.cluster.routing.claims import NameClaims
from serve_app.cluster.routing.known_replicas import known_replicas
from serve_app.model_store import resolve_model
from serve_app.telemetry.logs import join_serve_log
from serve_app.telemetry.metrics import EngineMetrics, open_in_ray
from serve_app.telemetry.observers import StepWatch, TurnWatch
from serve_app.telemetry.reporter import Reporter
from serve_app.text.stream import AnswerText
from serve_app.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from engine_actor.actor.actor import DecoderFactory, EngineActor

logger = logging.getLogger("moorage.engine")

CLAIM_ANSWER_SECONDS = 0.5  # it is answered on the event loop, whatever the engine does


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
        replicas = known_replicas(context.app_name, context.deployment)
        self._handover = Handover(self._replica, self._actor, engines, replicas)
        self._leases = Leases(lambda: self._handover.taken_out)
        self._control = ControlCalls(engines, replicas)
        self._claims = NameClaims(self._replica, replicas, self._actor.resident_keys, self._ask_who_has)
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
        self, request: TurnRequest, reader: str, number: int, avoid: tuple[str, ...] = (), only: str = ""
    ) -> AsyncGenerator[TurnPlaced | TurnElsewhere | TurnDelta, None]:
        """Where the turn is, then its deltas; or nothing more, where they go to the channel of `reader` as those of its
        turn `number`. It is cancelled when its reader has gone. Or only where else it is to go; not if it is meant for
        this replica (`only`), or another one had begun it. `avoid`: replicas that have refused or lost it."""
        key = None if request.session_id is None else session_key(request.cache_scope, request.session_id)
        if key is not None and request.resumed_tokens is None and only != self._replica:
            home = await self._claims.home(key, avoid)
            if home != self._replica:
                yield TurnElsewhere(self._replica, home)
                return
        with ExitStack() as held:
            if key is not None:
                held.enter_context(self._claims.turn(key))
            lease = held.enter_context(self._leases.hold(reader))
            outbox = held.enter_context(self._outboxes.turn(reader, number))
            yield TurnPlaced(self._replica, None if outbox is None else outbox.channel)
            async with aclosing(self._measured_turn(request)) as measured, aclosing(lease.items(measured)) as deltas:
                if outbox is not None:
                    await outbox.carry(deltas)
                else:
                    async for delta in deltas:
                        yield delta

    async def _ask_who_has(self, first: str, key: str, avoid: Collection[str]) -> str | None:
        question = self._control.ask(first, "claim", key, self._replica, tuple(avoid), seconds=CLAIM_ANSWER_SECONDS)
        home: str | None = await question
        return home

    async def claim(self, key: str, claimant: str, avoid: tuple[str, ...], only: str) -> str | None:
        """See `NameClaims`."""
        return self._claims.claim(key, claimant, avoid) if only == self._replica else None

    async def channel(self, reader: str, number: int, only: str) -> AsyncGenerator[Batch, None]:
        """The deltas of all turns of a reader that come while it is open. `only`: the replica that was meant; another
        one gives nothing, since turns there have a channel of their own."""
        if only == self._replica:
            with self._leases.hold(reader) as lease:
                async with (
                    aclosing(self._outboxes.read(reader, number)) as outgoing,
                    aclosing(lease.items(outgoing)) as batches,
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
            await handover.hand_over_rest()
        if actor is not None:
            await actor.stop()


def _answer_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text that a client was sent for these tokens, and may send back as history."""
    answer = AnswerText(tokenizer)
    return answer.push(token_ids) + answer.finish()
