"""Numbers in schemas come as they are, or the schema is refused with the place of the first that can't."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_actor.errors import UnusableGrammar
from engine_actor.sampling.grammars import check_grammar
from tests.support.grammars import lark, schema

WORDS = ("const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63, -(2**63), 10**400, 1e30, -1e30, float("1e400")])
@pytest.mark.parametrize("word", WORDS)
def test_a_number_that_would_be_changed_is_refused_with_its_place(word: str, number: float) -> None:
    """Some of these would end the process."""
    wanted: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer", word: number}}}
    for asked in (schema(wanted), lark(f'start: "x" %json {json.dumps(wanted)}')):
        with pytest.raises(UnusableGrammar) as error:
            check_grammar(asked)
        assert error.value.reason.startswith(f"properties.a.{word}: a number beyond 9007199254740992")


def test_numbers_deep_in_constants_count_too() -> None:
    with pytest.raises(UnusableGrammar, match=r"enum\.1\.a\.0: "):
        check_grammar(schema({"enum": [1, {"a": [-(2**63)]}]}))


@pytest.mark.parametrize("gap", [" ", "\n", " // a remark\n", " /* one */ "])
def test_no_spelling_of_a_grammar_brings_such_a_number_to_the_library(gap: str) -> None:
    for number in ("-9223372036854775808", "-1e30", "-1E+30"):
        with pytest.raises(UnusableGrammar):
            check_grammar(lark(f'start: "x" %json{gap}{{"type": "integer", "minimum": {number}}}'))


def test_numbers_that_can_be_kept_are() -> None:
    for number in (2**53, -(2**53), 0, 0.1, -1.5, 1e-7):
        check_grammar(schema({"const": number}))
    check_grammar(schema({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}))  # as zod writes them
    check_grammar(lark('start: "1234567890123456789" %json {"const": 1}'))
