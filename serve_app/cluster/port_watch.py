"""Whether a process that Ray cannot be without still listens, such as the head of the cluster (GCS).

Ray's own processes notice the end of their head after a minute, and then end, all at once. Until then everything seems
well. So whoever must know sooner asks for a connection: it costs a fraction of a millisecond and is refused at once.
"""

from __future__ import annotations

import asyncio
import os
import time

# In the environment of all processes of a Ray that `moorage serve` started, whose head nobody starts again.
OWN_RAY_VARIABLE = "MOORAGE_OWN_RAY"
# Elsewhere a head may be started again, and the cluster lives on if that takes less than a minute.
HEAD_PATIENCE_SECONDS = 30.0
_CONNECT_SECONDS = 2.0


class PortWatch:
    """`address` is host:port. `patience`: seconds without an answer after which the listener is lost."""

    def __init__(self, address: str, patience: float) -> None:
        self.address = address
        self.patience = patience
        self.silent_since: float | None = None

    async def lost(self) -> bool:
        """Asks once. The time counts from the first question that had no answer."""
        if await self._answers():
            self.silent_since = None
            return False
        now = time.monotonic()
        if self.silent_since is None:
            self.silent_since = now
        return now - self.silent_since >= self.patience

    async def _answers(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:  # TimeoutError is one
            return False
        writer.close()
        return True


def head_watch() -> PortWatch:
    """Of the cluster that this process is in."""
    import ray

    patience = 0.0 if os.environ.get(OWN_RAY_VARIABLE) else HEAD_PATIENCE_SECONDS
    return PortWatch(ray.get_runtime_context().gcs_address, patience)
