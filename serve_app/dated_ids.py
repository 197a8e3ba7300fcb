"""Ids that tell when they were made: whoever does not know one can say whether it is older than its own memory."""

from __future__ import annotations

import re
import secrets
import time

_TIME_DIGITS = 12  # milliseconds since 1970: enough until the year 10889
_DATED = re.compile(rf"[a-z]+_([0-9a-f]{{{_TIME_DIGITS}}})[0-9a-f]{{12,}}")


def new_id(prefix: str, digits: int = 32) -> str:
    """`digits`: hexadecimal ones after the prefix, of which 12 are the time and the others are drawn."""
    drawn = secrets.randbits(4 * (digits - _TIME_DIGITS))
    return f"{prefix}_{int(time.time() * 1000):0{_TIME_DIGITS}x}{drawn:0{digits - _TIME_DIGITS}x}"


def made_at(some_id: str) -> float | None:
    """Seconds since 1970; None of what `new_id` has not made."""
    match = _DATED.fullmatch(some_id)
    return None if match is None else int(match[1], 16) / 1000
