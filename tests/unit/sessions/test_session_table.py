"""The table of sessions by itself: who is evicted, how long a session counts as idle, which answers are recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine_actor.messages import ForkOutcome, HistorySpan, TurnRequest
from engine_actor.options import SamplingParams
from engine_actor.requests.outcomes import Deferral, DeferralReason
from engine_actor.sessions.session import Session
from engine_actor.sessions.table import BegunTurn, SessionTable
from tests.support.doubles import SyntheticDecoder, build_engine, run_out

PROMPT = [5, 9, 13]


def detokenize(ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in ids)


def digest_of(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(detokenize(ids).encode()).digest()


@dataclass
class TableOverEngine:
    """Turns are asked and answered one after the other; time stands still unless a test moves it."""

    max_sessions: int = 3
    ttl: float = 0.0
    now: float = 100.0
    engine_options: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = build_engine(SyntheticDecoder(vocab=1000), **{"max_residents": 8, **self.engine_options})
        self.sessions = SessionTable(
            self.engine, "replica-1", self.max_sessions, self.ttl, detokenize, lambda: self.now
        )

    def begin(
        self, name: str, prompt: Sequence[int] = PROMPT, limit: int = 2, spans: tuple[HistorySpan, ...] = ()
    ) -> tuple[Session, BegunTurn]:
        turn = TurnRequest("test", "owner", name, tuple(prompt), SamplingParams(), limit, spans=spans)
        session = self.sessions.open(turn)
        assert session is not None
        return session, self.sessions.begin(turn, session)

    def end(self, session: Session) -> None:
        run_out(self.engine)
        self.sessions.ended(session)

    def ask(self, name: str, prompt: Sequence[int] = PROMPT, limit: int = 2) -> list[int]:
        """The answer to a whole turn."""
        session, _ = self.begin(name, prompt, limit)
        self.end(session)
        return session.sequence()[len(prompt) :]

    def residents(self) -> list[str]:
        return sorted(info.session_id for info in self.sessions.infos(None))

    def relieve(self, *, blocks: int = 0, slots: int = 0) -> int:
        return self.sessions.relieve([Deferral(0, DeferralReason.BLOCKS, blocks, slots)])


# -- who gives way -----------------------------------------------------------------------------------------------------


def test_a_session_that_was_used_again_gives_way_after_those_that_were_not() -> None:
    table = TableOverEngine()
    for name in ("a", "b", "c"):
        table.ask(name)
    table.ask("a")
    table.ask("d")
    assert table.residents() == ["a", "c", "d"]
    table.ask("c")
    table.ask("e")
    assert table.residents() == ["c", "d", "e"]
    assert table.sessions.evictions["evicted_for_sessions"] == 2


def test_what_memory_is_needed_for_takes_the_session_that_was_used_longest_ago() -> None:
    table = TableOverEngine()
    for name in ("a", "b", "c", "a"):
        table.ask(name)
    assert table.relieve(blocks=1) == 1
    assert table.residents() == ["a", "c"]


def test_the_parent_of_a_fork_counts_as_used() -> None:
    table = TableOverEngine()
    for name in ("a", "b", "c"):
        table.ask(name)
    assert table.sessions.fork("owner", "a", "a2") is ForkOutcome.FORKED
    assert table.residents() == ["a", "a2", "c"]


@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_as_many_sessions_give_way_as_places_are_missing(slots: int) -> None:
    table = TableOverEngine()
    for name in ("a", "b", "c"):
        table.ask(name)
    assert table.relieve(slots=slots) == slots
    assert table.residents() == ["a", "b", "c"][slots:]


@pytest.mark.parametrize(("blocks", "slots", "evicted"), [(2, 1, 1), (5, 1, 3), (2, 3, 3), (4, 1, 2)])
def test_sessions_give_way_until_neither_blocks_nor_places_are_missing(blocks: int, slots: int, evicted: int) -> None:
    table = TableOverEngine()
    for name in ("a", "b", "c"):
        table.ask(name, [5, 9, 13, 17, 21])  # seven tokens, two blocks
    assert table.relieve(blocks=blocks, slots=slots) == evicted
    assert table.sessions.evictions["evicted_for_blocks"] == evicted


def test_a_session_whose_turn_runs_never_gives_way() -> None:
    table = TableOverEngine()
    table.ask("a")
    running, _ = table.begin("b")
    assert table.relieve(blocks=100, slots=100) == 1
    assert running.request is not None and table.residents() == ["b"]
    table.end(running)


# -- how long a session is idle ----------------------------------------------------------------------------------------


def test_idle_time_counts_from_the_end_of_the_last_turn() -> None:
    table = TableOverEngine(ttl=60.0)
    session, _ = table.begin("a")
    table.now += 500
    assert [info.idle_seconds for info in table.sessions.infos(None)] == [0.0]
    assert table.sessions.expire() == 0
    table.end(session)
    table.now += 60
    assert [info.idle_seconds for info in table.sessions.infos(None)] == [60.0]
    assert [moved.idle_seconds for moved in table.sessions.dormant()] == [60.0]
    assert table.sessions.expire() == 0
    table.now += 1
    assert table.sessions.expire() == 1 and table.residents() == []


# -- which answers come back -------------------------------------------------------------------------------------------


def two_answers() -> tuple[TableOverEngine, list[int], list[int]]:
    """A session "a" of PROMPT, an answer, [40, 41], and another answer."""
    table = TableOverEngine()
    first = table.ask("a")
    prompt = [*PROMPT, *first, 40, 41]
    spans = (HistorySpan(3, 3 + len(first), digest_of(first)),)
    session, _ = table.begin("a", prompt, spans=spans)
    table.end(session)
    second = session.sequence()[len(prompt) :]
    assert first != second and len(first) == len(second) == 2
    return table, first, second


def spelled_otherwise(*texts: list[int]) -> tuple[list[int], tuple[HistorySpan, ...]]:
    """A prompt whose spans hold these texts, each in three other tokens."""
    prompt, spans = list(PROMPT), []
    for at, text in enumerate(texts):
        spans.append(HistorySpan(len(prompt), len(prompt) + 3, digest_of(text)))
        prompt += [900 + at, 901 + at, 902 + at, 40, 41]
    return prompt, tuple(spans)


def test_each_answer_is_recognised_once() -> None:
    table, first, _ = two_answers()
    prompt, spans = spelled_otherwise(first, first)
    _, begun = table.begin("a", prompt, spans=spans)
    assert begun.own_tokens == ((0, tuple(first)),), "one answer stood for two messages"
    assert begun.request.tokens[:10] == [*PROMPT, *first, 40, 41, *prompt[8:11]]


def test_answers_are_recognised_in_their_order_and_some_may_be_missing() -> None:
    for wanted, found in (((0, 1), (0, 1)), ((1,), (1,)), ((1, 0), (1,)), ((0, 0, 1), (0, 1))):
        table, *answers = two_answers()
        prompt, spans = spelled_otherwise(*(answers[which] for which in wanted))
        _, begun = table.begin("a", prompt, spans=spans)
        assert [tokens for _, tokens in begun.own_tokens] == [tuple(answers[which]) for which in found]


def test_two_equal_answers_are_two() -> None:
    table = TableOverEngine()
    [first] = table.ask("a", limit=1)
    again = [*PROMPT, first, 40, first - 5 - 6]  # answered by the sum of its first token, its last and its length
    session, _ = table.begin("a", again, limit=1, spans=(HistorySpan(3, 4, digest_of([first])),))
    table.end(session)
    assert session.sequence() == [*again, first]
    prompt, spans = spelled_otherwise([first], [first])
    _, begun = table.begin("a", prompt, spans=spans)
    assert begun.own_tokens == ((0, (first,)), (1, (first,)))
