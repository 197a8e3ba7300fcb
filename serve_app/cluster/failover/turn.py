"""One turn over as many replicas as it takes, as one stream of deltas.

    not accepted yet    a replica that refuses, dies or gives no sign of life is replaced: the turn is sent again
    accepted            the next replica gets the prompt and what the caller has, and goes on from there
    ended               by the replica; or here, where only the end was lost; or as failed, when the bounds are reached

Two bounds keep a turn that kills its replicas from killing them all. A turn that lost two replicas without a token in
between is given up: what makes it fatal happens again at the same token. And five losses are the most; a turn that
meets so many by accident lives in a cluster that loses replicas faster than it answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from engine_actor.messages import Failure, RefusalCode, TurnDelta, TurnEnded, TurnRefused, TurnRequest
from serve_app.cluster.channel.call import ChannelCaller, TurnElsewhere, TurnSentOn
from serve_app.cluster.channel.inbox import ChannelLost
from serve_app.cluster.failover.counters import FailoverCounters
from serve_app.cluster.failover.progress import Progress
from serve_app.cluster.failover.watch import ReplicaSilent, ReplicaWatch
from serve_app.cluster.routing.sticky_router import AVOID, ONLY

logger = logging.getLogger("moorage")

REFUSALS = 3  # replicas that may refuse a turn before its caller hears of it
LOSSES_AT_A_TOKEN = 2
LOSSES = 5
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 0.5  # lets the router learn of a death before the next attempt
_AT_ONCE_SECONDS = 1.0  # a refusal that comes later is that of a replica which had let the turn wait
_RETRY_AFTER_SECONDS = 1.0
_ELSEWHERE = frozenset({RefusalCode.QUEUE_FULL, RefusalCode.UNAVAILABLE})
_FAILURES = {
    RefusalCode.CONTEXT_LENGTH: Failure.CONTEXT_LENGTH,
    RefusalCode.GRAMMAR: Failure.GRAMMAR,
    RefusalCode.INVALID: Failure.ENGINE,  # another replica had nothing against it
}
_DIED = (RayActorError, BackPressureError, DeploymentUnavailableError, ChannelLost)


class _Refused(Exception):
    def __init__(self, refusal: TurnRefused) -> None:
        self.refusal = refusal


class _ReplicaLost(Exception):
    """The replica that had the turn, or was to have it: `why` is "died", "silent" or "stopped"."""

    def __init__(self, why: str) -> None:
        self.why = why


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds until a replica must have taken a turn.

    placement    one that none has had: its client has heard nothing yet, and can go elsewhere
    replacement  from each loss of the one that had it: where that was the only one, another has to start first
    """

    placement: float
    replacement: float


class FailoverTurn:
    def __init__(
        self,
        caller: ChannelCaller,
        handle: DeploymentHandle,
        request: TurnRequest,
        watch: ReplicaWatch,
        counters: FailoverCounters,
        patience: Patience,
    ) -> None:
        """`handle`: of `stream_turn`, with the routing key."""
        self._caller = caller
        self._handle = handle
        self._id = request.request_id
        self._progress = Progress(request)
        self._watch = watch
        self._counters = counters
        self._patience = patience
        self._had_replica = False
        self._start_clock()
        self._reached_at = 0.0
        self._avoid: list[str] = []
        self._meant: dict[str, str] = {}  # ONLY, of the next call alone
        self._sent_on = False
        self._replica: str | None = None  # that has the turn now
        self._refusals: list[TurnRefused] = []
        self._losses = 0
        self._losses_at_this_token = 0
        self._delivered_at_last_loss = 0
        self._lost_at = 0.0

    async def deltas(self) -> AsyncGenerator[TurnDelta, None]:
        """Leaving it early cancels the turn wherever it is: unplaced, queued or running."""
        progress, pause = self._progress, _FIRST_PAUSE_SECONDS
        while True:
            before = progress.delivered
            try:
                async with aclosing(self._attempt()) as deltas:
                    async for delta in deltas:
                        if (shown := progress.apply(delta)) is not None:
                            yield shown
                        else:
                            self._note_resumption()
            except _Refused as refused:
                last = self._after_refusal(refused.refusal)
            except _ReplicaLost as lost:
                last = self._after_loss(lost.why)
            except TurnSentOn as sent:
                self._send_on(sent.elsewhere)
                continue
            except TimeoutError:
                last = self._give_up(_unavailable(self._why_unplaced()))
            for end in last:
                yield end
            if progress.complete:
                return
            pause = _FIRST_PAUSE_SECONDS if progress.delivered > before else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(pause)

    async def _attempt(self) -> AsyncGenerator[TurnDelta, None]:
        """One call. Ends with _Refused, _ReplicaLost, or TimeoutError at the deadline for being placed."""
        self._replica = None
        meant, self._meant = self._meant, {}
        call = self._caller.call(self._handle, self._progress.next_request(), **{AVOID: tuple(self._avoid)}, **meant)
        try:
            with self._watch.place() as place:
                self._replica = await place.next(call, self._deadline)
                place.reached(self._replica)
                self._reached_at = asyncio.get_running_loop().time()
                while True:
                    delta = await place.next(call)
                    if isinstance(delta, TurnRefused) and self._passes_on(delta):
                        raise _Refused(delta)
                    if isinstance(delta, TurnEnded) and delta.resumable and self._progress.can_resume:
                        raise _ReplicaLost("stopped")
                    yield delta
        except StopAsyncIteration:
            raise _ReplicaLost("died") from None
        except _DIED as error:
            logger.debug("turn %s: %s", self._id, error)
            raise _ReplicaLost("died") from error
        except ReplicaSilent:
            raise _ReplicaLost("silent") from None
        finally:
            call.close()

    def _passes_on(self, refusal: TurnRefused) -> bool:
        """An accepted turn is no longer its caller's to mend, so nothing of it is refused to him."""
        return self._progress.accepted is not None or refusal.code in _ELSEWHERE

    def _send_on(self, elsewhere: TurnElsewhere) -> None:
        """Once: it stays where it has come back to, or where it was sent first if the other one has refused or lost it,
        or is silent. What is meant for a replica is not sent on by that."""
        lost = self._sent_on or elsewhere.replica in self._avoid or elsewhere.replica in self._watch.silent
        self._meant = {ONLY: elsewhere.here if lost else elsewhere.replica}
        self._sent_on = True

    # -- setbacks: what the caller is told, if this was the last one --------------------------------------------------

    def _after_refusal(self, refusal: TurnRefused) -> list[TurnDelta]:
        assert self._replica is not None
        now = asyncio.get_running_loop().time()
        self._avoid.append(self._replica)
        if self._progress.accepted is None or now > self._reached_at + _AT_ONCE_SECONDS:
            self._start_clock()
        if self._progress.accepted is None:
            self._refusals.append(refusal)
            if len(self._refusals) == REFUSALS or self._all_are_full():
                return self._give_up(_soonest(self._refusals))
            self._note("is tried elsewhere", "refused")
            return []
        if refusal.code is RefusalCode.CONTEXT_LENGTH and (ends := self._progress.missing_end(refusal)):
            return [*ends]
        hopeless = refusal.code in (RefusalCode.INVALID, RefusalCode.GRAMMAR)
        # Of the replicas that run none may be large enough, and one that starts need be no larger.
        too_long = refusal.code is RefusalCode.CONTEXT_LENGTH and now > self._lost_at + self._patience.placement
        return self._give_up(refusal) if hopeless or too_long or now > self._deadline else []

    def _all_are_full(self) -> bool:
        """Each running replica has said so: to ask again at once would only add to the load."""
        running = self._watch.running
        full = all(refusal.code is RefusalCode.QUEUE_FULL for refusal in self._refusals)
        return full and bool(running) and running <= set(self._avoid)

    def _after_loss(self, why: str) -> list[TurnDelta]:
        """Of a replica that the turn had reached, or was on its way to: then the turn cannot be to blame. Also comes
        after the end, which changes nothing."""
        progress, reached = self._progress, self._replica is not None
        if progress.complete:
            return []
        if reached:
            self._had_replica = True
            self._avoid = [str(self._replica)]
            self._start_clock()
            self._lost_at = asyncio.get_running_loop().time()
            same = progress.delivered == self._delivered_at_last_loss
            self._losses_at_this_token = self._losses_at_this_token * same + 1
            self._delivered_at_last_loss = progress.delivered
        if reached or why != "silent":
            self._losses += 1
        if ends := progress.missing_end():
            return [*ends]
        if progress.accepted is not None and not progress.can_resume:
            return [*progress.fail(Failure.UNAVAILABLE, "the replica was lost in the middle of the answer")]
        fatal = self._losses_at_this_token == LOSSES_AT_A_TOKEN
        if fatal or self._losses == LOSSES:
            lost = _unavailable(f"{self._losses} replicas were lost that had this turn")
            return self._give_up(lost, Failure.ENGINE if fatal else None)
        self._note("goes on elsewhere" if progress.accepted else "is tried elsewhere", why)
        return []

    def _why_unplaced(self) -> str:
        """Why the deadline for being placed has passed."""
        waited = f"within {self._within:g} s"
        if not (running := self._watch.running):
            return f"no replica is running, and none has started {waited}"
        silent = len(self._watch.silent & running)
        return f"no replica has taken the turn {waited} (running: {len(running)}, of these not answering: {silent})"

    def _start_clock(self) -> None:
        """The time until a replica must have the turn begins anew."""
        self._within = self._patience.replacement if self._had_replica else self._patience.placement
        self._deadline = asyncio.get_running_loop().time() + self._within

    def _give_up(self, refusal: TurnRefused, failure: Failure | None = None) -> list[TurnDelta]:
        """`failure`: of a turn that was accepted, if it is another than that of its refusal."""
        logger.warning("turn %s is given up after %d tokens: %s", self._id, self._progress.delivered, refusal.message)
        if self._progress.accepted is None:
            self._progress.complete = True
            return [refusal]
        failure = failure or _FAILURES.get(refusal.code, Failure.UNAVAILABLE)
        return [*self._progress.fail(failure, f"it could not be moved to another replica: {refusal.message}")]

    def _note(self, what: str, why: str) -> None:
        where, delivered = self._replica or "on its way", self._progress.delivered
        logger.warning("turn %s %s after %d tokens: replica %s: %s", self._id, what, delivered, where, why)
        self._counters.count(resumed=self._progress.accepted is not None, why=why)

    def _note_resumption(self) -> None:
        now = asyncio.get_running_loop().time()
        reached, accepted = self._reached_at - self._lost_at, now - self._lost_at
        text = "turn %s goes on at replica %s, which it reached after %.2f s and which accepted it after %.2f s"
        logger.info(text, self._id, self._replica, reached, accepted)


def _soonest(refusals: list[TurnRefused]) -> TurnRefused:
    """The one whose replica will have room first: a full queue says when, one that is being stopped does not."""
    full = [refusal for refusal in refusals if refusal.code is RefusalCode.QUEUE_FULL]
    return min(full or refusals, key=lambda refusal: refusal.retry_after)


def _unavailable(message: str) -> TurnRefused:
    return TurnRefused(RefusalCode.UNAVAILABLE, message, retry_after=_RETRY_AFTER_SECONDS)
