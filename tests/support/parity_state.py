"""What the tests that carry a behaviour say about it, all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    PASSED = "passed"
    STAND_IN = "stand-in"  # passed, but something else stands in the place of what the behaviour asks for
    OPEN = "open"
    ABSENT = "absent"
    NOT_RUN = "not run"
    FAILED = "failed"


@dataclass(frozen=True)
class Carrier:
    """A test that carries a behaviour.

    stand_in  why only something in its place is tested; empty: the behaviour itself
    lacks     what of the behaviour is not built, so that it stays open; empty: nothing
    scenario  code of the acceptance scenario that the test plays, if it plays one
    """

    test: str
    stand_in: str = ""
    lacks: str = ""
    scenario: str = ""


def state_of(carriers: Iterable[Carrier], outcomes: Mapping[str, str]) -> tuple[State, str]:
    """State of a behaviour and why it is no better, from its tests and each test's last outcome ("passed", "failed",
    "skipped")."""
    carriers = list(carriers)
    found = [outcomes.get(carrier.test) for carrier in carriers]
    if "failed" in found:
        return State.FAILED, ""
    if not carriers:
        return State.OPEN, "no test carries it"
    lacking = _joined(carrier.lacks for carrier in carriers)
    if lacking:
        return State.OPEN, lacking
    if all(outcome == "skipped" for outcome in found):
        return State.OPEN, "every test of it was skipped"
    standing_in = _joined(carrier.stand_in for carrier in carriers)
    if None in found:
        return State.NOT_RUN, standing_in
    return (State.STAND_IN, standing_in) if standing_in else (State.PASSED, "")


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason))
