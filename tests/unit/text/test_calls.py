"""Calls of tools in a text: told from it whole, and in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.text.calls import OPENING, CallDelta, Calls, CallSplitter, joined_calls, written_call

NOW = written_call("now", {})
PARIS = written_call("weather", {"city": "Paris", "days": [1, 2]})


def split(*pieces: str, calls: Calls = Calls.AFTER_TEXT) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call."""
    splitter = CallSplitter(calls)
    told = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    found = joined_calls([delta for _, deltas in told for delta in deltas])
    assert [call.index for call in found] == list(range(splitter.calls))
    assert len({call.id for call in found}) == len(found) and all(call.id.startswith("call_") for call in found)
    return "".join(text for text, _ in told), [(call.name, call.arguments) for call in found]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("Hello.", "Hello.", []),
        ("", "", []),
        ("a < b, a <tool b", "a < b, a <tool b", []),
        ("ends with space \n", "ends with space \n", []),
        (NOW, "", [("now", "{}")]),
        (f"Let me see.\n{NOW}", "Let me see.", [("now", "{}")]),
        (f"{NOW}\n{PARIS}\n", "", [("now", "{}"), ("weather", '{"city": "Paris", "days": [1, 2]}')]),
        (written_call('odd "name"', {"a": "}\\n</tool_call>"}), "", [('odd "name"', '{"a": "}\\\\n</tool_call>"}')]),
    ],
)
def test_text_and_calls_are_told_apart(text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert split(text) == split(*text) == (shown, calls)


@pytest.mark.parametrize(
    ("cut", "shown", "calls"),
    [
        ("Well <tool_", "Well <tool_", []),
        (OPENING, OPENING, []),
        (f"Well \n{OPENING}\n", f"Well \n{OPENING}\n", []),
        ('<tool_call>\n{"name": "no', '<tool_call>\n{"name": "no', []),
        ('<tool_call>\n{"name": "now", "arguments": ', "", [("now", "")]),
        ('<tool_call>\n{"name": "now", "arguments": {"a": 1}', "", [("now", '{"a": 1}')]),
        ('<tool_call>\n{"name": "now", "arguments": {"a": {"b": 1}', "", [("now", '{"a": {"b": 1}')]),
        ('<tool_call>\n{"name": "now", "arguments": {"a": {"b": 1}}', "", [("now", '{"a": {"b": 1}}')]),
        (f"{NOW}\n<tool_c", "", [("now", "{}")]),
    ],
)
def test_an_answer_that_a_limit_cuts_keeps_what_there_is(cut: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert split(cut) == split(*cut) == (shown, calls)


@given(st.dictionaries(st.text(max_size=3), st.recursive(st.none(), lambda v: st.dictionaries(st.text(max_size=2), v))))
def test_wherever_a_call_is_cut_it_is_whole_if_its_arguments_are(arguments: dict[str, object]) -> None:
    text = written_call("now", arguments)
    wanted = json.dumps(arguments, ensure_ascii=False)
    begin = text.index('"arguments": ') + len('"arguments": ')
    for end in range(begin, len(text) + 1):
        splitter = CallSplitter()
        told = [splitter.push(text[:end]), splitter.finish()]
        (call,) = joined_calls([delta for _, deltas in told for delta in deltas])
        assert call.arguments == text[begin : min(end, begin + len(wanted))]
        assert splitter.cut == (call.arguments != wanted)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("", "", []),
        ('{"a": 1}', '{"a": 1}', []),
        (json.dumps({"a": f"x\n{PARIS}"}), json.dumps({"a": f"x\n{PARIS}"}), []),
        ('"<tool_call>"', '"<tool_call>"', []),
        ("<tool", "<tool", []),
        (f"{NOW}\n{NOW}", "", [("now", "{}"), ("now", "{}")]),
    ],
)
def test_a_text_with_a_form_of_its_own_has_no_calls(text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert split(text, calls=Calls.OR_TEXT) == split(*text, calls=Calls.OR_TEXT) == (shown, calls)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=4), parts, max_size=3),
    max_leaves=6,
)


@given(
    st.text(alphabet=" ab<tol_c>\n", max_size=12).filter(lambda text: OPENING not in text),
    st.lists(
        st.tuples(st.from_regex(r"[a-zA-Z0-9_.-]{1,8}", fullmatch=True), st.dictionaries(st.text(), values)), max_size=3
    ),
    st.data(),
)
def test_however_an_answer_arrives_its_calls_are_the_same(
    text: str, calls: list[tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    whole = "\n".join([text, *(written_call(name, arguments) for name, arguments in calls)]) if calls else text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    shown, found = split(*pieces)
    assert shown == (text.rstrip() if calls else text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_what_is_told_at_once_of_a_call_is_one_delta() -> None:
    splitter = CallSplitter()
    _, deltas = splitter.push(f"{NOW}\n{PARIS[:60]}")
    assert [delta.index for delta in deltas] == [0, 1]
    assert (deltas[0].arguments, deltas[1].name) == ("{}", "weather")
    _, later = splitter.push(PARIS[60:])
    assert [(delta.index, delta.name, delta.id) for delta in later] == [(1, "", "")]
    assert isinstance(later[0], CallDelta)
