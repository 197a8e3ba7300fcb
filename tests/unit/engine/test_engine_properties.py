"""The whole engine under random calls, against a model that knows only what each sequence must say.

Pools are tiny, so that deferral, eviction, preemption, sharing and copies happen all the time. The oracle of a token is
the sampler on the logits of the request's own sequence, alone: whatever happened around it must not show.

`HYPOTHESIS_PROFILE=thorough` runs 10,000 examples.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_actor.core.engine import Engine
from engine_actor.errors import ContextLengthExceeded, InvalidCall, RetryableStepError
from engine_actor.limits import FairnessBounds
from engine_actor.memory.block_table import blocks_for
from engine_actor.options import RequestOptions, SamplingParams, TurnOptions
from engine_actor.requests.events import EngineEvent, ErrorCode, EventFlags
from engine_actor.requests.record import FinishReason, RequestStatus
from engine_actor.requests.request import Request
from engine_actor.sampling.batched_sampler import BatchedSampler
from engine_actor.sampling.sample_row import SampleRow
from tests.support.doubles import MixingDecoder, RecurrentMixingDecoder, WindowedMixingDecoder, mixing_logits
from tests.support.engine_view import record_of, view
from tests.support.engines import engine_of
from tests.support.grammars import alphabet, regex

VOCAB, EOS, CONTEXT, DRAFTS = 12, 1, 40, 4
RUNS_TO_FINISH = 3000
MANY = 8  # requests at a time
SHARED = [2, 3, 2, 2, 3, 3, 2, 3, 2, 2, 3, 2]  # beginnings that prompts have in common
BUSY = {
    "run": 50,
    "begin": 20,
    "draft": 12,
    "create": 10,
    "fork": 6,
    "move": 4,
    "cancel": 4,
    "rewind": 4,
    "fail": 4,
    "close": 2,
    "drop": 2,
}

PROFILES = {
    "ci": settings(max_examples=150, stateful_step_count=12, deadline=None, derandomize=True),
    "thorough": settings(max_examples=10_000, stateful_step_count=12, deadline=None, derandomize=False),
}
PROFILE = PROFILES.get(os.environ.get("HYPOTHESIS_PROFILE", "ci"), PROFILES["ci"])
if PROFILE is PROFILES["thorough"]:
    pytestmark = pytest.mark.timeout(0)  # an hour and more

SAMPLED = SamplingParams(temperature=1.0, seed=99)
PAIRS = regex("([c-e][f-l])*")  # which is easily said without a grammar: what may stand in even and in odd places
ALLOWED = (frozenset({EOS, 2, 3, 4}), frozenset(range(5, VOCAB)))
prompts = st.lists(st.sampled_from([2, 3]), min_size=1, max_size=11)
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 16),
        "block_size": st.integers(2, 4),
        "max_residents": st.integers(2, 6),
        "max_batch_size": st.integers(1, 6),
        "max_scheduled_tokens": st.integers(1, 12),
        "chunk_size": st.sampled_from([0, 1, 3]),
        "preemption": st.booleans(),
        "max_preemptions": st.integers(0, 2),
        "prefix_reuse": st.booleans(),
        "fairness": st.sampled_from([FairnessBounds.off(), FairnessBounds(), FairnessBounds(1, 0.5, 0)]),
        "block_order": st.sampled_from(["fifo", "lowest"]),
    }
)


def oracle(sequence: list[int], sampling: SamplingParams, allowed: frozenset[int] = frozenset(range(VOCAB))) -> int:
    logits = mixing_logits(sequence, VOCAB)[None]
    logits[0, [token not in allowed for token in range(VOCAB)]] = -np.inf
    [token] = BatchedSampler().sample(logits, [SampleRow(sampling, len(sequence))])
    assert token is not None
    return token


@dataclass
class Expected:
    """What the model knows of one request. `tokens` grows as events are drained."""

    handle: Request
    tokens: list[int] = field(default_factory=list)
    limit: int = CONTEXT
    options: TurnOptions = field(default_factory=TurnOptions)
    turn: int = 0
    open_turn: bool = False
    generated: int = 0
    prompt: int = 0
    cancelled: bool = False

    def take(self, event: EngineEvent, engine: Engine) -> None:
        assert self.open_turn, "an event of a turn that has ended"
        assert event.turn_id == self.turn
        if event.token is not None:
            assert EventFlags.TOKEN in event.flags
            assert event.token == self._next()
            self.tokens.append(event.token)
            self.generated += 1
        if EventFlags.TURN_FINISHED in event.flags:
            self.open_turn = False
            usage = event.usage
            assert usage is not None and (usage.prompt_tokens, usage.generated_tokens) == (self.prompt, self.generated)
            self._check_reason(event, engine)

    def _next(self) -> int:
        if self.options.grammar is None:
            return oracle(self.tokens, self.options.sampling)
        return oracle(self.tokens, self.options.sampling, ALLOWED[self.generated % 2])

    def _check_reason(self, event: EngineEvent, engine: Engine) -> None:
        reason = event.finish_reason
        if reason is FinishReason.CANCELLED:
            assert self.cancelled
        elif reason is FinishReason.FAILED:
            assert event.error_code == ErrorCode.UNSERVICEABLE
            assert blocks_for(len(self.tokens), engine.pools.block_size) > engine.pools.num_blocks
        elif reason in (FinishReason.EOS, FinishReason.STOP_SEQUENCE):
            token = self._next()
            assert reason is (FinishReason.EOS if token == EOS else FinishReason.STOP_SEQUENCE)
            assert token == EOS or token in self.options.stop_token_ids
        elif len(self.tokens) == self.limit:
            assert reason is FinishReason.MAX_SESSION_TOKENS and event.token is not None
        else:
            assert reason is FinishReason.MAX_GENERATED_TOKENS and event.token is not None
            assert self.generated == self.options.max_generated_tokens


class EngineMachine(RuleBasedStateMachine):
    def build_decoder(self) -> MixingDecoder:
        return MixingDecoder(VOCAB, EOS, CONTEXT, DRAFTS)

    @initialize(values=configs)
    def build(self, values: dict[str, object]) -> None:
        self.decoder = self.build_decoder()
        if self.decoder.manifest.windowed is not None:
            values["chunk_size"] = values["chunk_size"] or 2
        self.engine = engine_of(
            self.decoder,
            max_length=CONTEXT,
            vocabulary=lambda: alphabet(VOCAB, EOS),
            **values,  # type: ignore[arg-type]
        )
        self.known: dict[int, Expected] = {}
        self.blocked_runs = 0

    # -- calls --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.known) < MANY)
    @rule(salt=st.sampled_from([b"", b"other"]), session=st.sampled_from([0, 0, 14]))
    def create(self, salt: bytes, session: int) -> None:
        self._create(salt, session)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        prompt=prompts,
        limit=st.sampled_from([0, 1, 2, 5]),
        sampled=st.booleans(),
        stops=st.booleans(),
        guided=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def begin(
        self,
        data: st.DataObject,
        prompt: list[int],
        limit: int,
        sampled: bool,
        stops: bool,
        guided: bool,
        priority: int,
    ) -> None:
        self._begin(self._pick(data), prompt, limit, sampled, stops, guided, priority)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), stale=st.booleans())
    def cancel(self, data: st.DataObject, stale: bool) -> None:
        self._cancel(self._pick(data), stale)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), share=st.floats(0, 1))
    def rewind(self, data: st.DataObject, share: float) -> None:
        self._rewind(self._pick(data), share)

    @precondition(lambda self: self.known and len(self.known) < MANY)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self._fork(self._pick(data))

    @precondition(lambda self: self.known and len(self.known) < MANY)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        self._move(self._pick(data))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self._close(self._pick(data))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), again=st.booleans())
    def drop_handle(self, data: st.DataObject, again: bool) -> None:
        self._drop(data.draw(st.sampled_from(sorted(self.known))), again)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), right=st.integers(0, DRAFTS), wrong=st.lists(st.integers(0, VOCAB - 1), max_size=2))
    def draft(self, data: st.DataObject, right: int, wrong: list[int]) -> None:
        self._draft(self._pick(data), right, wrong)

    @rule(late=st.booleans(), memory=st.booleans())
    def fail_once(self, late: bool, memory: bool) -> None:
        self._fail_once(late, memory)

    @rule(capacity=st.integers(1, 9), times=st.integers(1, 6))
    def run(self, capacity: int, times: int) -> None:
        for _ in range(times):
            self._run(capacity)

    @rule(seed=st.integers(0, 2**32), calls=st.integers(20, 80))
    def work(self, seed: int, calls: int) -> None:
        """A busy stretch of the same calls, most of them runs; prompts are long and share their beginnings."""
        rng = random.Random(seed)
        for _ in range(calls):
            call = rng.choices(list(BUSY), list(BUSY.values()))[0]
            any_known = rng.choice(list(self.known.values())) if self.known else None
            if call == "run":
                self._run(rng.choice([1, 3, 9]))
            elif call == "fail":
                self._fail_once(rng.random() < 0.5, rng.random() < 0.5)
            elif call == "create" or any_known is None:
                if len(self.known) < MANY:
                    self._create(rng.choice([b"", b"", b"other"]), rng.choice([0, 0, 0, 14]))
            elif call == "begin":
                prompt = SHARED[: rng.randint(0, len(SHARED))] + rng.choices([2, 3, 4], k=rng.randint(1, 4))
                limit = rng.choice([0, 1, 3, 9, 20])
                sampled, stops, guided = (rng.random() < share for share in (0.4, 0.2, 0.3))
                self._begin(any_known, prompt, limit, sampled, stops, guided, rng.choice([0, 0, 0, 1]))
            elif call == "cancel":
                self._cancel(any_known, rng.random() < 0.2)
            elif call == "rewind":
                self._rewind(any_known, rng.random())
            elif call == "fork":
                if len(self.known) < MANY:
                    self._fork(any_known)
            elif call == "move":
                if len(self.known) < MANY:
                    self._move(any_known)
            elif call == "draft":
                self._draft(any_known, rng.randint(0, DRAFTS), rng.choices(range(VOCAB), k=rng.randint(0, 2)))
            elif call == "close":
                self._close(any_known)
            else:
                request_id = any_known.handle.id
                del any_known
                self._drop(request_id, rng.random() < 0.5)
            self.parts_agree()

    def _create(self, salt: bytes, session: int) -> None:
        handle = self.engine.create_request(RequestOptions(session, salt))
        self.known[handle.id] = Expected(handle, limit=session or CONTEXT)

    def _begin(
        self, expected: Expected, prompt: list[int], limit: int, sampled: bool, stops: bool, guided: bool, priority: int
    ) -> None:
        options = TurnOptions(
            max_generated_tokens=limit,
            sampling=SAMPLED if sampled else SamplingParams(),
            stop_token_ids=frozenset({7}) if stops else frozenset(),
            grammar=PAIRS if guided else None,
            priority=priority,
        )
        before = expected.handle.tokens
        try:
            turn = expected.handle.begin_turn(prompt, options)
        except InvalidCall:
            assert expected.open_turn, "refused although the turn has ended and its events are drained"
        except ContextLengthExceeded:
            assert len(expected.tokens) + len(prompt) >= expected.limit
            assert expected.handle.tokens == before
        else:
            assert not expected.open_turn and turn == expected.turn + 1
            expected.turn, expected.open_turn, expected.cancelled = turn, True, False
            expected.options, expected.prompt, expected.generated = options, len(prompt), 0
            expected.tokens += prompt

    def _cancel(self, expected: Expected, stale: bool) -> None:
        running = expected.handle.status in (RequestStatus.WAITING, RequestStatus.RUNNING)
        if expected.handle.status is RequestStatus.NEW:
            with pytest.raises(InvalidCall):
                expected.handle.cancel_turn(1)
        elif stale or not running:
            assert not expected.handle.cancel_turn(expected.turn + 1 if stale else expected.turn)
        else:
            assert expected.handle.cancel_turn(expected.turn)
            expected.cancelled = True

    def _rewind(self, expected: Expected, share: float) -> None:
        length = int(share * len(expected.tokens))
        if expected.open_turn or expected.handle.status is RequestStatus.NEW:
            with pytest.raises(InvalidCall):
                expected.handle.rewind(length)
        else:
            expected.handle.rewind(length)
            del expected.tokens[length:]
            assert expected.handle.tokens == expected.tokens

    def _fork(self, expected: Expected) -> None:
        try:
            child = expected.handle.fork()
        except InvalidCall:
            return
        assert expected.handle.status in (RequestStatus.RUNNING, RequestStatus.IDLE)
        assert child.tokens == expected.handle.tokens
        self.known[child.id] = Expected(child, child.tokens, expected.limit)

    def _move(self, expected: Expected) -> None:
        """Its cache leaves the engine and comes back as that of another request."""
        kv = self.engine.read_cache(expected.handle, 2**30)
        if kv is None:
            return
        assert expected.handle.status is RequestStatus.IDLE and kv.positions == expected.handle.num_computed_tokens
        restored = self.engine.restore_request(expected.handle.tokens, kv, record_of(expected.handle).options)
        if restored is not None:
            assert restored.num_computed_tokens == kv.positions
            self.known[restored.id] = Expected(restored, restored.tokens, expected.limit)

    def _draft(self, expected: Expected, right: int, wrong: list[int]) -> None:
        """A proposal whose first `right` tokens are what the model will say."""
        guess: list[int] = []
        for _ in range(right):
            guess.append(oracle(expected.handle.tokens + guess, SamplingParams()))
        guess = (guess + wrong)[:DRAFTS]
        generates = expected.handle.status is RequestStatus.RUNNING and not record_of(expected.handle).is_prefill
        generates = generates and self.decoder.manifest.max_draft_tokens > 0
        if not guess or (generates and expected.options.sampling.greedy and expected.options.grammar is None):
            expected.handle.set_draft_tokens(guess)
        else:
            with pytest.raises(InvalidCall):
                expected.handle.set_draft_tokens(guess)

    def _close(self, expected: Expected) -> None:
        del self.known[expected.handle.id]
        expected.handle.close()
        expected.handle.close()
        assert expected.handle.status is RequestStatus.CLOSED

    def _drop(self, request_id: int, again: bool) -> None:
        expected = self.known.pop(request_id)
        del expected.handle
        if again:
            handle = self.engine.get_request(request_id)
            assert handle is not None
            expected.handle = handle
            self.known[request_id] = expected

    def _fail_once(self, late: bool, memory: bool) -> None:
        error = MemoryError if memory else RetryableStepError
        if late:
            self.decoder.fail_next = lambda: error("injected")
        else:
            self.decoder.fail_before = lambda: error("injected")

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def parts_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for expected in self.known.values():
            request = expected.handle
            assert request.tokens[: len(expected.tokens)] == expected.tokens
            if not expected.open_turn:
                assert request.tokens == expected.tokens
                assert request.status in (RequestStatus.NEW, RequestStatus.IDLE)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(RUNS_TO_FINISH):
            if not self.engine.has_pending_requests():
                break
            self._run(64)
            self.engine.check_integrity()
        assert not self.engine.has_pending_requests(), "no end in sight: a livelock"
        for expected in self.known.values():
            assert not expected.open_turn
            assert expected.handle.tokens == expected.tokens
        for expected in self.known.values():
            expected.handle.close()
        self.known.clear()
        gc.collect(0)
        assert not self.engine.has_pending_requests()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats["blocks_free"] + stats["blocks_idle"] == stats["blocks_usable"]
        assert stats["residents"] == stats["requests"] == stats["pending_events"] == 0

    # -- parts --------------------------------------------------------------------------------------------------------

    def _pick(self, data: st.DataObject) -> Expected:
        return self.known[data.draw(st.sampled_from(sorted(self.known)))]

    def _run(self, capacity: int) -> None:
        calls, retained = len(self.decoder.steps), self.engine.stats()["pending_events"]
        events = self.engine.run(capacity)
        assert len(events) <= capacity
        assert len(self.decoder.steps) - calls <= 1
        blocked = False
        for event in events:
            if event.request_id is not None:
                self.known[event.request_id].take(event, self.engine)
                continue
            assert not event.flags & (EventFlags.TOKEN | EventFlags.TURN_FINISHED)
            assert event.error_code in (ErrorCode.DEFERRED, ErrorCode.RETRYABLE, ErrorCode.EXECUTION_MEMORY)
            blocked |= event.error_code == ErrorCode.DEFERRED
        self.engine.check_integrity()
        if blocked and not retained:  # an event that was retained tells of an earlier moment
            self._give_way()

    def _give_way(self) -> None:
        """What the owner of the engine does when all work is blocked: it closes a dormant request. Only where
        preemption is off it may have to close a running one."""
        owners = [e for e in self.known.values() if self.engine.blocks_of(e.handle) or self._holds_place(e)]
        dormant = [e for e in owners if e.handle.status is RequestStatus.IDLE]
        assert dormant or not self.engine.limits.preemption, "blocked although nothing dormant could be closed"
        expected = (dormant or owners)[0]
        del self.known[expected.handle.id]
        expected.handle.close()

    def _holds_place(self, expected: Expected) -> bool:
        return expected.handle.id in view(self.engine).cache.paged.residents()


EngineMachine.TestCase.settings = settings(PROFILE, suppress_health_check=list(HealthCheck))
TestEngine = EngineMachine.TestCase


class RecurrentEngineMachine(EngineMachine):
    """The same calls over a model whose answers come from state slots."""

    def build_decoder(self) -> MixingDecoder:
        return RecurrentMixingDecoder(VOCAB, EOS, CONTEXT)


RecurrentEngineMachine.TestCase.settings = EngineMachine.TestCase.settings
TestRecurrentEngine = RecurrentEngineMachine.TestCase


class WindowedEngineMachine(EngineMachine):
    """The same calls over a model that reads its last tokens from rings."""

    def build_decoder(self) -> MixingDecoder:
        return WindowedMixingDecoder(VOCAB, EOS, CONTEXT, DRAFTS)


WindowedEngineMachine.TestCase.settings = EngineMachine.TestCase.settings
TestWindowedEngine = WindowedEngineMachine.TestCase


def test_the_oracle_depends_on_every_token() -> None:
    base = mixing_logits([2, 3, 2, 2, 3], VOCAB)
    assert not np.array_equal(base, mixing_logits([2, 2, 2, 2, 3], VOCAB))
    assert not np.array_equal(base, mixing_logits([2, 3, 2, 3, 3], VOCAB))
