"""Tools in prompts: for a template that knows them, and for one that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.text.calls import written_call
from serve_app.text.chat_template import ChatTemplate, Message, WrittenArguments
from serve_app.text.errors import ChatTemplateError
from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_prompts import spelled_out
from tests.support.tokenizers import with_template

WEATHER: dict[str, Any] = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
ASKED = Message(role="user", content="Rain in Paris?")


def called(content: str = "", **calls: Any) -> Message:
    tool_calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls.items()
    ]
    return Message(role="assistant", content=content, tool_calls=tool_calls)  # type: ignore[typeddict-item]


def result(content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id="weather")


def test_tools_stand_in_the_system_message_once() -> None:
    system = Message(role="system", content="Be brief.")
    for messages, begin in (([ASKED], ""), ([system, ASKED], "Be brief.\n\n")):
        plain = spelled_out(messages, TOOLS)
        assert [message["role"] for message in plain] == ["system", "user"]
        assert plain[0]["content"].startswith(begin)
        for tool in TOOLS:
            assert plain[0]["content"].count(json.dumps(tool["function"])) == 1
        assert plain[1] == ASKED


def test_calls_are_text_and_results_are_messages_of_the_user() -> None:
    conversation = [
        ASKED,
        called(weather={"city": "Paris"}, now={}),
        result("21 C"),
        result("noon"),
        called("I look again.", now={}),
        result("later"),
        Message(role="user", content="And?"),
    ]
    plain = spelled_out(conversation, ())
    both = f"{written_call('weather', {'city': 'Paris'})}\n{written_call('now', {})}"
    assert [(message["role"], message["content"]) for message in plain] == [
        ("user", "Rain in Paris?"),
        ("assistant", both),
        ("user", "<tool_response>\n21 C\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"),
        ("assistant", f"I look again.\n{written_call('now', {})}"),
        ("user", "<tool_response>\nlater\n</tool_response>\nAnd?"),
    ]


@pytest.mark.parametrize("results", [1, 2])
@pytest.mark.parametrize("after", [called("Noon."), Message(role="user", content="And?")])
def test_user_and_assistant_take_turns(results: int, after: Message) -> None:
    """As templates like Gemma's demand it. What tools gave and what the user says then are of one side."""
    plain = spelled_out([ASKED, called(now={}), *[result("noon")] * results, after], ())
    assert [message["role"] for message in plain] == ["user", "assistant", "user", "assistant"][: len(plain)]
    assert plain[2]["content"].count("noon") == results
    assert plain[-1]["content"].endswith(after["content"])


def test_a_conversation_without_tools_is_as_it_was() -> None:
    conversation = [Message(role="system", content="S"), ASKED, Message(role="assistant", content="No.")]
    assert spelled_out(conversation, ()) == conversation


KNOWING = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}|{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}={{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}|assistant:"
)


def test_a_template_that_knows_tools_is_given_them() -> None:
    template = ChatTemplate(KNOWING, {})
    assert template.knows_tools
    text = template.render([ASKED, called(now={"a": [1, "é"]}), result("noon")], TOOLS)
    assert text == (
        f"[{json.dumps(TOOLS[0])}{json.dumps(TOOLS[1])}]|user:Rain in Paris?|assistant:"
        '<tool_call>now={"a": [1, "é"]}</tool_call>|tool:noon|assistant:'
    )


@pytest.mark.parametrize(
    "source", ["{{ messages }}", "{% if tools %}{{ tools }}{% endif %}{{ messages }}", "<tool_call>{{ messages }}"]
)
def test_a_template_that_writes_calls_otherwise_or_not_at_all_knows_none(source: str) -> None:
    assert not ChatTemplate(source, {}).knows_tools


def test_answers_are_found_in_a_conversation_with_calls(smollm2: Tokenizer) -> None:
    """Their spans are whole messages, calls included, so the tokens that were generated stand in for them."""
    prompts = PromptBuilder(smollm2)
    answer = written_call("weather", {"city": "Paris"})
    conversation = [ASKED, called(weather={"city": "Paris"}), result("21 C")]
    prompt = prompts.chat(conversation, TOOLS)
    (span,) = prompt.spans
    assert smollm2.decode(prompt.ids[span.start : span.end]) == answer


def test_a_model_without_a_template_says_so(smollm2: Tokenizer) -> None:
    without = PromptBuilder(with_template(smollm2, None))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        without.chat([ASKED], TOOLS)


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)


def test_a_template_without_a_system_role_gets_the_tools_in_the_first_message_of_the_user(smollm2: Tokenizer) -> None:
    prompts = PromptBuilder(with_template(smollm2, NO_SYSTEM))
    text = smollm2.decode(prompts.chat([ASKED], TOOLS).ids, control_tokens=True)
    assert text.startswith("<start_of_turn>user\nYou can call functions") and "Rain in Paris?<end_of_turn>" in text
    assert "system" not in text
    with pytest.raises(ChatTemplateError, match="no system role"):  # the client's own is still the template's to refuse
        prompts.chat([Message(role="system", content="Be brief."), ASKED], TOOLS)


def test_the_example_of_a_call_is_made_of_the_first_tool() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": ["integer", "null"]},
            "unit": {"enum": ["C", "F"]},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}}},
            "note": {"type": "string"},
        },
        "required": ["city", "days", "unit", "place"],
    }
    tool = {"type": "function", "function": {"name": "forecast", "parameters": schema}}
    (system, _) = spelled_out([ASKED], [tool, *TOOLS])
    wanted = {"city": "...", "days": 1, "unit": "C", "place": {"lat": 1.5}}
    assert system["content"].endswith(written_call("forecast", wanted)) and "argument's name" not in system["content"]
    assert written_call("now", {}) in spelled_out([ASKED], TOOLS[1:])[0]["content"]


@pytest.mark.parametrize(
    "parameters", [None, {}, {"properties": None}, {"type": "object", "required": 5}, {"properties": {"a": True}}]
)
def test_any_schema_gives_an_example(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "{tools}", "parameters": parameters}}
    content = spelled_out([ASKED], [tool])[0]["content"]
    assert 'A call of {tools} looks like this:\n<tool_call>\n{"name": "{tools}"' in content


CUT = '{"city": "Par'
CALLS = "{% for m in messages %}{% for c in m.tool_calls %}"
TEMPLATES = {
    "as JSON": CALLS + "[{{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}",
    "one by one": (
        CALLS + "{% for k, v in c.function.arguments.items() %}[{{ v }}]{% endfor %}{% endfor %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_arguments_that_are_no_object_stand_in_the_prompt_as_they_are(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render([ASKED, called(weather=WrittenArguments(CUT))]) == f"[{CUT}]"
    assert spelled_out([ASKED, called(weather=WrittenArguments(CUT))], ())[1]["content"] == written_call("weather", CUT)
