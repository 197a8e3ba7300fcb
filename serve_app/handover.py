"""What becomes of the conversations of a replica that is stopped: their next homes remember them.

Serve takes a replica out of every router's set at once and then waits for its calls to end. From that moment on its
dormant conversations go, one call each, where the router sends their next turns; those that run follow when their turn
has ended. They take along their tokens, so the next turn is matched token for token, and their KV cache, which is far
cheaper to copy than to compute. The new home keeps the cache if it has blocks for it that nobody holds;
else it computes it anew.

    in the set        taken out           last call ends      gone
    |------ turns ----|-- hand over, again and again --|-- the rest --|
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from ray.serve.handle import DeploymentHandle

from engine_actor.turns import MovedSession, session_key
from serve_app.routing.known_replicas import KnownReplicas
from serve_app.routing.sticky_router import AVOID, ONLY

if TYPE_CHECKING:
    from engine_actor.actor import EngineActor

logger = logging.getLogger("moorage.engine")

_AGAIN_SECONDS = 0.5
_AT_A_TIME = 16
# With their caches: each is copied out of the pool and into the object store.
_CACHES_AT_A_TIME = 4
_MOST_BYTES = 2**30
_CALL_SECONDS = 5.0
_LAST_SECONDS = 5.0


class Handover:
    """Of one replica. `run` from its start on; `finish` when its last call has ended."""

    def __init__(self, replica: str, actor: EngineActor, engines: DeploymentHandle, known: KnownReplicas) -> None:
        self._replica = replica
        self._actor = actor
        self._adopters = engines.options(method_name="adopt")
        self._signs = engines.options(method_name="sign_of_life")
        self._known = known
        self._handed: dict[str, int] = {}  # length of the sequence that the next home has, by session
        self._failed: set[str] = set()  # sessions that did not arrive: next time they go without their caches
        self._taken_out = asyncio.Event()
        self._was_in = False

    async def run(self) -> None:
        """Until it is cancelled."""
        self._known.listen(self._see)
        # A call makes this process follow the set of replicas; it is answered when the first of them is there.
        try:
            await self._signs.remote(**{ONLY: self._replica})
        except Exception as error:  # the one that was to answer is lost; the set is followed all the same
            logger.info("%s: no answer from the first replica: %s", self._replica, type(error).__name__)
        self._see(self._known.running)
        await self._taken_out.wait()
        logger.info("%s: is being stopped, and hands its conversations over", self._replica)
        while True:
            await self._hand_over()
            await asyncio.sleep(_AGAIN_SECONDS)

    def _see(self, running: frozenset[str]) -> None:
        if self._replica in running:
            self._was_in = True
        elif self._was_in:
            self._taken_out.set()

    async def finish(self) -> None:
        """The last conversations go; the time for it is bounded, for there may be nobody who takes them. Where it ends
        before all of them are gone, the others get as much time again to go without their caches."""
        for most_bytes in (_MOST_BYTES, 0):
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    await self._hand_over(most_bytes)
                break
            except TimeoutError:
                logger.warning("%s: some conversations were not handed over in time", self._replica)
        if self._handed:
            logger.info("%s: %d conversations handed over", self._replica, len(self._handed))

    async def _hand_over(self, most_bytes: int = _MOST_BYTES) -> None:
        """All that are new or have grown; each with its cache unless that is larger than `most_bytes`."""
        many, few = asyncio.Semaphore(_AT_A_TIME), asyncio.Semaphore(_CACHES_AT_A_TIME)

        async def give(session: MovedSession, key: str) -> None:
            most = 0 if key in self._failed else most_bytes
            async with few if most and session.cached_tokens else many:
                if not self._known.running - {self._replica}:
                    return  # the application is being deleted
                # Only now is its cache copied, so that no more of them exist than are on their way.
                moved = await self._actor.take_along(session.owner, session.session_id, most)
                if moved is not None:
                    await self._give(moved, key)

        sessions = [(s, session_key(s.owner, s.session_id)) for s in await self._actor.dormant_sessions()]
        await asyncio.gather(*(give(s, key) for s, key in sessions if self._handed.get(key) != len(s.tokens)))

    async def _give(self, moved: MovedSession, key: str) -> None:
        answer = self._adopters.options(session_id=key).remote(moved, **{AVOID: (self._replica,)})
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                await answer
        except Exception as error:  # whatever the other side has: its turns will be computed from their prompts
            with contextlib.suppress(Exception):  # of a call that no replica has taken it raises the same again
                answer.cancel()
            self._failed.add(key)
            logger.warning("%s: a conversation was not handed over: %s", self._replica, type(error).__name__)
            return
        self._handed[key] = len(moved.tokens)
