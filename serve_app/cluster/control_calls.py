"""Questions to the replicas, each by itself: side by side and bounded, so that one that hangs speaks for itself alone.

Those that are being stopped are asked, too, as long as they live, for so do their sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from serve_app.cluster.routing.known_replicas import KnownReplicas
from serve_app.cluster.routing.sticky_router import ONLY

logger = logging.getLogger("moorage")

ANSWER_SECONDS = 5.0
SILENT_SECONDS = 1.0
"""For one that gave no sign of life when turns asked for one: it is nearly always silent still."""
_FIRST_SECONDS = 2.0


class ReplicaUnanswered(Exception):
    """A replica that lives, as far as is known, has not answered in time, or could not."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Of a method, by replica. `unanswered`: replicas that may know something, and did not say it."""

    by_replica: dict[str, Any]
    unanswered: frozenset[str] = frozenset()


async def answer_of(response: Any, seconds: float) -> Any:
    """Raises what the call raises, or TimeoutError; it is cancelled then."""
    try:
        async with asyncio.timeout(seconds):
            return await response
    except BaseException:
        with contextlib.suppress(Exception):  # of a call that no replica has taken it raises the same again
            response.cancel()
        raise


class ControlCalls:
    """Of one process to the replicas of one deployment. Their methods take `only`, the id of the replica that is meant,
    and give None where they are another one, since that is gone then."""

    def __init__(self, handle: DeploymentHandle, known: KnownReplicas) -> None:
        self._handle = handle
        self._known = known

    async def running(self) -> frozenset[str]:
        """Replicas that take turns. Only a call makes this process follow the set of them."""
        if not self._known.running:
            with contextlib.suppress(TimeoutError, DeploymentUnavailableError, RayActorError):
                await self._handle.broadcast("accepting").results_async(timeout_s=_FIRST_SECONDS)
        return self._known.running

    async def ask(self, replica: str, method: str, *args: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """None: it is gone. Raises ReplicaUnanswered."""
        response = self._handle.options(method_name=method).remote(*args, **{ONLY: replica})
        try:
            return await answer_of(response, SILENT_SECONDS if replica in self._known.silent else seconds)
        except (ActorDiedError, DeploymentUnavailableError):
            return None
        except Exception as error:
            logger.warning("replica %s has not answered %s: %s", replica, method, type(error).__name__)
            raise ReplicaUnanswered from error

    async def ask_each(self, method: str, *args: Any, seconds: float = ANSWER_SECONDS) -> Answers:
        replicas = [*(await self.running() | self._known.leaving)]
        questions = (self.ask(replica, method, *args, seconds=seconds) for replica in replicas)
        results = dict(zip(replicas, await asyncio.gather(*questions, return_exceptions=True), strict=True))
        for result in results.values():
            if isinstance(result, BaseException) and not isinstance(result, ReplicaUnanswered):
                raise result
        unanswered = frozenset(replica for replica, result in results.items() if isinstance(result, ReplicaUnanswered))
        answers = {r: result for r, result in results.items() if r not in unanswered and result is not None}
        return Answers(answers, unanswered)
