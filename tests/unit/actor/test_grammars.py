"""Turns whose answer follows a grammar: what is compiled where, and who waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine_actor.actor.actor import EngineActor
from engine_actor.messages import EndReason, RefusalCode, TurnRequest
from engine_actor.options import GrammarSpec
from engine_actor.sampling.grammars import Grammar, Grammars
from tests.support.doubles import SyntheticDecoder
from tests.support.grammars import encode, letters, regex, schema, spell
from tests.unit.actor.helpers import Answer, ask, start_actor, turn


class Compiling:
    """Holds up what is compiled until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.go_on = threading.Event()
        compile_anew = Grammars.compile_anew

        def held(grammars: Grammars, spec: GrammarSpec) -> Grammar:
            self.threads.append(threading.current_thread().name)
            assert self.go_on.wait(20)
            return compile_anew(grammars, spec)

        monkeypatch.setattr(Grammars, "compile_anew", held)

    async def begun(self, count: int) -> None:
        while len(self.threads) < count:
            await asyncio.sleep(0.001)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    return Compiling(monkeypatch)


@pytest.fixture
async def actor() -> AsyncIterator[EngineActor]:
    actor = await start_actor(SyntheticDecoder(), vocabulary=letters, max_queued_turns=2)
    yield actor
    await actor.check_integrity()
    assert (await actor.stats())["requests"] == 0
    await actor.stop()


def guided(pattern: str, **options: Any) -> TurnRequest:
    return replace(turn(encode("say"), 12), grammar=regex(pattern), **options)


def said(answer: Answer) -> str:
    assert answer.ended is not None and answer.ended.reason is EndReason.STOP
    return spell(answer.tokens)


async def test_grammars_are_compiled_on_a_thread_of_their_own_and_once(
    actor: EngineActor, compiling: Compiling
) -> None:
    compiling.go_on.set()
    for _ in range(2):
        answers = await asyncio.gather(*(ask(actor, guided(f"{letter}{{3}}")) for letter in "ab"))
        assert [said(answer) for answer in answers] == ["aaa", "bbb"]
    assert [name.startswith("grammars-replica-1") for name in compiling.threads] == [True, True]
    assert (await actor.stats())["grammars_compiled"] == 2


async def test_others_go_on_while_a_grammar_is_compiled(actor: EngineActor, compiling: Compiling) -> None:
    """Those without one, and those whose own is known."""
    compiling.go_on.set()
    await ask(actor, guided("known"))
    compiling.go_on.clear()
    waiting = asyncio.create_task(ask(actor, guided("new")))
    await asyncio.wait_for(compiling.begun(2), 20)
    assert (await ask(actor, turn(encode("say"), 4))).ended is not None
    assert said(await ask(actor, guided("known"))) == "known"
    assert not waiting.done()
    compiling.go_on.set()
    assert said(await waiting) == "new"


async def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing(
    actor: EngineActor, compiling: Compiling
) -> None:
    leaving = [asyncio.create_task(ask(actor, guided(letter))) for letter in "ab"]
    await asyncio.wait_for(compiling.begun(1), 20)
    for task in leaving:
        task.cancel()
    assert [type(left) for left in await asyncio.gather(*leaving, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2
    compiling.go_on.set()
    assert said(await ask(actor, guided("a"))) == "a"
    assert len(compiling.threads) == 1, "what had not begun was compiled for nobody"


async def test_no_more_wait_for_the_compiler_than_for_the_engine(actor: EngineActor, compiling: Compiling) -> None:
    waiting = [asyncio.create_task(ask(actor, guided(letter))) for letter in "ab"]
    await asyncio.wait_for(compiling.begun(1), 20)
    refused = (await ask(actor, guided("c"))).refused
    assert refused is not None and refused.code is RefusalCode.QUEUE_FULL and refused.retry_after > 0
    resumed = guided("de", prompt_ids=tuple(encode("sayd")), resumed_tokens=1)  # it was accepted once
    waiting.append(asyncio.create_task(ask(actor, resumed)))
    await asyncio.sleep(0.01)
    compiling.go_on.set()
    assert [said(answer) for answer in await asyncio.gather(*waiting)] == ["a", "b", "e"]


async def test_an_actor_that_stops_takes_no_turn_whose_grammar_comes_too_late(compiling: Compiling) -> None:
    actor = await start_actor(SyntheticDecoder(), vocabulary=letters)
    waiting = [asyncio.create_task(ask(actor, guided(letter))) for letter in "ab"]
    await asyncio.wait_for(compiling.begun(1), 20)
    await actor.stop()
    late = await ask(actor, guided("c"))
    compiling.go_on.set()
    for answer in [*await asyncio.gather(*waiting), late]:
        assert answer.refused is not None and answer.refused.code is RefusalCode.UNAVAILABLE


async def test_what_is_no_grammar_is_refused_as_one(actor: EngineActor) -> None:
    refused = (await ask(actor, replace(turn(encode("say")), grammar=schema({"$ref": "#"})))).refused
    assert refused is not None and (refused.code, refused.retry_after) == (RefusalCode.GRAMMAR, 0.0)
    assert refused.message == "the answer's grammar is no usable json_schema: no text matches it"


async def test_a_turn_that_waits_for_its_session_keeps_its_grammar(
    actor: EngineActor, compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is compiled meanwhile, so that its beginning costs the engine nothing."""
    monkeypatch.setattr("engine_actor.sampling.grammars.KEPT_GRAMMARS", 1)
    compiling.go_on.set()
    first = asyncio.create_task(ask(actor, replace(turn(encode("say"), 60, "talk"), ignore_eos=True)))
    second = asyncio.create_task(ask(actor, replace(guided("second"), session_id="talk")))
    await asyncio.wait_for(compiling.begun(1), 20)
    assert said(await ask(actor, guided("other"))) == "other"
    assert (await first).ended is not None
    assert said(await second) == "second"
    assert len(compiling.threads) == 2
    await actor.close_session("public", "talk")
