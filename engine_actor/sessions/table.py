"""Which conversation is resident, and what of it a new turn can use. Runs on the owner thread.

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
    SessionInfo,
    TurnRequest,
    session_key,
)
from engine_actor.options import RequestOptions, TurnOptions
from engine_actor.requests.outcomes import Deferral
from engine_actor.requests.record import RequestStatus
from engine_actor.requests.request import Request
from engine_actor.sessions.session import Answer, Conversation, common_prefix, options_of

Detokenize = Callable[[Sequence[int]], str]

REMEMBERED_PER_SESSION = 4  # evicted conversations whose tokens are remembered, as a multiple of max_sessions


@dataclass(frozen=True, slots=True)
class BegunTurn:
    request: Request
    turn_id: int
    prompt_tokens: int
    cached_tokens: int
    own_tokens: OwnTokens = ()


class SessionTable:
    """Conversations in order of last use, oldest first. At most `max_sessions` of them own memory."""

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
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        # Counted since the start: conversations that lost their memory, by what it was needed for.
        self.evictions = {"evicted_for_blocks": 0, "evicted_for_places": 0, "expired": 0}

    # -- turns --------------------------------------------------------------------------------------------------------

    def open(self, turn: TurnRequest) -> Conversation | None:
        """The conversation of a turn, made if need be; None for an anonymous turn."""
        if turn.session_id is None:
            return None
        key = session_key(turn.owner, turn.session_id)
        conversation = self._conversations.get(key)
        if conversation is None:
            self._forget_surplus(new=1)  # first, since all the others may be in use, and it is not yet
            conversation = Conversation(key, turn.owner, turn.session_id, self._clock())
            self._conversations[key] = conversation
        self._conversations.move_to_end(key)
        conversation.last_used = self._clock()
        conversation.moved = False
        return conversation

    def begin(self, turn: TurnRequest, conversation: Conversation | None) -> BegunTurn:
        """Begins a turn in the engine. Raises ContextLengthExceeded or InvalidOption; the conversation is then as it
        was, except that its memory may be gone."""
        assert turn.choices == 1 or turn.resumed_tokens is None
        options = options_of(turn)
        if conversation is None:
            request = self._engine.create_request(RequestOptions(salt=turn.owner.encode()))
            return self._start(request, list(turn.prompt_ids), 0, options)
        own_tokens = self._own_tokens(turn, conversation)
        turn = turn.with_own_tokens(own_tokens)
        prompt = list(turn.prompt_ids)
        if len(prompt) >= self._engine.max_length:
            raise ContextLengthExceeded(0, len(prompt), self._engine.max_length)
        before = conversation.sequence()
        agreed = common_prefix(before, prompt)
        resident, keep = conversation.request, 0
        if resident is not None:
            keep = min(agreed, len(prompt) - 1)
            resident.rewind(keep)
        else:
            self._make_place()
            resident = self._engine.create_request(RequestOptions(salt=turn.owner.encode()))
        try:
            begun = self._start(resident, prompt, keep, options)
        except Exception:
            resident.close()  # it has lost what comes after `keep`
            conversation.request, conversation.tokens = None, before
            raise
        conversation.request, conversation.tokens = resident, []
        conversation.answers = [Answer(span.start, span.end, span.digest) for span in turn.spans]
        conversation.answers.append(Answer(turn.prompt_tokens, len(prompt)))
        conversation.running = True
        return replace(begun, own_tokens=own_tokens)

    def branch(self, turn: TurnRequest, begun: BegunTurn, choice: int) -> BegunTurn:
        """Another choice of a turn whose prompt the first choice has computed: a fork shares its blocks. Where there is
        no place for one more resident it waits as a new request, and finds the prompt in the prefix index."""
        options = options_of(turn, choice)
        prompt = begun.request.tokens[: begun.prompt_tokens]
        try:
            request = begun.request.fork(begun.prompt_tokens - 1)
        except (InvalidCall, InvalidOption):
            request = self._engine.create_request(RequestOptions(salt=turn.owner.encode()))
            return self._start(request, prompt, 0, options)
        return self._start(request, prompt, begun.prompt_tokens - 1, options)

    def _start(self, request: Request, prompt: list[int], keep: int, options: TurnOptions) -> BegunTurn:
        try:
            turn_id = request.begin_turn(prompt[keep:], options)
        except Exception:
            if request.status is RequestStatus.UNASSIGNED:
                request.close()
            raise
        prompt_tokens = len(prompt) - options.resumed_tokens
        return BegunTurn(request, turn_id, prompt_tokens, min(request.processed_length, prompt_tokens))

    def ended(self, conversation: Conversation) -> None:
        """The turn is complete and its events are drained: the conversation is dormant from now on."""
        conversation.running = False
        conversation.last_used = self._clock()
        if conversation.request is not None and conversation.answers:
            conversation.answers[-1].end = conversation.request.current_length
            if conversation.answers[-1].end == conversation.answers[-1].start:
                conversation.answers.pop()

    def fork(self, owner: str, session_id: str, new_session_id: str) -> ForkOutcome:
        """A second conversation that begins with all of the first one's, and shares its blocks. Where there is no place
        for one more resident, only its tokens are remembered, as those of an evicted one."""
        source = self._conversations.get(session_key(owner, session_id))
        if source is None or not source.sequence():
            return ForkOutcome.UNKNOWN
        if source.open_turns:
            return ForkOutcome.RUNNING
        key = session_key(owner, new_session_id)
        if key in self._conversations:
            return ForkOutcome.EXISTS
        source.last_used = self._clock()
        self._conversations.move_to_end(source.key)  # places are made of others first
        self._make_place()
        answers = [replace(answer) for answer in source.answers]
        branch = Conversation(key, owner, new_session_id, source.last_used, answers=answers)
        if source.request is not None:
            try:
                branch.request = source.request.fork()
            except (InvalidCall, InvalidOption):  # nothing of it is computed, or others hold all places
                branch.request = None
        if branch.request is None:
            branch.tokens = list(source.sequence())
        self._conversations[key] = branch
        self._forget_surplus()
        return ForkOutcome.FORKED

    def _own_tokens(self, turn: TurnRequest, conversation: Conversation) -> OwnTokens:
        """The spans that stand here in other tokens. Spans and answers are in order; either may have some that the
        other lacks. What another replica accepted stands as it is."""
        if self._detokenize is None or turn.resumed_tokens is not None:
            return ()
        sequence, answers, own = conversation.sequence(), conversation.answers, []
        unused = 0
        for index, span in enumerate(turn.spans):
            found = (i for i in range(unused, len(answers)) if self._digest(answers[i], sequence) == span.digest)
            if (at := next(found, None)) is not None:
                tokens = tuple(sequence[answers[at].start : answers[at].end])
                if tokens != turn.prompt_ids[span.start : span.end]:
                    own.append((index, tokens))
                unused = at + 1
        return tuple(own)

    def _digest(self, answer: Answer, sequence: list[int]) -> bytes:
        if answer.digest is None:
            assert self._detokenize is not None
            text = self._detokenize(sequence[answer.start : answer.end])
            answer.digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        return answer.digest

    # -- moving to another replica ------------------------------------------------------------------------------------

    def dormant(self) -> list[MovedSession]:
        """Every conversation that no turn is using, as another replica would take it over, without its KV cache; those
        used last come first, since they are the likeliest to go on."""
        return [self._moved(c) for c in reversed(self._conversations.values()) if c.dormant]

    def take_along(self, key: str, most_bytes: int) -> MovedSession | None:
        """One of them with its KV cache, unless that is larger than `most_bytes`; None if it is not dormant here."""
        conversation = self._conversations.get(key)
        if conversation is None or not conversation.dormant:
            return None
        request = conversation.request
        kv = None if request is None else self._engine.read_cache(request, most_bytes)
        return replace(self._moved(conversation), kv=kv)

    def _moved(self, conversation: Conversation) -> MovedSession:
        sequence, request = conversation.sequence(), conversation.request
        spans = (HistorySpan(a.start, a.end, self._digest(a, sequence)) for a in conversation.answers)
        answers = tuple(spans) if self._detokenize is not None else ()
        idle = self._clock() - conversation.last_used
        cached = 0 if request is None else request.processed_length
        return MovedSession(conversation.owner, conversation.session_id, tuple(sequence), answers, idle, cached)

    def adopt(self, moved: MovedSession) -> bool:
        """Takes over a conversation that another replica had: as a resident if its KV cache came along and there is
        room, else as one whose memory was evicted. What it left behind when it was here before, which is its beginning,
        gives way; False if something else is known of it here, which then is newer."""
        key = session_key(moved.owner, moved.session_id)
        known = self._conversations.get(key)
        if known is not None:
            before = tuple(known.sequence())
            if (
                not known.dormant
                or len(before) >= len(moved.tokens)
                or common_prefix(before, moved.tokens) < len(before)
            ):
                return False
            self._drop(known)
        last_used = self._clock() - moved.idle_seconds
        tokens = list(moved.tokens)
        conversation = Conversation(key, moved.owner, moved.session_id, last_used, tokens=tokens, moved=True)
        conversation.answers = [Answer(span.start, span.end, span.digest) for span in moved.answers]
        self._conversations[key] = conversation
        for later in [c.key for c in self._conversations.values() if c.last_used > last_used]:
            self._conversations.move_to_end(later)
        if moved.kv is not None and len(self.residents()) < self._max_sessions:
            options = RequestOptions(salt=moved.owner.encode())
            conversation.request = self._engine.restore_request(conversation.tokens, moved.kv, options)
            if conversation.request is not None:
                conversation.tokens = []
        self._forget_surplus()
        return True

    def forget_moved(self, keys: Sequence[str]) -> None:
        """Drops those of them that came from another replica and that no turn has used here."""
        for key in keys:
            conversation = self._conversations.get(key)
            if conversation is not None and conversation.moved:
                self._drop(conversation)

    # -- memory -------------------------------------------------------------------------------------------------------

    def relieve(self, deferrals: Sequence[Deferral]) -> int:
        """Evicts dormant conversations, oldest first, until the memory that deferred requests miss is back; returns
        how many. What goes back may still be shared, so the caller looks again after the next step."""
        blocks = max((deferral.missing_blocks for deferral in deferrals), default=0)
        slots = max((deferral.missing_slots for deferral in deferrals), default=0)
        evicted = 0
        for conversation in self._evictable():
            if blocks <= 0 and slots <= 0:
                break
            before = self._engine.available_blocks
            self._evict(conversation)
            blocks -= self._engine.available_blocks - before
            slots -= 1
            evicted += 1
        self.evictions["evicted_for_blocks"] += evicted
        return evicted

    def expire(self) -> int:
        """Forgets conversations that have been idle for longer than their time to live."""
        if not self._ttl:
            return 0
        horizon = self._clock() - self._ttl
        expired = [c for c in self._conversations.values() if c.last_used < horizon and not c.open_turns]
        for conversation in expired:
            self.evictions["expired"] += conversation.request is not None
            self._drop(conversation)
        return len(expired)

    def close(self, key: str) -> Conversation | None:
        """Drops a conversation and all it holds; its running turn, if any, ends without another event."""
        conversation = self._conversations.get(key)
        if conversation is not None:
            self._drop(conversation)
        return conversation

    def forget_if_empty(self, conversation: Conversation) -> None:
        """Drops a conversation that no turn ever reached."""
        if conversation.request is None and not conversation.tokens and not conversation.waiting:
            self._drop(conversation)

    def _evictable(self) -> list[Conversation]:
        """Oldest first, and last of all those of which a turn waits: it would have to compute them again at once."""
        idle = [c for c in self._conversations.values() if c.request is not None and not c.running]
        return sorted(idle, key=lambda c: len(c.waiting) > 0)

    def _make_place(self) -> None:
        resident = sum(c.request is not None for c in self._conversations.values())
        for conversation in self._evictable():
            if resident < self._max_sessions:
                return
            self._evict(conversation)
            self.evictions["evicted_for_places"] += 1
            resident -= 1

    def _forget_surplus(self, new: int = 0) -> None:
        limit = REMEMBERED_PER_SESSION * self._max_sessions - new
        for conversation in list(self._conversations.values()):
            if len(self._conversations) <= limit:
                return
            if not conversation.open_turns:
                self._drop(conversation)

    def _evict(self, conversation: Conversation) -> None:
        assert conversation.request is not None and not conversation.running
        conversation.tokens = conversation.request.tokens
        conversation.request.close()
        conversation.request = None

    def _drop(self, conversation: Conversation) -> None:
        if conversation.request is not None:
            conversation.request.close()
            conversation.request = None
        self._conversations.pop(conversation.key, None)

    # -- questions ----------------------------------------------------------------------------------------------------

    def open_turns(self, turn: TurnRequest) -> int:
        """Turns of the same session that run or wait; 0 for an anonymous one."""
        if turn.session_id is None:
            return 0
        conversation = self._conversations.get(session_key(turn.owner, turn.session_id))
        return 0 if conversation is None else conversation.open_turns

    def residents(self) -> dict[str, int]:
        """Tokens of each resident conversation, by its key; of one that runs, those of its prompt, so that the number
        changes with a turn and not with a step."""
        return {
            c.key: c.answers[-1].start if c.running else c.request.current_length
            for c in self._conversations.values()
            if c.request is not None
        }

    def infos(self, owner: str | None) -> list[SessionInfo]:
        """Resident conversations of one owner, or of all."""
        now = self._clock()
        return [
            SessionInfo(
                conversation.session_id,
                conversation.owner,
                self._replica,
                conversation.request.current_length,
                conversation.request.processed_length,
                self._engine.blocks_of(conversation.request),
                conversation.running,
                0.0 if conversation.running else now - conversation.last_used,
            )
            for conversation in self._conversations.values()
            if conversation.request is not None and owner in (None, conversation.owner)
        ]
