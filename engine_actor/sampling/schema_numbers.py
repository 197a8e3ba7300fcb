"""Numbers in JSON schemas that the grammar library would change, or fail over.

It reads all of them as floats of 64 bits, and bounds of whole numbers as integers of 64 bits. Beyond 2**53 a whole
number becomes its neighbour, and a bound near the least integer of 64 bits ends the process.
"""

from __future__ import annotations

import json
import re

LARGEST = 2**53
_EMBEDDED = re.compile(r"%json\s*")
_LARGE_LITERAL = re.compile(r"\d{16}|\d[eE]")
_DECODER = json.JSONDecoder()


def unkept_number(schema: object) -> str | None:
    """What is wrong with the first number beyond 2**53, after its place in the schema; None: all can be kept."""
    waiting: list[tuple[object, str]] = [(schema, "")]
    while waiting:
        value, place = waiting.pop()
        if isinstance(value, dict):
            waiting.extend((held, _below(place, name)) for name, held in reversed(value.items()))
        elif isinstance(value, list):
            waiting.extend((held, _below(place, str(i))) for i, held in reversed(list(enumerate(value))))
        elif isinstance(value, int | float) and not abs(value) <= LARGEST:
            return f"{place or 'it'}: a number beyond {LARGEST} or -{LARGEST} can't be kept exactly"
    return None


def unkept_in_lark(grammar: str) -> str | None:
    """The same of the schemas inside a grammar in Lark."""
    for start in _EMBEDDED.finditer(grammar):
        try:
            schema, _ = _DECODER.raw_decode(grammar, start.end())
        except (ValueError, RecursionError):
            # Of what can't be read here it isn't known where it ends.
            if _LARGE_LITERAL.search(grammar, start.end()):
                return f"a number beyond {LARGEST} or -{LARGEST} can't be kept exactly"
            continue
        if (reason := unkept_number(schema)) is not None:
            return reason
    return None


def _below(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
