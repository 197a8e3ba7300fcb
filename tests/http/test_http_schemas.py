"""Schemas as people write them: what of a tool's can't be kept to is left out, and objects have no names of their own
invention."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_actor.options import GrammarKind, GrammarSpec
from engine_actor.sampling.grammars import Grammars
from serve_app.openai.schemas.kept import kept_schema
from tests.http.http_harness import Server, error_of


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def text(**words: Any) -> dict[str, Any]:
    return {"type": "string", **words}


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DATETIME = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))$"
)
NODE = {"$defs": {"Node": record(name=text(), next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})}}

TOOLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "zod's email": (record(to=text(format="email", pattern=ZOD_EMAIL), body=text()), ["properties.to.pattern"]),
    "zod's date": (record(day=text(format="date", pattern=ZOD_DATETIME)), []),
    "zod's whole number": (record(n={"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}), []),
    "several look-arounds": (
        record(a=text(pattern="^(?=.*[0-9]).{8,}$"), b=text(pattern="(?<!x)y"), c=text(pattern="^a$")),
        ["properties.a.pattern", "properties.b.pattern"],
    ),
    "the same pattern twice": (
        record(a=text(pattern="^(?!x)"), b={"type": "array", "items": text(pattern="^(?!x)")}),
        ["properties.a.pattern", "properties.b.items.pattern"],
    ),
    "a back-reference": (record(a=text(pattern=r"^(['\"]).*\1$")), ["properties.a.pattern"]),
    "a word's border": (record(a=text(pattern=r"\bcat\b")), ["properties.a.pattern"]),
    "any letter of JavaScript": (record(a=text(pattern="^[^]+$")), ["properties.a.pattern"]),
    "no types of JSON Schema": (
        record(a={"type": "date"}, b={"type": "float"}), ["properties.a.type", "properties.b.type"],
    ),
    "a format of one's own": (record(a=text(format="phone-number")), []),
    "another document": (record(a={"$ref": "https://example.com/address.json"}), ["properties.a.$ref"]),
    "a definition that is not there": (record(a={"$ref": "#/$defs/Missing"}), ["properties.a.$ref"]),
    "no number is between": (record(n={"type": "integer", "minimum": 9, "maximum": 1}), ["properties.n.maximum"]),
    "no text is so long": (record(a=text(minLength=9, maxLength=1)), ["properties.a.maxLength"]),
    "nothing to choose from": (record(a={"type": "string", "enum": []}), ["properties.a.enum"]),
    "no properties": ({"type": "object", "properties": None}, ["properties"]),
    "a property that is no schema": (record(a="string", b=text()), ["properties.a"]),
    "required as a flag": ({**record(a=text()), "required": True}, ["required"]),
    "64 bits without a sign": (
        record(id={"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1}),
        ["properties.id.maximum"],
    ),
    "a default of 64 bits": (record(id={"type": "integer", "default": 2**63 - 1}), []),
    "pydantic's optional": (record(a={"anyOf": [text(), {"type": "null"}], "default": None, "title": "A"}), []),
    "pydantic's decimal": (
        record(a={"anyOf": [{"type": "number"}, text(pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$")]}),
        ["properties.a.anyOf.1.pattern"],
    ),
    "pydantic's discriminator": (
        record(pet={"oneOf": [record(kind={"const": "cat"}), record(kind={"const": "dog"})],
                    "discriminator": {"propertyName": "kind"}}), [],
    ),
    "conditions": ({**record(a=text()), "if": record(a={"const": "x"}), "then": {"required": ["b"]}, "not": {}}, []),
    "a recursion": ({**NODE, "$ref": "#/$defs/Node"}, []),
    "in a definition": (
        {"$defs": {"Mail": record(to=text(pattern=ZOD_EMAIL))}, **record(mail={"$ref": "#/$defs/Mail"})},
        ["$defs.Mail.properties.to.pattern"],
    ),
    "names by a pattern": ({**record(a=text()), "patternProperties": {"^x-(?!y)": text()}}, ["patternProperties"]),
    "OpenAPI's nullable": (record(a=text(nullable=True, example="x")), []),
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars(prompts: Any) -> Grammars:
    tokenizer = prompts.tokenizer
    return Grammars(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.eos_token_ids)


def tool(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_is_served_whatever_its_schema_says(
    server: Server, grammars: Grammars, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """As far as it can be kept to. What is left out stands in the log by its place."""
    schema, left_out = TOOLS[name]
    other = {"type": "function", "function": {"name": "g"}}
    response = server.chat(tools=[other, tool(schema)])
    assert response.status_code == 200, response.text
    spec = server.engine.requests[-1].grammar
    assert spec is not None
    grammars.compile(spec)
    if left_out:
        [line] = [record.getMessage() for record in caplog.records if record.name == "moorage.ingress"]
        places = [f"tools.1.function.parameters.{place}" for place in left_out]
        assert line == f"tools say what no grammar can keep to, left out: {', '.join(places)}"
    else:
        assert "left out" not in caplog.text


@pytest.mark.parametrize("name", [name for name, (_, left_out) in TOOLS.items() if left_out])
def test_what_a_strict_schema_or_a_form_cannot_be_kept_to_is_refused_with_its_place(server: Server, name: str) -> None:
    schema, left_out = TOOLS[name]
    if name in ("no number is between", "no text is so long", "nothing to choose from"):
        schema = {**schema, "required": list(schema["properties"])}  # what may be left out fits
        left_out = ["required"]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for fields in ({"tools": [tool(schema, strict=True)]}, {"response_format": form}):
        error = error_of(server.chat(**fields))
        assert error["code"] == "invalid_grammar"
        assert left_out[0] in error["message"], error["message"]


def test_a_bad_schema_is_no_fault_where_no_tool_may_be_called(server: Server) -> None:
    assert server.chat(tools=[tool(record(a={"type": "date"}), strict=True)], tool_choice="none").status_code == 200


def test_a_schema_with_too_many_faults_is_any_object(caplog: pytest.LogCaptureFixture) -> None:
    faults = record(**{f"p{i}": text(pattern=f"(?=x{i})") for i in range(40)})
    kept = kept_schema(json.dumps(faults), lenient=True, closes=True)
    assert kept.left_out == ("",) and json.loads(kept.text)["type"] == "object"


# -- objects that list their properties -------------------------------------------------------------------------------

A, B, AB = '{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'
CLOSED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "alone": (record(a={}), ["{}", A], [B, AB, '{"a": 1, "a": 2}']),
    "itself open": ({**record(a={}), "additionalProperties": True}, [A, AB], []),
    "open to some": ({**record(a={}), "additionalProperties": {"type": "null"}}, ['{"a": 1, "b": null}'], [AB]),
    "inside": (record(x=record(a={})), ['{"x": {"a": 1}}'], ['{"x": {"b": 1}}']),
    "in a list": (record(x={"type": "array", "items": record(a={})}), ['{"x": [{"a": 1}]}'], ['{"x": [{"b": 1}]}']),
    "both of two": ({"allOf": [record(a={}), record(b={})]}, ["{}", A, B, AB], ['{"c": 1}', '{"a": 1, "c": 1}']),
    "one of two": ({"anyOf": [record(a={}), record(b={})]}, [A, B], [AB, '{"c": 1}']),
    "one of two beside another": (
        {**record(c={}), "anyOf": [record(a={}), record(b={})]}, ['{"c": 1, "a": 1}', '{"c": 1, "b": 1}'], ['{"d": 1}'],
    ),
    "a definition alone": ({"$defs": {"D": record(a={})}, "$ref": "#/$defs/D"}, [A], [B, AB]),
    "a definition extended": (
        {"$defs": {"D": record(a={})}, "allOf": [{"$ref": "#/$defs/D"}, record(b={})]}, [A, AB], ['{"c": 1}'],
    ),
    "older pydantic's reference": (
        {"definitions": {"D": record(a={})}, **record(x={"allOf": [{"$ref": "#/definitions/D"}]})},
        ['{"x": {"a": 1}}'], ['{"x": {"b": 1}}', B],
    ),
    "needed and not listed": ({**record(a={}), "required": ["b"]}, [B, AB], ["{}", A, '{"b": 1, "c": 1}']),
    "either needed": ({**record(a={}, b={}), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [A, B, AB], ["{}"]),
    "names by a pattern": ({**record(a={}), "patternProperties": {"^b": {}}}, [A, AB], ['{"c": 1}']),
    "two of one name": (
        {"allOf": [record(x=record(a={})), record(x=record(b={}))]}, ['{"x": {"a": 1, "b": 1}}'], ['{"y": 1}'],
    ),
    "no properties listed": ({"type": "object"}, ["{}", A, AB], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_an_object_has_the_names_that_it_lists(prompts: Any, grammars: Grammars, name: str) -> None:
    schema, fitting, others = CLOSED[name]
    kept = kept_schema(json.dumps(schema), lenient=False, closes=True).text
    grammar = grammars.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, kept))

    def fits(answer: str) -> bool:
        matcher, ids = grammar.matcher.deep_copy(), prompts.tokenizer.encode(answer, special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    assert [answer for answer in fitting if not fits(answer)] == []
    assert [answer for answer in others if fits(answer)] == []


def test_a_setting_leaves_objects_open() -> None:
    kept = kept_schema(json.dumps(record(a={})), lenient=False, closes=False)
    assert "additionalProperties" not in json.loads(kept.text)
