"""Answers that follow a grammar: what a request may say of it, and what the engine is told.

response_format is OpenAI's, structured_outputs vLLM's. Whether a grammar is one is checked before a turn is made
(`grammars`); what is wrong with it is said by the library that reads it.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from engine_actor.options import GrammarKind, GrammarSpec
from serve_app.ingress.errors import bad_value
from serve_app.openai.strict import Strict, Text, checked_text, refuse

Named = tuple[str, GrammarSpec]
"""A grammar after the field to blame for it."""

ANY_OBJECT = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def _schema(value: object) -> str:
    """A JSON schema as an object, or as the text of one. Its order of names is that of the answer's."""
    if isinstance(value, dict):
        return checked_text(json.dumps(value, ensure_ascii=False), "it")
    if not isinstance(value, str) or not value:
        refuse("must be a JSON schema, which is an object")
    return checked_text(value, "it")


FormatType = Literal["text", "json_object", "json_schema"]
Schema = Annotated[str, BeforeValidator(_schema), WithJsonSchema({"type": "object"})]


class NamedSchema(Strict):
    name: Text | None = Field(default=None, max_length=256)
    description: Text | None = None
    schema_text: Schema = Field(alias="schema")
    strict: bool | None = None


class FlatFormat(Strict):
    type: FormatType
    name: Text | None = Field(default=None, max_length=256)
    description: Text | None = None
    schema_text: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> FlatFormat:
        if self.type == "json_schema" and self.schema_text is None:
            refuse("schema is needed for this type")
        return self

    @property
    def named(self) -> Named | None:
        if self.type == "json_object":
            return "text.format", ANY_OBJECT
        if self.type == "text" or self.schema_text is None:
            return None
        return "text.format.schema", GrammarSpec(GrammarKind.JSON_SCHEMA, self.schema_text)

    def shown(self) -> dict[str, object]:
        if self.schema_text is None:
            return {"type": self.type}
        named = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": self.type, "schema": json.loads(self.schema_text)} | named


class WantedFormat(Strict):
    """`strict` changes nothing: a schema is always kept to."""

    type: FormatType
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> WantedFormat:
        if self.type == "json_schema" and self.json_schema is None:
            refuse("json_schema is needed for this type")
        return self

    @property
    def named(self) -> Named | None:
        if self.type == "json_object":
            return "response_format", ANY_OBJECT
        if self.type == "text" or self.json_schema is None:
            return None
        return "response_format.json_schema.schema", GrammarSpec(GrammarKind.JSON_SCHEMA, self.json_schema.schema_text)


class WantedText(Strict):
    """`text` of /v1/responses, whose format has name and schema beside its type."""

    format: FlatFormat | None = None
    verbosity: Text | None = None

    @property
    def named(self) -> Named | None:
        return None if self.format is None else self.format.named

    def shown(self) -> dict[str, object]:
        """As the response says it again."""
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {"format": {"type": "text"} if self.format is None else self.format.shown(), **verbosity}


class StructuredOutputs(Strict):
    """Exactly one of these."""

    json_text: Schema | None = Field(default=None, alias="json")
    regex: Text | None = Field(default=None, min_length=1)
    choice: list[Annotated[Text, Field(min_length=1)]] | None = Field(default=None, min_length=1, fail_fast=True)
    grammar: Text | None = Field(default=None, min_length=1)
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        kinds = (self.json_text, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(one is not None for one in kinds) != 1:
            refuse("must have exactly one of json, regex, choice, grammar and json_object")
        return self

    @property
    def named(self) -> Named:
        if self.json_text is not None:
            return "structured_outputs.json", GrammarSpec(GrammarKind.JSON_SCHEMA, self.json_text)
        if self.regex is not None:
            return "structured_outputs.regex", GrammarSpec(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            # JSON's strings are Lark's, but that Lark wants U+007F escaped.
            texts = " | ".join(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in self.choice)
            return "structured_outputs.choice", GrammarSpec(GrammarKind.LARK, f"start: {texts}")
        if self.grammar is not None:
            return "structured_outputs.grammar", GrammarSpec(GrammarKind.LARK, self.grammar)
        return "structured_outputs.json_object", ANY_OBJECT


def chosen_grammar(form: WantedFormat | None, outputs: StructuredOutputs | None) -> list[Named]:
    """The one that the two fields ask for, if they do."""
    formed = None if form is None else form.named
    if outputs is None:
        return [] if formed is None else [formed]
    if formed is not None:
        raise bad_value("structured_outputs", "can't stand beside response_format: both say what the answer is")
    return [outputs.named]
