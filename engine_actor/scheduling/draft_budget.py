"""How many of the proposed drafts a step verifies: from what all other work of the step leaves, one each in turn.

Drafts are guesses, so they never push out a row, a prefill token or a block that is needed; they shrink (F300, F301).
Rounds go over the rows in rank order, one draft a row, so that no proposal takes all (C28).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftWant:
    """drafts: proposed, as far as the row's limits can use them; room: positions free in blocks that it has anyway."""

    drafts: int
    room: int


def share_drafts(wants: Sequence[DraftWant], tokens: int, blocks: int, block_size: int) -> list[int]:
    """Drafts of each row: at most `tokens` together, in their rows' room and at most `blocks` more blocks."""
    shares = [0] * len(wants)
    hungry = [i for i, want in enumerate(wants) if want.drafts]
    while hungry and tokens:
        still: list[int] = []
        for i in hungry:
            beyond = shares[i] - wants[i].room
            cost = int(beyond >= 0 and beyond % block_size == 0)
            if not tokens or cost > blocks:
                continue
            shares[i] += 1
            tokens -= 1
            blocks -= cost
            if shares[i] < wants[i].drafts:
                still.append(i)
        hungry = still
    return shares
