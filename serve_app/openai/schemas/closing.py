"""Objects that list their properties and say nothing of others have no others.

In JSON Schema they may have any. A small model then goes on with names of its own until a limit cuts it, and a tool is
called with arguments that it does not have. So `additionalProperties: false` is added. Schemas that hold for the same
object, through allOf, anyOf, oneOf or $ref, would forbid each other's names: what closes such an object has the names
of all. Where one of them says itself what else there may be, all are left as they are. So is a definition that is part
of such a group somewhere, also where it stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from serve_app.openai.schemas.tree import Schema, held_by, referred

_TOGETHER = ("allOf",)
_CHOICES = ("anyOf", "oneOf", "then", "else", "dependentSchemas")
_SAYING = ("additionalProperties", "unevaluatedProperties")
_NEGATIVE = ("not", "if")

Names = dict[str, None]
"""In order."""


def close(document: Schema) -> None:
    """Closes the objects of a schema, in place."""
    closing = _Closing(document)
    wholes = list(closing.wholes())
    for whole in wholes:
        closing.spare_parts(whole)
    for whole in wholes:
        closing.close(whole, {})


class _Closing:
    """A *whole* is a schema that stands for a value by itself, where others are only parts of what holds for it."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._spared: set[int] = set()  # parts that may not be closed by themselves

    def wholes(self) -> Iterator[Schema]:
        waiting, visited = [(self._document, True)], {id(self._document)}
        while waiting:
            schema, whole = waiting.pop()
            if whole:
                yield schema
            below = [
                (held, place[0] not in (*_TOGETHER, *_CHOICES))
                for place, held in held_by(schema)
                if place[0] not in _NEGATIVE
            ]
            if (target := referred(self._document, schema)) is not None:
                below.append((target, True))
            for held, is_whole in below:
                if id(held) not in visited:
                    visited.add(id(held))
                    waiting.append((held, is_whole))

    def spare_parts(self, schema: Schema) -> None:
        """Notes what can't be closed by itself since it stands beside others."""
        together, choices = self._together(schema), self._choices(schema)
        if not _lists(schema) and len(together) + bool(choices) <= 1:
            for part in (*together, *choices):
                if part is not self._target(schema):
                    self.spare_parts(part)
            return
        listed: dict[str, Schema] = {}
        for part in self._members(schema):
            if part is not schema and not self._is_choice_of(part, choices):
                self._spared.add(id(part))
            for name, held in _properties(part).items():
                # Two schemas of one property stand together, too.
                if isinstance(held, dict) and listed.setdefault(name, held) is not held:
                    self._spare_all(held)
                    self._spare_all(listed[name])

    def close(self, schema: Schema, beside: Names) -> None:
        """`beside`: names that are listed by what holds for the same object."""
        if id(schema) in self._spared:
            return
        together, choices = self._together(schema), self._choices(schema)
        if not _lists(schema) and not beside and len(together) + bool(choices) <= 1:
            for part in (*together, *choices):
                if part is not self._target(schema):
                    self.close(part, {})
            return
        members = list(self._members(schema))
        if any(word in part for part in members for word in _SAYING):
            return
        if len(members) > 1 and any("patternProperties" in part for part in members):
            return
        if not any(_properties(part) or "properties" in part for part in members):
            return
        own = _listed(schema) | beside
        for part in together:
            own |= self._names(part)
        every = dict(own)
        for part in choices:
            every |= self._names(part)
        for part in choices:
            if "$ref" not in part and _lists(part):
                self.close(part, own)
        self._shut(schema, every)

    def _shut(self, schema: Schema, names: Names) -> None:
        properties = schema.setdefault("properties", {})
        if isinstance(properties, dict):
            for name in names:
                properties.setdefault(name, {})
            schema["additionalProperties"] = False

    def _spare_all(self, schema: Schema) -> None:
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if id(one) not in self._spared:
                self._spared.add(id(one))
                waiting += [held for _, held in held_by(one)]
                if (target := self._target(one)) is not None:
                    waiting.append(target)

    def _target(self, schema: Schema) -> Schema | None:
        return referred(self._document, schema)

    def _together(self, schema: Schema) -> list[Schema]:
        target = self._target(schema)
        return [held for place, held in held_by(schema) if place[0] in _TOGETHER] + ([] if target is None else [target])

    def _choices(self, schema: Schema) -> list[Schema]:
        return [held for place, held in held_by(schema) if place[0] in _CHOICES]

    def _is_choice_of(self, part: Schema, choices: list[Schema]) -> bool:
        return any(part is choice for choice in choices)

    def _members(self, schema: Schema) -> Iterator[Schema]:
        """It and all that holds, or may hold, for the same value."""
        waiting, visited = [schema], {id(schema)}
        while waiting:
            one = waiting.pop()
            yield one
            for part in (*self._together(one), *self._choices(one)):
                if id(part) not in visited:
                    visited.add(id(part))
                    waiting.append(part)

    def _names(self, schema: Schema) -> Names:
        return {name: None for part in self._members(schema) for name in _listed(part)}


def _properties(schema: Schema) -> dict[str, object]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _lists(schema: Schema) -> bool:
    return "properties" in schema or "required" in schema


def _listed(schema: Schema) -> Names:
    """What must be there counts as listed."""
    required = schema.get("required")
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return dict.fromkeys((*_properties(schema), *needed))
