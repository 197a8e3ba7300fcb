"""A schema as the engine keeps to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from engine_actor.errors import UnusableGrammar
from engine_actor.options import GrammarKind, GrammarSpec
from engine_actor.sampling.grammars import JSON_STYLE, check_grammar
from serve_app.openai.schemas.closing import close
from serve_app.openai.schemas.relaxing import LARGEST, Place, contradiction, faults, without
from serve_app.openai.schemas.tree import Schema, without_annotations

MOST_LEFT_OUT = 24  # keywords of one schema
_KEPT = 512  # more than one request may have
_ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class KeptSchema:
    """`text`: a JSON schema that the library takes, with the style of our answers. `left_out`: places in what was asked
    for that it does not keep to; "" is all of it."""

    text: str
    left_out: tuple[str, ...] = ()


@lru_cache(maxsize=_KEPT)
def kept_schema(text: str, *, lenient: bool, closes: bool) -> KeptSchema:
    """`lenient`: what can't be kept to is left out. `closes`: objects that list their properties have no others, see
    `close`. Raises UnusableGrammar with the place and the reason where a schema can't be kept to and is not lenient."""
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise UnusableGrammar(GrammarKind.JSON_SCHEMA, f"it is no JSON: {error}") from None
    except RecursionError:
        raise UnusableGrammar(GrammarKind.JSON_SCHEMA, "it is nested too deeply") from None
    if isinstance(parsed, dict):
        return _kept(without_annotations(parsed), lenient, closes)
    check_grammar(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
    return KeptSchema(text)


def _kept(schema: Schema, lenient: bool, closes: bool) -> KeptSchema:
    def refusal(tried: Schema) -> str | None:
        if lenient and (place := contradiction(tried)) is not None:
            return f"{_shown(place)}: no value fits it"
        try:
            check_grammar.__wrapped__(GrammarSpec(GrammarKind.JSON_SCHEMA, _styled(tried, lenient)))
        except UnusableGrammar as error:
            return error.reason
        return None

    left_out: tuple[str, ...] = ()
    if (reason := refusal(schema)) is not None:
        small = len(_styled(schema, lenient)) <= LARGEST
        places = dict(faults(schema, refusal, MOST_LEFT_OUT if lenient else 1)) if small else {}
        if not lenient:
            raise UnusableGrammar(GrammarKind.JSON_SCHEMA, _placed(places, reason))
        rest = without(schema, set(places))
        whole = bool(places) and refusal(rest) is None
        schema, left_out = (rest, tuple(map(_shown, places))) if whole else (_ANY_OBJECT, ("",))
    if closes:
        closed: Schema = json.loads(json.dumps(schema))
        close(closed)
        if refusal(closed) is None:
            schema = closed
    return KeptSchema(_styled(schema, lenient), left_out)


def _styled(schema: Schema, lenient: bool) -> str:
    return json.dumps(schema | {"x-guidance": JSON_STYLE | {"lenient": lenient}}, ensure_ascii=False)


def _placed(places: dict[Place, str], reason: str) -> str:
    for place, why in places.items():
        shown = _shown(place)
        return why if why.startswith(shown) else f"{shown}: {why}"
    return reason


def _shown(place: Place) -> str:
    return ".".join(str(step) for step in place if step != "")
