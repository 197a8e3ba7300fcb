"""Where a JSON schema has other schemas in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
Step = str | int

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas; `items` in older drafts alone."""
SINGLE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
)
ANNOTATIONS = ("title", "description", "$comment", "default", "example", "examples", "deprecated")
"""Keywords that change nothing of what is allowed."""


def parts_of(schema: Schema, keyword: str) -> Iterator[tuple[Step, object]]:
    """What a keyword's value holds where schemas belong, whether it is one or not, by its place in the value."""
    value = schema[keyword]
    if keyword in NAMED and isinstance(value, dict):
        yield from value.items()
    elif keyword in LISTED and isinstance(value, list):
        yield from enumerate(value)


def held_by(schema: Schema) -> Iterator[tuple[tuple[str | int, ...], Schema]]:
    """The schemas right below, each with its place: the keyword that holds it comes first."""
    for keyword, value in schema.items():
        if keyword in SINGLE and isinstance(value, dict):
            yield (keyword,), value
        for step, part in parts_of(schema, keyword):
            if isinstance(part, dict):
                yield (keyword, step), part


def referred(document: Schema, schema: Schema) -> Schema | None:
    """What `$ref` names, if that is in the same document."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part: object = document
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
    return part if isinstance(part, dict) else None


def without_annotations(schema: Schema) -> Schema:
    """A copy without what a grammar has no use for."""
    return {keyword: _plain(keyword, value) for keyword, value in schema.items() if keyword not in ANNOTATIONS}


def _plain(keyword: str, value: object) -> object:
    def plain(part: object) -> object:
        return without_annotations(part) if isinstance(part, dict) else part

    if keyword in NAMED and isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if keyword in LISTED and isinstance(value, list):
        return [plain(part) for part in value]
    return plain(value) if keyword in SINGLE else value
