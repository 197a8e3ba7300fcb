"""EngineActor: one engine on one owner thread, behind an asyncio interface. It knows nothing of Ray.

event loop                                owner thread (the only one that touches the engine)
stream_turn --- submit ------------->     commands, before each step
            <-- accepted, refused ----    before the step
            <-- deltas of a step -----    one call_soon_threadsafe a round
aclose      --- cancel ------------->     no row is spent on the turn from here on
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine_actor.actor.heartbeat import Snapshot
from engine_actor.actor.mailbox import Mailbox
from engine_actor.actor.owner_loop import OwnerLoop
from engine_actor.actor.step_bound import StepBound
from engine_actor.actor_options import ActorOptions
from engine_actor.core.engine import Engine
from engine_actor.core.exactness import settle_numerics
from engine_actor.decoding.load import LoadedDecoder, load_decoder
from engine_actor.errors import EngineUnhealthy, UnusableGrammar
from engine_actor.limits import Numerics
from engine_actor.memory.layout import PoolLayout, pools_in_memory
from engine_actor.messages import (
    ForkOutcome,
    MovedSession,
    RefusalCode,
    SessionHolding,
    SessionInfo,
    TurnDelta,
    TurnRefused,
    TurnRequest,
    session_key,
)
from engine_actor.requests.outcomes import StepReport
from engine_actor.sampling.grammars import Grammar, Grammars
from engine_actor.sampling.vocabulary import Vocabulary
from engine_actor.sessions.deletions import RecentDeletions
from engine_actor.sessions.table import Detokenize, SessionTable
from engine_actor.stopwatch import Stopwatch
from engine_actor.turns.hold_times import LEAST_WAIT_SECONDS
from engine_actor.turns.turn import Delivery, Turn
from engine_actor.turns.waiting_room import TurnLimits
from engine_actor.weights.checkpoint import LoadProgress

logger = logging.getLogger("moorage.engine")

DecoderFactory = Callable[[ActorOptions, LoadProgress | None], LoadedDecoder]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StartReport:
    """What start-up found out, for the log and for whoever waits for it."""

    model: str
    dtype: str
    weight_bytes: int
    pools: PoolLayout
    seconds: dict[str, float]  # of the steps of the start, in order
    numerics: Numerics  # exact or fast
    notes: tuple[str, ...]  # what makes it slower than it could be or promises less, and what to do

    def __str__(self) -> str:
        pools = self.pools
        text = (
            f"{self.model} ({self.dtype}); weights: {self.weight_bytes / 2**20:.0f} MiB; "
            f"KV cache: {pools.num_blocks} blocks of {pools.block_size} = {pools.tokens} tokens, "
            f"{pools.bytes / 2**20:.0f} MiB; numerics {self.numerics.value}"
        )
        if pools.limited_by_pool:
            text += (
                f"; the pool is smaller than the context of {pools.context}: the longest prompt that fits "
                f"is {pools.max_length - 1} tokens (give it more with kv_memory)"
            )
        return text


class EngineActor:
    """Make it, `await start()` on the loop that will call it, and `await stop()` in the end."""

    def __init__(
        self,
        options: ActorOptions,
        replica: str,
        detokenize: Detokenize | None = None,
        decoder_factory: DecoderFactory = load_decoder,
        on_step: Callable[[StepReport], None] | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        """`on_step` is called on the owner thread with the report of each transaction; it must be quick. `vocabulary`
        is needed for turns whose answer follows a grammar, and asked for on the owner thread while it starts."""
        self.options = options
        self.replica = replica
        self._detokenize = detokenize
        self._decoder_factory = decoder_factory
        self._on_step = on_step
        self._step_bound = StepBound(options.max_step_seconds, options.limits.max_scheduled_tokens)
        self._vocabulary = vocabulary
        self._deletions = RecentDeletions()
        self._accepting = False
        self._owner: OwnerLoop | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = 0
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, f"grammars-{replica}")
        self._compiling = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self, progress: LoadProgress | None = None) -> StartReport:
        """Loads the model and starts the owner thread. Raises what loading or sizing raised."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[StartReport] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._own, args=(started, progress), name=f"engine-owner-{self.replica}", daemon=True
        )
        self._thread.start()
        report = await started
        self._accepting = True
        logger.info("%s: %s", self.replica, report)
        for note in report.notes:
            logger.warning("%s: %s", self.replica, note)
        return report

    def _own(self, started: asyncio.Future[StartReport], progress: LoadProgress | None) -> None:
        """The owner thread: makes the engine, since an engine belongs to the thread that made it, and drives it."""
        assert self._loop is not None
        try:
            owner, report = self._build(progress)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_set_exception, started, error)
            return
        self._owner = owner
        self._loop.call_soon_threadsafe(_set_result, started, report)
        owner.run()

    def _build(self, progress: LoadProgress | None) -> tuple[OwnerLoop, StartReport]:
        options = self.options
        loaded = self._decoder_factory(options, progress)
        watch = Stopwatch()
        pools = pools_in_memory(
            loaded.decoder.manifest,
            options.limits,
            kv_memory=options.kv_memory,
            free_bytes=loaded.free_bytes,
            max_sessions=options.max_sessions,
            max_model_len=options.max_model_len,
        )
        with watch.step("allocate pools"):
            engine = Engine(loaded.decoder, options.limits, pools, self._vocabulary)
        with watch.step("probe numerics"):
            numerics, note = settle_numerics(loaded.decoder, options.limits, pools)
        if self._vocabulary is not None:
            with watch.step("read vocabulary"):
                engine.grammars.prepare()
        sessions = SessionTable(
            engine, self.replica, options.max_sessions, options.session_ttl_seconds, self._detokenize
        )
        limits = TurnLimits(options.running_limit, options.queue_limit, options.max_turns_per_session)
        owner = OwnerLoop(engine, sessions, self.replica, limits, self._deliver_threadsafe, self._note_step)
        seconds = loaded.seconds | watch.seconds
        notes = loaded.notes if note is None else (*loaded.notes, note)
        return owner, StartReport(options.model, options.dtype, loaded.weight_bytes, pools, seconds, numerics, notes)

    def _note_step(self, report: StepReport) -> None:
        self._step_bound.note(report)
        if self._on_step is not None:
            self._on_step(report)

    async def drain(self) -> None:
        """Refuses new turns and returns when the open ones have ended."""
        self._accepting = False
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends open turns and the owner thread."""
        self._accepting = False
        if self._owner is not None:
            self._owner.stop()
        self._compiler.shutdown(wait=False)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # -- turns --------------------------------------------------------------------------------------------------------

    async def stream_turn(self, request: TurnRequest) -> AsyncGenerator[TurnDelta, None]:
        """The deltas of one turn. Closing the iterator is the only way to cancel it."""
        mailbox = Mailbox()
        turn = Turn(request, mailbox.put)
        owner = self._owner
        # The turn keeps what is compiled for it until it has its own copy, so that the owner never waits for that.
        grammar = None if owner is None or not self._accepting else await self._compiled(request, owner.engine.grammars)
        if isinstance(grammar, TurnRefused):
            yield grammar
            return
        if not self._accepting or owner is None or not owner.post(lambda: owner.submit(turn)):
            yield TurnRefused(
                RefusalCode.UNAVAILABLE, "this replica takes no new turns", retry_after=LEAST_WAIT_SECONDS
            )
            return
        self._count_open(1)
        try:
            while (delta := await mailbox.get()) is not None:
                yield delta
        finally:
            self._count_open(-1)
            owner.post(lambda: owner.cancel(turn))  # does nothing if the turn is over

    async def _compiled(self, request: TurnRequest, grammars: Grammars) -> Grammar | TurnRefused | None:
        """What the turn's answer will follow. A large grammar takes longer than a step, so all are compiled on a thread
        of their own: one, since they must not take the processors from the model."""
        if request.grammar is None:
            return None
        if (compiled := grammars.find(request.grammar)) is not None:
            return compiled
        if self._compiling >= self.options.queue_limit and request.resumed_tokens is None:
            return TurnRefused(
                RefusalCode.QUEUE_FULL, f"{self._compiling} grammars are waiting already", retry_after=1.0
            )
        self._compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compiler, grammars.compile, request.grammar)
        except UnusableGrammar as error:
            return TurnRefused(RefusalCode.GRAMMAR, str(error))
        finally:
            self._compiling -= 1

    def _count_open(self, change: int) -> None:
        self._open += change
        if self._open:
            self._idle.clear()
        else:
            self._idle.set()

    def _deliver_threadsafe(self, delivery: Delivery) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_deliver, delivery)
        except RuntimeError:
            logger.info("%s: the event loop is closed, %d deliveries dropped", self.replica, len(delivery))

    # -- control ------------------------------------------------------------------------------------------------------

    async def close_session(self, cache_scope: str, session_id: str) -> bool:
        """Drops a session and all it holds; False if it is not known here. It is remembered for a while, so that the
        session does not come back with `adopt`."""
        key = session_key(cache_scope, session_id)
        self._deletions.note(key)
        return await self._on_owner(lambda loop: loop.close_session(key))

    async def fork_session(self, cache_scope: str, session_id: str, new_session_id: str) -> ForkOutcome:
        """A new session that begins with all the tokens of a dormant one."""
        return await self._on_owner(lambda loop: loop.sessions.fork(cache_scope, session_id, new_session_id))

    async def session_holdings(self, cache_scope: str, session_ids: Sequence[str]) -> list[SessionHolding | None]:
        """What is known here of each of these sessions, resident or only remembered; None of those that are unknown."""
        keys = [session_key(cache_scope, session_id) for session_id in session_ids]
        return await self._on_owner(lambda loop: [loop.sessions.holding(key) for key in keys])

    async def sessions(self, cache_scope: str | None = None) -> list[SessionInfo]:
        """Resident sessions of one cache scope, or of all."""
        return await self._on_owner(lambda loop: loop.sessions.infos(cache_scope))

    async def dormant_sessions(self) -> list[MovedSession]:
        """All sessions that no turn is using, for another replica to `adopt`; without their KV caches."""
        return await self._on_owner(lambda loop: loop.sessions.dormant())

    async def take_along(self, cache_scope: str, session_id: str, most_bytes: int) -> MovedSession | None:
        """One of them with its KV cache, unless that is larger than `most_bytes`; None if it is dormant no more. The
        copy holds up the next step: milliseconds for a cache of tens of megabytes."""
        key = session_key(cache_scope, session_id)
        return await self._on_owner(lambda loop: loop.sessions.take_along(key, most_bytes))

    async def adopt(self, moved: MovedSession) -> bool:
        """Takes over a session of another replica; False if it is known or was deleted here."""
        if session_key(moved.cache_scope, moved.session_id) in self._deletions:
            return False
        return await self._on_owner(lambda loop: loop.sessions.adopt(moved))

    def deleted_sessions(self, within: float) -> list[str]:
        """Keys of the sessions that were deleted here in the last `within` seconds, as far as they are remembered."""
        return self._deletions.within(within)

    async def forget_moved(self, keys: Sequence[str]) -> None:
        """These sessions were deleted while they were on their way here: they are dropped if they have come, unless a
        turn has used them since, and not taken if they have not."""
        for key in keys:
            self._deletions.note(key)
        await self._on_owner(lambda loop: loop.sessions.forget_moved(keys))

    async def stats(self) -> dict[str, float]:
        """Counters since the start, and the memory and requests of this moment."""
        stats = await self._on_owner(OwnerLoop.stats)
        return {name: float(value) for name, value in stats.items()}

    def routing_stats(self) -> dict[str, object]:
        """What routers need: tokens of the resident sessions by key, keys of those of which turns run or wait, load in
        turns, free blocks, and whether turns are taken. Read from the owner's last snapshot, so it never waits for a
        step."""
        snapshot = self._snapshot()
        return {
            "sessions": dict(snapshot.sessions),
            "open": snapshot.open,
            "load": snapshot.running + snapshot.waiting,
            "free_blocks": snapshot.free_blocks,
            "accepting": self._accepting and self.failure() is None,
        }

    def resident_keys(self) -> Collection[str]:
        """Of the resident sessions, from the same snapshot."""
        return self._snapshot().sessions

    def _snapshot(self) -> Snapshot:
        return self._owner.heartbeat.snapshot if self._owner is not None else Snapshot()

    async def check_integrity(self) -> None:
        """Raises ContractViolation if any part of the engine's state contradicts another."""
        await self._on_owner(lambda loop: loop.engine.check_integrity())

    def check_health(self) -> None:
        """Raises EngineUnhealthy if `failure` has something to say."""
        if (failure := self.failure()) is not None:
            raise EngineUnhealthy(failure)

    def failure(self) -> str | None:
        """Why the engine makes no progress: its owner thread is gone, has failed, or has not come round for too long.
        Known at once, since nobody is asked."""
        if self._owner is None or self._thread is None:
            return "the engine has not started"
        heartbeat = self._owner.heartbeat
        if heartbeat.failure is not None:
            return f"the engine stopped: {heartbeat.failure}"
        if not self._thread.is_alive():
            return "the owner thread has ended"
        age = time.monotonic() - heartbeat.last_round
        return f"no step and no idle tick for {age:.0f} s" if age > self._step_bound.seconds else None

    @property
    def context_length(self) -> int:
        """Longest sequence, answer included."""
        assert self._owner is not None
        return self._owner.engine.max_length

    async def _on_owner(self, command: Callable[[OwnerLoop], T]) -> T:
        """The result of a call on the owner thread, between two steps."""
        owner = self._owner
        if owner is None:
            raise EngineUnhealthy("the engine has not started")
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(command(owner))
                except Exception as error:
                    result.set_exception(error)

        if not owner.post(run):
            raise EngineUnhealthy("the engine is stopping")
        return await asyncio.wrap_future(result)


def _deliver(delivery: Delivery) -> None:
    for turn, deltas in delivery:
        turn.receive(deltas)


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
