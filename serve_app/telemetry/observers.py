"""Where measurements are taken: as a turn's deltas pass by, and after each step of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from engine_actor.messages import EndReason, Failure, TurnAccepted, TurnDelta, TurnEnded, TurnRefused, TurnTokens
from engine_actor.requests.outcomes import StepReport
from serve_app.telemetry import metrics as m

_FINISHED = {EndReason.STOP: "stop", EndReason.LENGTH: "length", EndReason.FAILED: "error"}
ABORTED = "abort"


class TurnWatch:
    """Observes one turn. A context manager: a turn that is left before its end was aborted by the client."""

    def __init__(self, metrics: m.EngineMetrics, choices: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._metrics = metrics
        self._clock = clock
        self._open = choices  # answers that have not ended
        self._accepted: TurnAccepted | None = None
        self._prompt_counted = False
        self._last_seen: dict[int, float] = {}  # when a choice's last tokens came
        self._begun = clock()

    def __enter__(self) -> TurnWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._accepted is not None and self._open:
            self._metrics.add(m.SUCCESS, self._open, ABORTED)
            self._count_prompt(self._accepted.prompt_tokens, self._accepted.cached_tokens)

    def note(self, delta: TurnDelta) -> None:
        if isinstance(delta, TurnTokens):
            self._note_tokens(delta)
        elif isinstance(delta, TurnEnded):
            self._note_end(delta)
        elif isinstance(delta, TurnAccepted):
            self._accepted = delta
        elif isinstance(delta, TurnRefused):
            self._metrics.add(m.REFUSALS, 1, delta.code.value)

    def _note_tokens(self, delta: TurnTokens) -> None:
        now, count = self._clock(), len(delta.token_ids)
        last = self._last_seen.get(delta.choice)
        if last is not None:
            self._metrics.observe(m.INTER_TOKEN, (now - last) / count)
        elif not self._last_seen:
            self._metrics.observe(m.FIRST_TOKEN, now - self._begun)
        self._last_seen[delta.choice] = now
        self._metrics.add(m.GENERATION_TOKENS, count)

    def _note_end(self, delta: TurnEnded) -> None:
        self._open -= 1
        deleted = delta.reason is EndReason.FAILED and delta.failure is Failure.SESSION_DELETED
        self._metrics.add(m.SUCCESS, 1, ABORTED if deleted else _FINISHED[delta.reason])
        if delta.reason is not EndReason.FAILED:
            self._metrics.observe(m.REQUEST_GENERATION, delta.generated_tokens)
        if delta.choice == 0:
            self._count_prompt(delta.prompt_tokens, delta.cached_tokens)
        if not self._open:
            self._metrics.observe(m.END_TO_END, self._clock() - self._begun)

    def _count_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Once a turn: all its choices have one prompt. What the session itself held was known when the turn was
        accepted; the rest of the cached tokens came from shared prefixes."""
        if self._prompt_counted:
            return
        self._prompt_counted = True
        of_session = self._accepted.cached_tokens if self._accepted is not None else 0
        self._metrics.add(m.PROMPT_TOKENS, prompt_tokens)
        self._metrics.add(m.CACHE_QUERIES, prompt_tokens)
        self._metrics.add(m.CACHE_HITS, cached_tokens)
        self._metrics.add(m.CACHED_TOKENS, min(of_session, cached_tokens), "session")
        self._metrics.add(m.CACHED_TOKENS, max(cached_tokens - of_session, 0), "prefix")
        self._metrics.observe(m.REQUEST_PROMPT, prompt_tokens)


class StepWatch:
    """Called on the owner thread after each transaction of the engine."""

    def __init__(self, metrics: m.EngineMetrics) -> None:
        self._metrics = metrics

    def __call__(self, report: StepReport) -> None:
        for deferral in report.deferrals:
            self._metrics.add(m.DEFERRALS, 1, deferral.reason.value)
        if report.rows:
            self._metrics.add(m.STEP_SECONDS, report.decoder_seconds, "forward")
            self._metrics.add(m.STEP_SECONDS, report.step_seconds - report.decoder_seconds, "host")
            self._metrics.observe(m.ITERATION_TOKENS, report.tokens)
