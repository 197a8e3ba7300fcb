"""Reads the engine about once a second: values for Ray, and every ten seconds with work one line for the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from engine_actor.errors import EngineError
from serve_app.telemetry import metrics as m

logger = logging.getLogger("moorage.engine")

PUBLISH_SECONDS = 1.0
SUMMARY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What a summary compares: counters at one moment."""

    time: float
    prefill_tokens: float
    generated_tokens: float
    queries: float
    hits: float


class Summary:
    """One line an interval, in the words of vLLM's; none while nothing happens."""

    def __init__(self, now: float) -> None:
        self._last = Reading(now, 0.0, 0.0, 0.0, 0.0)

    def line(self, reading: Reading, stats: Mapping[str, float]) -> str | None:
        """None if the interval is not over, or if it saw no token and no request."""
        last, seconds = self._last, reading.time - self._last.time
        if seconds < SUMMARY_SECONDS:
            return None
        self._last = reading
        running, waiting = int(stats["running"]), int(stats["waiting"] + stats["waiting_turns"])
        prompt = reading.prefill_tokens - last.prefill_tokens
        generated = reading.generated_tokens - last.generated_tokens
        queries, hits = reading.queries - last.queries, reading.hits - last.hits
        if not (prompt or generated or queries or running or waiting):
            return None
        rate = f"{hits / queries:.1%}" if queries else "-"
        return (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {running} reqs, Waiting: {waiting} reqs, "
            f"KV cache usage: {stats['blocks_active'] / stats['blocks_usable']:.1%}, "
            f"Prefix cache hit rate: {rate}, Resident sessions: {int(stats['sessions'])}"
        )


class Reporter:
    def __init__(
        self,
        replica: str,
        metrics: m.EngineMetrics,
        read_stats: Callable[[], Awaitable[Mapping[str, float]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read_stats`: of the EngineActor."""
        self._replica = replica
        self._metrics = metrics
        self._read_stats = read_stats
        self._clock = clock
        self._summary = Summary(clock())

    async def run(self) -> None:
        """Until it is cancelled, or the engine has failed, which is the health check's to say."""
        try:
            while True:
                await asyncio.sleep(PUBLISH_SECONDS)
                await self.report()
        except EngineError as error:
            logger.warning("%s: no more metrics: %s", self._replica, error)
        except Exception:
            logger.exception("%s: no more metrics", self._replica)

    async def report(self) -> None:
        stats = await self._read_stats()
        self._metrics.publish(stats)
        reading = Reading(
            self._clock(),
            stats["prefill_tokens"],
            self._metrics.total(m.GENERATION_TOKENS),
            self._metrics.total(m.CACHE_QUERIES),
            self._metrics.total(m.CACHE_HITS),
        )
        line = self._summary.line(reading, stats)
        if line is not None:
            logger.info("%s: %s", self._replica, line)
