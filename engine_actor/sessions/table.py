"""Which session is resident, and what of it a new turn can use. Runs on the owner thread.

A new turn comes as the whole rendered prompt. What is resident is kept as far as both agree:

    resident   [ common ][ differs ]
    prompt     [ common ][ rest ...]        at least one token is left to compute
                         ^ rewind to here, begin the turn with the rest

History that this server generated may come back as text whose tokens differ from those it generated. A span whose text
has the digest of a generated answer is therefore replaced by the answer's own tokens before the two are compared.

A turn that another replica had begun comes as prompt + what was generated there. Both stand as they are; the answer
begins where it began there.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine_actor.core.engine import Engine
from engine_actor.errors import ContextLengthExceeded, InvalidCall, InvalidOption
from engine_actor.messages import (
    ForkOutcome,
    HistorySpan,
    MovedSession,
    OwnTokens,
    SessionHolding,
    SessionInfo,
    TurnRequest,
    session_key,
)
from engine_actor.options import RequestOptions, TurnOptions
from engine_actor.requests.outcomes import Deferral
from engine_actor.requests.record import RequestStatus
from engine_actor.requests.request import Request
from engine_actor.sessions.session import AnswerSpan, Session, common_prefix, options_of

Detokenize = Callable[[Sequence[int]], str]

REMEMBERED_PER_SESSION = 4  # evicted sessions whose tokens are remembered, as a multiple of max_sessions


@dataclass(frozen=True, slots=True)
class BegunTurn:
    request: Request
    turn_id: int
    prompt_tokens: int
    cached_tokens: int
    own_tokens: OwnTokens = ()


class SessionTable:
    """Sessions in order of last use, oldest first. At most `max_sessions` of them own memory."""

    def __init__(
        self,
        engine: Engine,
        replica: str,
        max_sessions: int,
        ttl_seconds: float,
        detokenize: Detokenize | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._max_sessions = max_sessions
        self._ttl = ttl_seconds
        self._detokenize = detokenize
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        # Counted since the start: sessions that lost their memory, by what it was needed for.
        self.evictions = {"evicted_for_blocks": 0, "evicted_for_sessions": 0, "expired": 0}

    # -- turns --------------------------------------------------------------------------------------------------------

    def open(self, turn: TurnRequest) -> Session | None:
        """The session of a turn, made if need be; None for an anonymous turn."""
        if turn.session_id is None:
            return None
        key = session_key(turn.cache_scope, turn.session_id)
        session = self._sessions.get(key)
        if session is None:
            self._forget_surplus(new=1)  # first, since all the others may be in use, and it is not yet
            session = Session(key, turn.cache_scope, turn.session_id, self._clock())
            self._sessions[key] = session
        self._sessions.move_to_end(key)
        session.last_used = self._clock()
        session.moved = False
        return session

    def begin(self, turn: TurnRequest, session: Session | None) -> BegunTurn:
        """Begins a turn in the engine. Raises ContextLengthExceeded or InvalidOption; the session is then as it
        was, except that its memory may be gone."""
        assert turn.choices == 1 or turn.resumed_tokens is None
        options = options_of(turn)
        if session is None:
            request = self._engine.create_request(RequestOptions(salt=turn.cache_scope.encode()))
            return self._start(request, list(turn.prompt_ids), 0, options)
        own_tokens = self._own_tokens(turn, session)
        turn = turn.with_own_tokens(own_tokens)
        prompt = list(turn.prompt_ids)
        if len(prompt) >= self._engine.max_length:
            raise ContextLengthExceeded(0, len(prompt), self._engine.max_length)
        before = session.sequence()
        agreed = common_prefix(before, prompt)
        resident, keep = session.request, 0
        if resident is not None:
            keep = min(agreed, len(prompt) - 1)
            resident.rewind(keep)
        else:
            self._make_room_for_one()
            resident = self._engine.create_request(RequestOptions(salt=turn.cache_scope.encode()))
        try:
            begun = self._start(resident, prompt, keep, options)
        except Exception:
            resident.close()  # it has lost what comes after `keep`
            session.request, session.tokens = None, before
            raise
        session.request, session.tokens = resident, []
        session.answers = [AnswerSpan(span.start, span.end, span.digest) for span in turn.spans]
        session.answers.append(AnswerSpan(turn.prompt_tokens, len(prompt)))
        session.running = True
        return replace(begun, own_tokens=own_tokens)

    def branch(self, turn: TurnRequest, begun: BegunTurn, choice: int) -> BegunTurn:
        """Another choice of a turn whose prompt the first choice has computed: a fork shares its blocks. Where there is
        no place for one more resident it waits as a new request, and finds the prompt in the prefix index."""
        options = options_of(turn, choice)
        prompt = begun.request.tokens[: begun.prompt_tokens]
        try:
            request = begun.request.fork(begun.prompt_tokens - 1)
        except (InvalidCall, InvalidOption):
            request = self._engine.create_request(RequestOptions(salt=turn.cache_scope.encode()))
            return self._start(request, prompt, 0, options)
        return self._start(request, prompt, begun.prompt_tokens - 1, options)

    def _start(self, request: Request, prompt: list[int], keep: int, options: TurnOptions) -> BegunTurn:
        try:
            turn_id = request.begin_turn(prompt[keep:], options)
        except Exception:
            if request.status is RequestStatus.NEW:
                request.close()
            raise
        prompt_tokens = len(prompt) - options.resumed_tokens
        return BegunTurn(request, turn_id, prompt_tokens, min(request.num_computed_tokens, prompt_tokens))

    def ended(self, session: Session) -> None:
        """The turn is complete and its events are drained: the session is dormant from now on."""
        session.running = False
        session.last_used = self._clock()
        if session.request is not None and session.answers:
            session.answers[-1].end = session.request.current_length
            if session.answers[-1].end == session.answers[-1].start:
                session.answers.pop()

    def fork(self, cache_scope: str, session_id: str, new_session_id: str) -> ForkOutcome:
        """A second session that begins with all of the first one's, and shares its blocks. Where there is no place
        for one more resident, only its tokens are remembered, as those of an evicted one."""
        source = self._sessions.get(session_key(cache_scope, session_id))
        if source is None or not source.sequence():
            return ForkOutcome.UNKNOWN
        if source.open_turns:
            return ForkOutcome.RUNNING
        key = session_key(cache_scope, new_session_id)
        if key in self._sessions:
            return ForkOutcome.EXISTS
        source.last_used = self._clock()
        self._sessions.move_to_end(source.key)  # places are made of others first
        self._make_room_for_one()
        answers = [replace(answer) for answer in source.answers]
        branch = Session(key, cache_scope, new_session_id, source.last_used, answers=answers)
        if source.request is not None:
            try:
                branch.request = source.request.fork()
            except (InvalidCall, InvalidOption):  # nothing of it is computed, or others hold all places
                branch.request = None
        if branch.request is None:
            branch.tokens = list(source.sequence())
        self._sessions[key] = branch
        self._forget_surplus()
        return ForkOutcome.FORKED

    def _own_tokens(self, turn: TurnRequest, session: Session) -> OwnTokens:
        """The spans that stand here in other tokens. Spans and answers are in order; either may have some that the
        other lacks. What another replica accepted stands as it is."""
        if self._detokenize is None or turn.resumed_tokens is not None:
            return ()
        sequence, answers, own = session.sequence(), session.answers, []
        unused = 0
        for index, span in enumerate(turn.spans):
            matches = (i for i in range(unused, len(answers)) if self._digest(answers[i], sequence) == span.digest)
            if (at := next(matches, None)) is not None:
                tokens = tuple(sequence[answers[at].start : answers[at].end])
                if tokens != turn.prompt_ids[span.start : span.end]:
                    own.append((index, tokens))
                unused = at + 1
        return tuple(own)

    def _digest(self, answer: AnswerSpan, sequence: list[int]) -> bytes:
        if answer.digest is None:
            assert self._detokenize is not None
            text = self._detokenize(sequence[answer.start : answer.end])
            answer.digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        return answer.digest

    # -- moving to another replica ------------------------------------------------------------------------------------

    def dormant(self) -> list[MovedSession]:
        """Every session that no turn is using, as another replica would take it over, without its KV cache; those
        used last come first, since they are the likeliest to go on."""
        return [self._moved(c) for c in reversed(self._sessions.values()) if c.dormant]

    def take_along(self, key: str, most_bytes: int) -> MovedSession | None:
        """One of them with its KV cache, unless that is larger than `most_bytes`; None if it is not dormant here."""
        session = self._sessions.get(key)
        if session is None or not session.dormant:
            return None
        request = session.request
        kv = None if request is None else self._engine.read_cache(request, most_bytes)
        return replace(self._moved(session), kv=kv)

    def _moved(self, session: Session) -> MovedSession:
        sequence, request = session.sequence(), session.request
        spans = (HistorySpan(a.start, a.end, self._digest(a, sequence)) for a in session.answers)
        answers = tuple(spans) if self._detokenize is not None else ()
        idle = self._clock() - session.last_used
        cached = 0 if request is None else request.num_computed_tokens
        return MovedSession(session.cache_scope, session.session_id, tuple(sequence), answers, idle, cached)

    def adopt(self, moved: MovedSession) -> bool:
        """Takes over a session that another replica had: as a resident if its KV cache came along and there is
        room, else as one whose memory was evicted. What it left behind when it was here before, which is its beginning,
        gives way; False if something else is known of it here, which then is newer."""
        key = session_key(moved.cache_scope, moved.session_id)
        resident = self._sessions.get(key)
        if resident is not None:
            before = tuple(resident.sequence())
            if (
                not resident.dormant
                or len(before) >= len(moved.tokens)
                or common_prefix(before, moved.tokens) < len(before)
            ):
                return False
            self._drop(resident)
        last_used = self._clock() - moved.idle_seconds
        tokens = list(moved.tokens)
        session = Session(key, moved.cache_scope, moved.session_id, last_used, tokens=tokens, moved=True)
        session.answers = [AnswerSpan(span.start, span.end, span.digest) for span in moved.answers]
        self._sessions[key] = session
        for later in [c.key for c in self._sessions.values() if c.last_used > last_used]:
            self._sessions.move_to_end(later)
        if moved.kv is not None and len(self.residents()) < self._max_sessions:
            options = RequestOptions(salt=moved.cache_scope.encode())
            session.request = self._engine.restore_request(session.tokens, moved.kv, options)
            if session.request is not None:
                session.tokens = []
        self._forget_surplus()
        return True

    def forget_moved(self, keys: Sequence[str]) -> None:
        """Drops those of them that came from another replica and that no turn has used here."""
        for key in keys:
            session = self._sessions.get(key)
            if session is not None and session.moved:
                self._drop(session)

    # -- memory -------------------------------------------------------------------------------------------------------

    def relieve(self, deferrals: Sequence[Deferral]) -> int:
        """Evicts dormant sessions, oldest first, until the memory that deferred requests miss is back; returns
        how many. What goes back may still be shared, so the caller looks again after the next step."""
        blocks = max((deferral.missing_blocks for deferral in deferrals), default=0)
        slots = max((deferral.missing_slots for deferral in deferrals), default=0)
        evicted = 0
        for session in self._evictable():
            if blocks <= 0 and slots <= 0:
                break
            before = self._engine.available_blocks
            self._evict(session)
            blocks -= self._engine.available_blocks - before
            slots -= 1
            evicted += 1
        self.evictions["evicted_for_blocks"] += evicted
        return evicted

    def expire(self) -> int:
        """Forgets sessions that have been idle for longer than their time to live."""
        if not self._ttl:
            return 0
        horizon = self._clock() - self._ttl
        expired = [c for c in self._sessions.values() if c.last_used < horizon and not c.open_turns]
        for session in expired:
            self.evictions["expired"] += session.request is not None
            self._drop(session)
        return len(expired)

    def close(self, key: str) -> Session | None:
        """Drops a session and all it holds; its running turn, if any, ends without another event."""
        session = self._sessions.get(key)
        if session is not None:
            self._drop(session)
        return session

    def forget_if_empty(self, session: Session) -> None:
        """Drops a session that no turn ever reached."""
        if session.request is None and not session.tokens and not session.waiting:
            self._drop(session)

    def _evictable(self) -> list[Session]:
        """Oldest first, and last of all those of which a turn waits: it would have to compute them again at once."""
        idle = [c for c in self._sessions.values() if c.request is not None and not c.running]
        return sorted(idle, key=lambda c: len(c.waiting) > 0)

    def _make_room_for_one(self) -> None:
        resident = sum(c.request is not None for c in self._sessions.values())
        for session in self._evictable():
            if resident < self._max_sessions:
                return
            self._evict(session)
            self.evictions["evicted_for_sessions"] += 1
            resident -= 1

    def _forget_surplus(self, new: int = 0) -> None:
        limit = REMEMBERED_PER_SESSION * self._max_sessions - new
        for session in list(self._sessions.values()):
            if len(self._sessions) <= limit:
                return
            if not session.open_turns:
                self._drop(session)

    def _evict(self, session: Session) -> None:
        assert session.request is not None and not session.running
        session.tokens = session.request.tokens
        session.request.close()
        session.request = None

    def _drop(self, session: Session) -> None:
        if session.request is not None:
            session.request.close()
            session.request = None
        self._sessions.pop(session.key, None)

    # -- questions ----------------------------------------------------------------------------------------------------

    def open_turns(self, turn: TurnRequest) -> int:
        """Turns of the same session that run or wait; 0 for an anonymous one."""
        if turn.session_id is None:
            return 0
        session = self._sessions.get(session_key(turn.cache_scope, turn.session_id))
        return 0 if session is None else session.open_turns

    def holding(self, key: str) -> SessionHolding | None:
        """None if this session is not known here."""
        session = self._sessions.get(key)
        return None if session is None else SessionHolding(len(session.sequence()), session.open_turns > 0)

    def residents(self) -> dict[str, int]:
        """Tokens of each resident session, by its key; of one that runs, those of its prompt, so that the number
        changes with a turn and not with a step."""
        return {
            c.key: c.answers[-1].start if c.running else c.request.current_length
            for c in self._sessions.values()
            if c.request is not None
        }

    def open_keys(self) -> frozenset[str]:
        """Keys of the sessions of which turns run or wait."""
        return frozenset(c.key for c in self._sessions.values() if c.open_turns)

    def infos(self, cache_scope: str | None) -> list[SessionInfo]:
        """Resident sessions of one cache_scope, or of all."""
        now = self._clock()
        return [
            SessionInfo(
                session.session_id,
                session.cache_scope,
                self._replica,
                session.request.current_length,
                session.request.num_computed_tokens,
                self._engine.blocks_of(session.request),
                session.running,
                0.0 if session.running else now - session.last_used,
            )
            for session in self._sessions.values()
            if session.request is not None and cache_scope in (None, session.cache_scope)
        ]
