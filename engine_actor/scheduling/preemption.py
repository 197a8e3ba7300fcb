"""Who gives up its memory when running requests are all that is left and none of them can grow (C06, C23).

Never the request that has run for longest: it always gets on, so every request gets its turn in the end. Of the others,
the one that is cheapest to compute again; one that was preempted `max_preemptions` times only if all others were too.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_actor.requests.record import RequestRecord


def choose_victim(running: Sequence[RequestRecord], max_preemptions: int) -> RequestRecord | None:
    """`running`: executable residents. None if there are fewer than two."""
    if len(running) < 2:
        return None
    oldest = min(running, key=lambda record: record.submitted)
    others = [record for record in running if record is not oldest]
    return min(
        others,
        key=lambda record: (record.preemptions >= max_preemptions, record.num_computed_tokens, -record.submitted),
    )
