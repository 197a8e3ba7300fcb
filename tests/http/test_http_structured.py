"""Answers that follow a grammar, over HTTP on the real model: each is what was asked for, whatever stands beside it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pydantic
import pytest
import pytest_asyncio

from engine_actor.sampling import grammar_cursor
from serve_app.text.prompts import PromptBuilder
from tests.http.http_harness import CHAT, COMPLETIONS, MODEL, RESPONSES, error_of, events, named_events, streamed_text
from tests.http.real_door import real_door

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = "Answer in JSON."
HOT = {"temperature": 1.5, "top_p": 1.0, "top_k": 0, "seed": 7}
ODD = 'say "hi" \\ to 😀 and <|im_end|>\n\u2028 e\u0301'

_LEAF: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}


def _record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


BOUNDED: dict[str, Any] = {
    "nested": _record(person=_record(name={"type": "string", "maxLength": 8}, age=_LEAF), ok={"type": "boolean"}),
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 9}, "minItems": 2, "maxItems": 4},
    "enum": {"enum": ["red", "gr\"een", 3, None, True, 1.5, {"a": [1]}]},
    "any of": {"anyOf": [{"type": "null"}, _record(a={"const": 1}), {"type": "array", "items": _LEAF, "maxItems": 3}]},
    "one of": {"oneOf": [_record(kind={"const": kind}, **{kind: _LEAF}) for kind in ("cat", "dog")],
               "discriminator": {"propertyName": "kind"}},
    "all of": {"allOf": [_record(a=_LEAF), {"properties": {"a": {"maximum": 3}}}]},
    "references": {"$defs": {"point": _record(x=_LEAF, y=_LEAF)},
                   **_record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"})},
    "recursion": {"$defs": {"node": _record(value=_LEAF, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
                  "$ref": "#/$defs/node"},
    "constant": {"const": ODD},
    "odd names": _record(**{ODD: _LEAF, "": _LEAF, "a.b": {"enum": [ODD]}}),
    "range": {"type": "integer", "minimum": 1990, "maximum": 2030},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}(ß|é)?$"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "tuple": {"type": "array", "prefixItems": [_LEAF, {"type": "boolean"}], "items": False, "minItems": 2},
    "types": {"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 1, "maxItems": 3},
    "formats": _record(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "optional": {"type": "object", "properties": {"a": _LEAF, "b": _LEAF, "c": _LEAF}, "required": ["b"],
                 "additionalProperties": False},
}  # fmt: skip
ENDLESS: dict[str, Any] = {
    "any object": {"type": "object"},
    "a text": {"type": "string"},
    "a number": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "more properties": {"type": "object", "additionalProperties": {"type": "integer"}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(smollm2_path: Path, prompts: PromptBuilder) -> AsyncIterator[httpx.AsyncClient]:
    async with real_door(smollm2_path, prompts) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    transport: Any = http  # a client of httpx works, though the types name those of httpx2 alone
    yield openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=transport)


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


async def chat(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0, "max_tokens": 120, **fields}
    response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response


async def text_of(http: httpx.AsyncClient, **fields: Any) -> str:
    """Of an answer that ends by itself."""
    [choice] = (await chat(http, **fields)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    content: str = choice["message"]["content"]
    return content


def assert_fits(text: str, schema: Any) -> Any:
    value = json.loads(text)
    jsonschema_rs.validator_for(schema, validate_formats=True).validate(value)
    return value


# -- what comes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, HOT], ids=["greedy", "hot"])
async def test_every_answer_fits_its_schema(http: httpx.AsyncClient, sampling: dict[str, Any]) -> None:
    """All at the same time, and as one line in the way of json.dumps, with names in the order of the schema."""
    wanted = list(BOUNDED.values())
    answers = await asyncio.gather(*(chat(http, response_format=form(s), **sampling) for s in wanted))
    for schema, answer in zip(wanted, answers, strict=True):
        [choice] = answer.json()["choices"]
        text = choice["message"]["content"]
        if schema is BOUNDED["recursion"] and choice["finish_reason"] == "length":
            continue  # nothing but the model ends it
        assert choice["finish_reason"] == "stop", text
        value = assert_fits(text, schema)
        if "\\" not in text:  # a letter may be escaped in several ways
            assert text == json.dumps(value, ensure_ascii=False)
    assert json.loads(answers[wanted.index(BOUNDED["constant"])].json()["choices"][0]["message"]["content"]) == ODD


@pytest.mark.parametrize("name", ENDLESS)
async def test_an_answer_without_end_is_cut_at_its_limit(http: httpx.AsyncClient, name: str) -> None:
    """And what there is of it is the beginning of one that fits."""
    cut, longer = await asyncio.gather(
        *(chat(http, response_format=form(ENDLESS[name]), max_tokens=limit, **HOT) for limit in (5, 60))
    )
    for answer, limit in ((cut, 5), (longer, 60)):
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            assert_fits(choice["message"]["content"], ENDLESS[name])
        else:
            assert (choice["finish_reason"], answer.json()["usage"]["completion_tokens"]) == ("length", limit)
    first, second = (answer.json()["choices"][0]["message"]["content"] for answer in (cut, longer))
    assert second.startswith(first)


async def test_objects_that_say_nothing_of_other_names_have_none(http: httpx.AsyncClient) -> None:
    """As instructor and plain pydantic send them."""
    schema = Thing.model_json_schema()
    assert "additionalProperties" not in json.dumps(schema)
    for form_of_it in ({"response_format": form(schema)}, {"structured_outputs": {"json": schema}}):
        for text in await asyncio.gather(*(text_of(http, **form_of_it, **s) for s in ({}, HOT))):
            assert_fits(text, schema)
            value = json.loads(text)
            assert set(value) == {"name", "parts", "pet"} and all(set(p) == {"colour", "count"} for p in value["parts"])


async def test_a_limit_cuts_what_would_have_fitted(http: httpx.AsyncClient) -> None:
    answer = (await chat(http, response_format=form(BOUNDED["nested"]), max_tokens=3)).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)
    assert (await text_of(http, response_format=form(BOUNDED["nested"]))).startswith(
        answer["choices"][0]["message"]["content"]
    )


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[a-f]{4}(é|😀){2}"}, "[a-f]{4}(é|😀){2}"),
        ({"choice": ["yes", "no", "yes and no"]}, "yes|no|yes and no"),
        ({"grammar": 'start: "<" WORD ("," WORD)~1..2 ">"\nWORD: /[a-z]{1,5}/'}, "<[a-z]{1,5}(,[a-z]{1,5}){1,2}>"),
        ({"json": json.dumps(BOUNDED["range"])}, "19[9][0-9]|20[0-3][0-9]"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
async def test_structured_outputs(http: httpx.AsyncClient, outputs: dict[str, Any], pattern: str) -> None:
    [choice] = (await chat(http, structured_outputs=outputs, max_tokens=40)).json()["choices"]
    if outputs != {"json_object": True} or choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"])


async def test_any_text_can_be_the_choice(http: httpx.AsyncClient) -> None:
    """Also what is a mark in the notation of grammars, or a control token of the model."""
    texts = [ODD, 'a"b', "a | b", "/x/", "%json {}", "\x00\x01\x7f", "<|im_start|>user", " \t\r\n", "\\n", "{{x}}"]
    said = await asyncio.gather(*(text_of(http, structured_outputs={"choice": [text]}) for text in texts))
    assert said == texts


# -- what stands beside it --------------------------------------------------------------------------------------------


async def test_a_stream_has_the_text_of_the_whole(http: httpx.AsyncClient) -> None:
    for name in ("nested", "constant", "odd names"):
        fields = {"response_format": form(BOUNDED[name]), **HOT}
        whole, stream = await asyncio.gather(text_of(http, **fields), chat(http, stream=True, **fields))
        assert streamed_text(stream) == whole
        assert events(stream)[-2]["choices"][0]["finish_reason"] == "stop"


async def test_every_choice_fits_and_the_first_is_the_one_alone(http: httpx.AsyncClient) -> None:
    fields = {"response_format": form(BOUNDED["nested"]), **HOT}
    several, alone = await asyncio.gather(chat(http, n=4, **fields), text_of(http, **fields))
    choices = several.json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3] and texts[0] == alone
    for text in texts:
        assert_fits(text, BOUNDED["nested"])
    assert len(set(texts)) > 1


async def test_logprobs_are_the_models_own(http: httpx.AsyncClient) -> None:
    """Of tokens that the grammar chose against it, too; the likeliest may be what was not allowed."""
    outputs = {"regex": "qq[0-9]{3}zz"}
    answer = (await chat(http, structured_outputs=outputs, logprobs=True, top_logprobs=3)).json()["choices"][0]
    entries = answer["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert spelled == answer["message"]["content"]
    assert entries[0]["logprob"] < entries[0]["top_logprobs"][0]["logprob"] < 0
    plain = (await chat(http, logprobs=True, top_logprobs=3, max_tokens=1)).json()["choices"][0]
    assert entries[0]["top_logprobs"] == plain["logprobs"]["content"][0]["top_logprobs"]


async def test_a_stop_string_ends_an_answer_that_the_grammar_would_not(http: httpx.AsyncClient) -> None:
    outputs = {"regex": "[a-z]{3}STOP[a-z]{300}"}
    answer = (await chat(http, structured_outputs=outputs, stop=["OP"])).json()["choices"][0]
    assert answer["finish_reason"] == "stop" and re.fullmatch("[a-z]{3}ST", answer["message"]["content"])


async def test_penalties_and_biases_choose_among_what_is_allowed(
    http: httpx.AsyncClient, prompts: PromptBuilder
) -> None:
    tokenizer = prompts.tokenizer
    yes, no = (tokenizer.encode(word, special_tokens=False)[0] for word in ("yes", "no"))
    for liked, other in ((yes, no), (no, yes)):
        bias = {str(liked): 50, str(other): -50, str(tokenizer.encode("!", special_tokens=False)[0]): 100}
        said = await text_of(
            http, structured_outputs={"choice": ["yes", "no"]}, logit_bias=bias, repetition_penalty=1.3
        )
        assert said == ("yes" if liked == yes else "no")


async def test_a_sessions_turns_with_and_without_a_grammar(http: httpx.AsyncClient) -> None:
    """Each computes only what is new, and says what a new session would. A session keeps the generated tokens,
    which can be others than those of their text; so here the answers are digits, which are a token each."""
    messages: list[dict[str, str]] = []
    known = 0
    number = form({"type": "integer", "minimum": 10_000, "maximum": 99_999})
    turns: list[dict[str, Any]] = [
        {"response_format": number}, {"structured_outputs": {"regex": "[0-9]{7}"}}, {"max_tokens": 1},
        {"response_format": number, **HOT}, {"response_format": {"type": "text"}, "max_tokens": 20},
    ]  # fmt: skip
    for turn, fields in enumerate(turns):
        messages.append({"role": "user", "content": f"Part {turn}. {ASKED}"})
        answer = (await chat(http, session_id="talk", messages=messages, **fields)).json()
        fresh = (await chat(http, cache_salt=f"apart {turn}", messages=messages, **fields)).json()
        assert answer["choices"] == fresh["choices"]
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= known - 1
        known = usage["total_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


async def test_completions_of_several_prompts(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["One: ", "Two: ", "Three: "], "n": 2, "max_tokens": 40, "seed": 3, "temperature": 1}
    response = await http.post(COMPLETIONS, json=body | {"response_format": form(BOUNDED["array"])})
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert_fits(choice["text"], BOUNDED["array"])


async def test_what_only_an_engine_finds_out_is_a_400_too(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": ASKED}], "response_format": form({"$ref": "#"})}
    for stream in (False, True):
        response = await http.post(CHAT, json=body | {"stream": stream})
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_grammar")
        assert "no text matches it" in error_of(response)["message"]


async def test_a_grammar_that_costs_too_much_ends_its_answer_alone(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cursor, "SECONDS_A_TURN", 0.02)
    costly = {"structured_outputs": {"grammar": 'start: s\ns: s s | s s s | "a"'}, "logit_bias": {"2": -100}}
    body = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0, "max_tokens": 400}
    bad, good, plain = await asyncio.gather(
        http.post(CHAT, json=body | costly),
        text_of(http, response_format=form(BOUNDED["nested"])),
        chat(http, max_tokens=40),
    )
    assert_fits(good, BOUNDED["nested"])
    assert plain.json()["usage"]["completion_tokens"] > 0
    assert (bad.status_code, error_of(bad)["code"]) == (400, "invalid_grammar")
    assert "the answer's grammar failed: it took" in error_of(bad)["message"]


# -- /v1/responses ----------------------------------------------------------------------------------------------------


async def test_responses_follow_and_echo_their_format(http: httpx.AsyncClient) -> None:
    wanted = {
        "type": "json_schema",
        "name": "answer",
        "description": "It.",
        "schema": BOUNDED["nested"],
        "strict": True,
    }
    body = {"input": ASKED, "max_output_tokens": 60, "temperature": 0, "text": {"format": wanted}}
    whole = (await http.post(RESPONSES, json=body)).json()
    assert whole["status"] == "completed" and whole["text"] == {"format": wanted}
    text = whole["output"][0]["content"][0]["text"]
    assert_fits(text, BOUNDED["nested"])
    streamed = named_events(await http.post(RESPONSES, json=body | {"stream": True}))
    assert all(event["response"]["text"] == {"format": wanted} for event in streamed if "response" in event)
    assert "".join(e["delta"] for e in streamed if e["type"] == "response.output_text.delta") == text
    assert streamed[-1]["response"]["output"][0]["content"][0]["text"] == text
    kept = (await http.get(f"{RESPONSES}/{whole['id']}")).json()
    assert kept["text"] == {"format": wanted}


async def test_a_chain_of_responses_with_and_without_a_format(http: httpx.AsyncClient) -> None:
    previous, known = None, 0
    for form_of_it in (
        {"type": "json_schema", "name": "n", "schema": BOUNDED["array"]},
        {"type": "text"},
        {"type": "json_object"},
    ):
        body = {"input": ASKED, "max_output_tokens": 30, "temperature": 0, "previous_response_id": previous}
        answer = (await http.post(RESPONSES, json=body | {"text": {"format": form_of_it}})).json()
        assert answer["text"]["format"]["type"] == form_of_it["type"]
        text = answer["output"][0]["content"][0]["text"]
        if answer["status"] == "completed" and form_of_it["type"] != "text":
            json.loads(text)
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= known - 1
        previous, known = answer["id"], answer["usage"]["total_tokens"]


# -- the openai client's own helpers ----------------------------------------------------------------------------------


class Colour(StrEnum):
    RED, GREEN = "red", "green"


class Part(pydantic.BaseModel):
    colour: Colour
    count: int = pydantic.Field(ge=0, le=99)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Literal[7, 9]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    loud: bool


class Thing(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    parts: list[Part] = pydantic.Field(max_length=2)
    pet: Cat | Dog | None


async def test_the_clients_parse_helpers(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": ASKED}]
    options: Any = {"model": MODEL, "temperature": 0}
    whole = await client.chat.completions.parse(messages=messages, response_format=Thing, max_tokens=150, **options)
    thing = whole.choices[0].message.parsed
    assert isinstance(thing, Thing)
    async with client.chat.completions.stream(
        messages=messages, response_format=Thing, max_tokens=150, **options
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == thing
    response = await client.responses.parse(input=ASKED, text_format=Thing, max_output_tokens=150, **options)
    assert isinstance(response.output_parsed, Thing)
    async with client.responses.stream(
        input=ASKED, text_format=Thing, max_output_tokens=150, **options
    ) as response_stream:
        assert (await response_stream.get_final_response()).output_parsed == response.output_parsed
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(messages=messages, response_format=Thing, max_tokens=2, **options)
