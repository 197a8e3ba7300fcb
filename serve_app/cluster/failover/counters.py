"""How often turns had to leave a replica."""

from __future__ import annotations

from ray.util.metrics import Counter


class FailoverCounters:
    """One for each client; Ray adds up those of all processes."""

    def __init__(self) -> None:
        tags = ("reason",)
        self._resumes = Counter(
            "moorage_turn_resumes",
            description="Answers that went on at another replica, by what became of the one that was lost: died, "
            "silent (it gave no sign of life) or stopped (its engine did).",
            tag_keys=tags,
        )
        self._retries = Counter(
            "moorage_turn_retries",
            description="Turns sent to another replica before any had accepted them: refused, died, silent or stopped.",
            tag_keys=tags,
        )

    def count(self, *, resumed: bool, why: str) -> None:
        (self._resumes if resumed else self._retries).inc(tags={"reason": why})
