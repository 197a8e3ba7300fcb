"""The engine says tokens and nothing else: that some of them are a call of a tool is known above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from engine_actor.messages import EndReason, TurnDelta, TurnEnded, TurnTokens
from engine_actor.options import TurnOptions
from engine_actor.requests.events import EngineEvent, EventFlags
from engine_actor.requests.record import FinishReason
from tests.support.doubles import SyntheticDecoder, build_engine, run_out
from tests.unit.actor.helpers import start_actor, turn

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
# One token for each way in which families write a call, then letters.
WORDS = ["<pad>", "<eos>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", *sorted(set(CALL))]
SAID = [2, *(WORDS.index(letter) for letter in CALL[len("<tool_call>") : -len("</tool_call>")]), 3, 4, 5]
PROMPT = [10, 11, 12]


class CallingDecoder(SyntheticDecoder):
    """Answers PROMPT by a call, and ends."""

    def __init__(self) -> None:
        super().__init__(vocab=len(WORDS), eos=1)
        self.choose = lambda sequence: [*SAID, 1][len(sequence) - len(PROMPT)]


def words_of(path: Path) -> Iterator[str]:
    """Names and texts of a file's code: not its comments, nor its docstrings."""
    tree = ast.parse(path.read_text())
    told = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value
        for name in ("id", "attr", "arg", "name", "module"):
            if isinstance(value := getattr(node, name, None), str):
                yield value


@pytest.mark.parity("F294")
def test_no_file_of_the_engine_imports_the_server_or_names_a_call() -> None:
    engine = Path(__file__).parents[3] / "engine_actor"
    files = sorted(engine.rglob("*.py"))
    assert len(files) > 50
    wrong = re.compile(r"serve_app|(?<![a-z])(tool|function_call|python_tag)", re.IGNORECASE)
    found = [(str(path.relative_to(engine)), word) for path in files for word in words_of(path) if wrong.search(word)]
    assert found == []


@pytest.mark.parity("F294")
def test_an_event_has_no_place_for_text() -> None:
    texts = {field.name for field in fields(EngineEvent) if "str" in str(field.type)}
    assert texts == {"message"}, "of an error"
    assert not {field.name for field in fields(TurnTokens) if "str" in str(field.type)}
    assert {kind.__name__ for kind in get_args(TurnDelta)} == {"TurnAccepted", "TurnTokens", "TurnEnded", "TurnRefused"}
    assert not [reason for reason in (*EndReason, *FinishReason) if "tool" in reason]


@pytest.mark.parity("F294")
def test_a_call_is_tokens_like_any_others() -> None:
    engine = build_engine(CallingDecoder())
    request = engine.create_request()
    request.begin_turn(PROMPT, TurnOptions(200))
    events = run_out(engine)
    assert [event.token for event in events] == [*SAID, None]
    assert [event.flags for event in events] == [EventFlags.TOKEN] * len(SAID) + [EventFlags.TURN_FINISHED]
    assert events[-1].finish_reason is FinishReason.EOS and not any(event.message for event in events)


@pytest.mark.parity("F294")
async def test_the_actor_streams_a_call_as_tokens_too() -> None:
    actor = await start_actor(CallingDecoder(), 64, lambda ids: "".join(WORDS[token] for token in ids))
    _, *deltas, ended = [delta async for delta in actor.stream_turn(turn(PROMPT, 200, "s"))]
    assert all(isinstance(delta, TurnTokens) for delta in deltas)
    assert [token for delta in deltas if isinstance(delta, TurnTokens) for token in delta.token_ids] == SAID
    assert isinstance(ended, TurnEnded) and ended.reason is EndReason.STOP and ended.generated_tokens == len(SAID)
    await actor.stop()
