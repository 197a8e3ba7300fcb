"""Which replica takes a turn: a pure function, so that every process with the same facts gives the same
answer.

The rule:

1.  A turn with a routing key has a *home*. For a turn of a named session it is the replica where turns of that
    session run, wait, or are on their way. Where there is none, and for a key that is a mere hint, it is the
    replica that holds the conversation; else the replica this process sent it to last; else the first by rank. Of
    several the one that holds most is taken, which is nearly always the newest; among equals the one this process
    sent it to last, else the first by rank. So all processes go to the same one, and an older copy, which a turn
    left that moved, is not taken for the newer one in turns.
2.  *Rank* is the rendezvous hash: replicas ordered by blake2b(key, replica id). It needs no state. A replica
    that joins takes only those keys for which it comes first; one that leaves gives up only its own.
3.  A home that does not accept turns, has refused this one or is silent is left for this turn (DETOUR).
4.  A home that is overloaded is left for this turn (SPILL): its load exceeds that of the least loaded alternative by
    the absolute margin *and* by the relative one.
5.  A home where turns of the same named session are open is never left for its load: two of them at two replicas
    would be two sessions.
6.  The margins are those of what would be lost. A conversation that is resident has a cache to lose. A named
    session that is not resident has its name to lose, for another process sees other loads and may choose
    another home: processes agree as long as no replica is ahead of another by more than these margins, whatever
    else they see of the loads; beyond that the replicas settle it among themselves (`claims`). A hint that finds
    nothing has nothing to lose, so its margins are the narrowest.
7.  A turn that leaves its home goes to the next in order: open ones, holders, the last one, then by rank; with
    SPILL, one that is not overloaded itself.
8.  A turn without a key goes to the least loaded replica; equal loads are ordered by the rendezvous hash of
    its request id, so that a burst spreads before the first load report arrives.
9.  Replicas that accept nothing, or have refused this turn, come last, in the same order: they are better
    than none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why the first replica of a placement is the first. Each is counted by the router."""

    OPEN = "open"
    RESIDENT = "resident"
    TABLE = "table"
    RENDEZVOUS = "rendezvous"
    SPILL = "spill"
    DETOUR = "detour"
    LEAST_LOADED = "least_loaded"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What is known of a replica when a turn is placed.

    load       turns there, running and waiting
    resident   tokens that it holds of this turn's conversation
    accepting  it takes new turns, has not refused this one, and gives signs of life
    open       turns of this conversation run or wait there, or are on their way
    """

    replica_id: str
    load: int = 0
    resident: int = 0
    accepting: bool = True
    open: bool = False


@dataclass(frozen=True, slots=True)
class Margins:
    """A replica is overloaded against another when load > other + absolute and load > other * relative."""

    absolute: int
    relative: float

    def __post_init__(self) -> None:
        if isinstance(self.absolute, bool) or not isinstance(self.absolute, int) or self.absolute < 0:
            raise ValueError(f"the absolute margin must be an integer >= 0, not {self.absolute!r}")
        if not isinstance(self.relative, int | float) or not self.relative >= 1.0:
            raise ValueError(f"the relative margin must be a number >= 1, not {self.relative!r}")

    def overloaded(self, load: int, other: int) -> bool:
        return load > other + self.absolute and load > other * self.relative


@dataclass(frozen=True, slots=True)
class SpillPolicy:
    """`resident`: for a turn whose conversation its home holds; `name`: for one of a named session that its home does
    not hold; `newcomer`: for one that has only a hint, and would be computed anew."""

    resident: Margins = Margins(32, 2.0)
    newcomer: Margins = Margins(4, 1.5)
    name: Margins = Margins(32, 2.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Replica ids, best first, each replica once; empty only if there are no replicas."""

    ranked: tuple[str, ...]
    reason: Reason


def rendezvous_score(key: str, replica_id: str) -> int:
    """64 bits. The length prefix keeps ("a", "bc") apart from ("ab", "c")."""
    text = f"{len(key)}:{key}{replica_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"moorage").digest(), "big")


def by_rank(key: str, replica_ids: Collection[str]) -> list[str]:
    """Highest score first; equal scores, which 64 bits make a curiosity, by id."""
    return sorted(replica_ids, key=lambda replica: (-rendezvous_score(key, replica), replica))


def place(
    key: str | None,
    replicas: Sequence[ReplicaView],
    *,
    request_id: str,
    named: bool = False,
    table_home: str | None = None,
    policy: SpillPolicy | None = None,
) -> Placement:
    """Ranks `replicas` for one turn by the rule above. Their order in the input does not matter. `named`: the key is
    that of a session's name, and no mere hint."""
    views = {view.replica_id: view for view in replicas}
    if key is None:
        rank = {replica: i for i, replica in enumerate(by_rank(request_id, views))}
        order = sorted(views, key=lambda r: (not views[r].accepting, views[r].load, rank[r]))
        return Placement(tuple(order), Reason.LEAST_LOADED)

    order, reason = _from_home(by_rank(key, views), views, named, table_home)
    willing = [r for r in order if views[r].accepting]
    unwilling = [r for r in order if not views[r].accepting]
    if not willing:
        return Placement(tuple(unwilling), reason)
    if order[0] != willing[0]:
        reason = Reason.DETOUR

    home = views[willing[0]]
    if named and home.open:
        return Placement((*willing, *unwilling), reason)
    policy = policy or SpillPolicy()
    margins = policy.resident if home.resident else policy.name if named else policy.newcomer
    lightest = min(views[r].load for r in willing)
    if margins.overloaded(home.load, lightest):
        reason = Reason.SPILL
        over = {r for r in willing if margins.overloaded(views[r].load, lightest)}
        willing.sort(key=lambda r: r in over)  # stable: order is kept within both halves
    return Placement((*willing, *unwilling), reason)


def _from_home(
    rank: list[str], views: dict[str, ReplicaView], named: bool, table_home: str | None
) -> tuple[list[str], Reason]:
    """Those with open turns of a named session, then the holders (of most first, of as much the table's), then the
    table's home, then the rest by rank."""

    def by_tokens(replicas: list[str]) -> list[str]:
        return sorted(replicas, key=lambda r: (-views[r].resident, r != table_home))

    opened = by_tokens([r for r in rank if named and views[r].open])
    holders = by_tokens([r for r in rank if views[r].resident and r not in opened])
    remembered = [r for r in rank if r == table_home and r not in opened + holders]
    order = opened + holders + remembered
    reasons = ((opened, Reason.OPEN), (holders, Reason.RESIDENT), (remembered, Reason.TABLE))
    reason = next((reason for holds, reason in reasons if holds), Reason.RENDEZVOUS)
    return order + [r for r in rank if r not in order], reason
