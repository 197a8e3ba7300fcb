"""How long a step may take before its engine counts as hung.

What is normal differs a hundredfold between machines, so the engine's own pace decides. The first steps, which load
libraries and allocate, and a machine that is slow beyond all measure have the bound that the operator set.

Steps say something of each other if they are alike in size: what one token costs alone is not what it costs among a
thousand. So the pace is that of the largest steps so far, and slow ones are forgotten little by little.
"""

from __future__ import annotations

from engine_actor.requests.outcomes import StepOutcome, StepReport

FIRST_STEPS = 8
# A full step of a long context costs a few times what one of a short context does, and so does one on a busy machine.
TIMES_THE_PACE = 10.0
# What a step that is not like the others may need, such as one that compiles something.
LEAST_BOUND_SECONDS = 10.0
_KEPT = 0.9


class StepBound:
    """`note` is called after each step, on one thread; `seconds` may be read on any."""

    def __init__(self, most_seconds: float, full_step_tokens: int) -> None:
        self._most_seconds = most_seconds
        self._full_step_tokens = full_step_tokens
        self._steps = 0
        self._tokens = 0  # of the largest step
        self._pace = 0.0  # seconds a token
        self.seconds = most_seconds

    def note(self, report: StepReport) -> None:
        if report.outcome is not StepOutcome.COMMITTED:
            return
        self._steps += 1
        if self._steps <= FIRST_STEPS or 2 * report.tokens < self._tokens:
            return
        pace = report.step_seconds / report.tokens
        if report.tokens >= 2 * self._tokens:
            self._pace = pace
        else:
            self._pace = max(pace, _KEPT * self._pace)
        self._tokens = max(self._tokens, report.tokens)
        expected = self._pace * self._full_step_tokens
        self.seconds = min(self._most_seconds, max(LEAST_BOUND_SECONDS, TIMES_THE_PACE * expected))
