"""What becomes of the conversations of a replica that is stopped: their next homes remember them.

Serve takes a replica out of every router's set at once and then waits for its calls to end. From that moment on its
dormant conversations go, one call each, where the router sends their next turns; those that run follow when their turn
has ended. They take along their tokens, so the next turn is matched token for token, and their KV cache, which is far
cheaper to copy than to compute. The new home keeps the cache if it has blocks for it that nobody holds;
else it computes it anew.

    in the set        taken out           last call ends      gone
    |------ turns ----|-- hand over, again and again --|-- the rest --|

A session that is deleted meanwhile must not come back, and its deletion goes to the replicas in the set of the ingress
process that broadcasts it: perhaps no longer to this one, perhaps not yet to the next home. So each replica remembers
for a while what was deleted there (`engine_actor/sessions/deletions.py`), and

    before each pass      the others are asked, and what was deleted anywhere stays here
    at the next home      what was deleted there is not adopted; what is deleted later is dropped, as ever
    at the next question  what was deleted anywhere after it was sent is taken back: the others drop it, or refuse it
                          if it is still on its way. What a turn has used since is left alone: it lives again

A session that was deleted and begun anew under its old name may be taken for the old one, and then stays here. That
costs its next turn the cache, and no text.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ray.serve.handle import DeploymentHandle

from engine_actor.messages import MovedSession, session_key
from engine_actor.sessions.deletions import KEPT_SECONDS
from serve_app.cluster.control_calls import answer_of
from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.cluster.routing.sticky_router import AVOID, ONLY

if TYPE_CHECKING:
    from engine_actor.actor.actor import EngineActor

logger = logging.getLogger("moorage.engine")

_AGAIN_SECONDS = 0.5
_AT_A_TIME = 16
# With their caches: each is copied out of the pool and into the object store.
_CACHES_AT_A_TIME = 4
_MOST_BYTES = 2**30
_CALL_SECONDS = 5.0
_ASK_SECONDS = 1.0  # answered on the event loop, whatever the engine does
_LAST_SECONDS = 5.0


class Handover:
    """Of one replica. `run` from its start on; `finish` when its last call has ended."""

    def __init__(self, replica: str, actor: EngineActor, engines: DeploymentHandle, known: KnownReplicas) -> None:
        self._replica = replica
        self._actor = actor
        self._adopters = engines.options(method_name="adopt")
        self._signs = engines.options(method_name="sign_of_life")
        self._deletions = engines.options(method_name="deleted_sessions")
        self._forgetters = engines.options(method_name="forget_moved")
        self._known = known
        self._handed: dict[str, int] = {}  # length of the sequence that the next home has, by session
        self._failed: set[str] = set()  # sessions that did not arrive: next time they go without their caches
        self._maybe_arrived: set[str] = set()  # sessions that may have arrived somewhere
        self._deleted: set[str] = set()
        self._deletions_read_at: float | None = None  # those of the others
        self._taken_out = asyncio.Event()
        self._was_in = False

    @property
    def taken_out(self) -> bool:
        """Whether the routers send no more calls here, since this replica is stopped."""
        return self._taken_out.is_set()

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

    async def hand_over_rest(self) -> None:
        """The last conversations go; the time for it is bounded, for there may be nobody who takes them. Where it ends
        before all of them are gone, the others get as much time again to go without their caches."""
        for most_bytes in (_MOST_BYTES, 0):
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    await self._hand_over(most_bytes)
                break
            except TimeoutError:
                logger.warning("%s: some conversations were not handed over in time", self._replica)
        await self._learn_of_deletions()
        if self._handed:
            logger.info("%s: %d conversations handed over", self._replica, len(self._handed))

    async def _hand_over(self, most_bytes: int = _MOST_BYTES) -> None:
        """All that are new or have grown; each with its cache unless that is larger than `most_bytes`."""
        await self._learn_of_deletions()
        many, few = asyncio.Semaphore(_AT_A_TIME), asyncio.Semaphore(_CACHES_AT_A_TIME)

        async def give(session: MovedSession, key: str) -> None:
            most = 0 if key in self._failed else most_bytes
            async with few if most and session.cached_tokens else many:
                if not self._known.running - {self._replica}:
                    return  # the application is being deleted
                # Only now is its cache copied, so that no more of them exist than are on their way.
                moved = await self._actor.take_along(session.cache_scope, session.session_id, most)
                if moved is not None:
                    await self._give(moved, key)

        sessions = [(s, session_key(s.cache_scope, s.session_id)) for s in await self._actor.dormant_sessions()]
        alive = [pair for pair in sessions if pair[1] not in self._deleted]
        await asyncio.gather(*(give(s, key) for s, key in alive if self._handed.get(key) != len(s.tokens)))

    async def _give(self, moved: MovedSession, key: str) -> None:
        self._maybe_arrived.add(key)
        try:
            adopters = self._adopters.options(session_id=key)
            await answer_of(adopters.remote(moved, **{AVOID: (self._replica,)}), _CALL_SECONDS)
        except Exception as error:  # whatever the other side has: its turns will be computed from their prompts
            self._failed.add(key)
            logger.warning("%s: a conversation was not handed over: %s", self._replica, type(error).__name__)
            return
        self._handed[key] = len(moved.tokens)

    async def _learn_of_deletions(self) -> None:
        """Of all replicas that answer in time. Takes back what was sent and is deleted by now. A question reaches back
        to the last one, and further by what an answer may take."""
        now = asyncio.get_running_loop().time()
        within = KEPT_SECONDS if self._deletions_read_at is None else now - self._deletions_read_at + _ASK_SECONDS
        self._deleted.update(self._actor.deleted_sessions(within))
        answers = await self._ask_others(self._deletions, within)
        for keys in answers:
            if not isinstance(keys, BaseException):
                self._deleted.update(keys)
        if _all_answered(answers):  # else the next question reaches back as far
            self._deletions_read_at = now
        taken_back = sorted(self._deleted & self._maybe_arrived)
        if taken_back and _all_answered(await self._ask_others(self._forgetters, taken_back)):
            self._maybe_arrived.difference_update(taken_back)

    async def _ask_others(self, method: DeploymentHandle, argument: Any) -> list[Any]:
        """Their answers, or the exceptions in place of them."""
        others = self._known.running - {self._replica}
        questions = (answer_of(method.remote(argument, **{ONLY: replica}), _ASK_SECONDS) for replica in others)
        return await asyncio.gather(*questions, return_exceptions=True)


def _all_answered(answers: list[Any]) -> bool:
    return not any(isinstance(answer, BaseException) for answer in answers)
