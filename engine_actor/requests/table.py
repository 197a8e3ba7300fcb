"""Every request of one engine, and those of them that have something to compute.

queue      own no memory and wait for it: new ones at the back in order of submission, preempted ones at the front
running    own memory and have a turn; in resident order, which is that in which they came to own memory
the rest   is idle or new, and costs a step nothing however many there are
"""

from __future__ import annotations

from collections import OrderedDict

from engine_actor.requests.record import RequestRecord


def _residency(record: RequestRecord) -> int:
    return record.residency


class RequestTable:
    """A request enters `_turns` when its turn begins, so that a step that makes it a resident grows nothing (F165)."""

    def __init__(self) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.queue: OrderedDict[int, RequestRecord] = OrderedDict()
        self._turns: dict[int, RequestRecord] = {}  # of `queue` and of the running ones
        self._residencies = 0

    @property
    def has_work(self) -> bool:
        return bool(self._turns)

    @property
    def running_count(self) -> int:
        return len(self._turns) - len(self.queue)

    def running(self) -> list[RequestRecord]:
        """In resident order."""
        queue = self.queue
        return sorted((r for r in self._turns.values() if r.id not in queue), key=_residency)

    def with_turns(self) -> list[RequestRecord]:
        """All whose turn is not over: those that run, then those that wait."""
        return [*self.running(), *self.queue.values()]

    def wait(self, record: RequestRecord, *, first: bool = False) -> None:
        """A request without memory has a turn from now on."""
        self._turns[record.id] = self.queue[record.id] = record
        if first:
            self.queue.move_to_end(record.id, last=False)

    def run(self, record: RequestRecord) -> None:
        """A resident has a turn from now on."""
        self._turns[record.id] = record

    def settle(self, record: RequestRecord) -> None:
        """It owns memory from now on, and comes after all others that do."""
        self._residencies += 1
        record.residency = self._residencies
        self.queue.pop(record.id, None)

    def rest(self, record: RequestRecord) -> None:
        """It has no turn any more."""
        self.queue.pop(record.id, None)
        self._turns.pop(record.id, None)
