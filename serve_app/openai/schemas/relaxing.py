"""Which keywords of a schema the grammar library can't keep to.

It names no places, and one schema may have several faults. So a schema is built up keyword by keyword, those of parts
before those that close what holds them: the first one with which it is refused is at fault. That one is found by
halving; without it the rest is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from serve_app.openai.schemas.tree import LISTED, NAMED, SINGLE, Schema, Step, held_by, parts_of

Place = tuple[Step, ...]
Refusal = Callable[[Schema], str | None]
"""Why the library refuses a schema; None: it does not."""

LARGEST = 32 * 2**10  # bytes of a schema whose keywords are tried one by one
MOST_TRIALS = 256
_DEFINITIONS = ("$defs", "definitions")
_LAST = ("required", "additionalProperties", "unevaluatedProperties", "minItems", "maxItems")
_BOUNDS = (
    ("minimum", "maximum"),
    ("minimum", "exclusiveMaximum"),
    ("exclusiveMinimum", "maximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
)
_EVERYWHERE = ("pattern", "type", "format", "$ref")  # a value that is refused at one place is refused at all
_EXACTLY_ONE = "oneOf"  # is `anyOf` until its parts are whole, since parts that are alike are refused


def faults(schema: Schema, refusal: Refusal, most: int) -> Iterator[tuple[Place, str]]:
    """Places of keywords to leave out, in turn, and why: of `most` different ones at most. Without all of them nothing
    is refused, unless there would be more or the trials are used up."""
    order = {place: i for i, place in enumerate(_keywords(schema, ()))}
    left_out: set[Place] = set()
    num_faults = trials = 0

    def tried(count: int) -> str | None:
        nonlocal trials
        trials += 1
        return refusal(_restricted(schema, (), lambda place: order[place] < count and place not in left_out))

    places, low = list(order), 0
    while num_faults < most and trials < MOST_TRIALS and (reason := tried(len(places))) is not None:
        high = len(places)
        while high - low > 1:
            middle = (low + high) // 2
            if (refused := tried(middle)) is None:
                low = middle
            else:
                high, reason = middle, refused
        place = places[high - 1]
        alike = [place]
        if place[-1] in _EVERYWHERE:
            alike = [other for other in places if other[-1] == place[-1] and _at(schema, other) == _at(schema, place)]
        left_out.update(alike)
        num_faults += 1
        for other in alike:
            yield other, reason


def contradiction(schema: Schema) -> Place | None:
    """The first keyword of a part that no value fits. The library takes it where the part may be left out."""
    waiting: list[tuple[Place, Schema]] = [((), schema)]
    while waiting:
        place, one = waiting.pop()
        for least, most in _BOUNDS:
            low, high = one.get(least), one.get(most)
            if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
                return (*place, most)
        if one.get("enum") == []:
            return (*place, "enum")
        waiting += [((*place, *steps), held) for steps, held in held_by(one)]
    return None


def without(schema: Schema, places: set[Place]) -> Schema:
    return _restricted(schema, (), lambda place: place not in places)


def _at(schema: Schema, place: Place) -> object:
    value: Any = schema
    for step in place:
        value = value[step]
    return value


def _keywords(schema: Schema, place: Place) -> Iterator[Place]:
    """The places of all, each with what it needs before it. What a definition holds is read where it is referred to, so
    it comes after all that may do so."""
    definitions = [keyword for keyword in _DEFINITIONS if keyword in schema]
    yield from ((*place, keyword) for keyword in definitions)
    for keyword in sorted((name for name in schema if name not in definitions), key=_rank):
        here, value = (*place, keyword), schema[keyword]
        yield here
        if keyword in SINGLE and isinstance(value, dict):
            yield from _keywords(value, here)
        yield from _parts(schema, place, keyword)
        if keyword == _EXACTLY_ONE:
            yield _whole(here)
    for keyword in definitions:
        yield from _parts(schema, place, keyword)


def _parts(schema: Schema, place: Place, keyword: str) -> Iterator[Place]:
    for step, part in parts_of(schema, keyword):
        here = (*place, keyword, step)
        if isinstance(part, dict):
            yield from _keywords(part, here)
        elif not isinstance(part, bool):
            yield here


def _rank(keyword: str) -> int:
    return 0 if keyword == "type" else 2 if keyword in _LAST else 1


def _whole(place: Place) -> Place:
    return (*place, "")


def _restricted(schema: Schema, place: Place, keeps: Callable[[Place], bool]) -> Schema:
    restricted: Schema = {}
    for keyword, value in schema.items():
        here = (*place, keyword)
        if not keeps(here):
            continue
        if keyword in SINGLE and isinstance(value, dict):
            restricted[keyword] = _restricted(value, here, keeps)
        elif keyword in NAMED and isinstance(value, dict):
            restricted[keyword] = {name: _part(part, (*here, name), keeps) for name, part in value.items()}
        elif keyword in LISTED and isinstance(value, list):
            parts = [_part(part, (*here, i), keeps) for i, part in enumerate(value)]
            if keyword != _EXACTLY_ONE or keeps(_whole(here)):
                restricted[keyword] = parts
            elif "anyOf" not in schema:
                restricted["anyOf"] = parts
        else:
            restricted[keyword] = value
    return restricted


def _part(part: object, place: Place, keeps: Callable[[Place], bool]) -> object:
    if isinstance(part, dict):
        return _restricted(part, place, keeps)
    return part if isinstance(part, bool) or keeps(place) else True
