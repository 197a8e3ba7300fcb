"""Messages between the front door and an EngineActor: plain data that crosses a process border.

A turn answers with exactly one of: a `TurnRefused`; or a `TurnAccepted`, any number of `TurnTokens`, one `TurnEnded`
for each of its choices.
Refusal is data, not an exception, so that the local and the remote path see the same thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from engine_actor.memory.kv_blocks import KvBlocks
from engine_actor.options import GrammarSpec, SamplingParams
from engine_actor.sampling.logprobs import TokenLogprob

OwnTokens = tuple[tuple[int, tuple[int, ...]], ...]
"""(index of a span, the tokens that stand there instead of the caller's), in order of the spans."""


@dataclass(frozen=True, slots=True)
class HistorySpan:
    """Tokens [start, end) of the prompt are an assistant message whose text has this sha256 digest."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn, validated and tokenized.

    request_id            for logs and traces
    cache_scope                 tenant, from the API key; part of every session's identity and of the prefix salt
    session_id            None: anonymous, nothing stays resident
    prompt_ids            the whole rendered prompt
    spans                 assistant messages in it, in order; where this server generated one, its own tokens are used
    max_generated_tokens  0: what the context leaves
    min_generated_tokens  before this many, nothing that would end the turn is chosen
    logprobs              None: none; k: those of each token and of the k likeliest in its place
    grammar               the grammar that each answer follows; None: any text
    choices               independent answers to the one prompt; all but the first are anonymous
    resumed_tokens        None: a new turn. k: one that another replica had accepted before it was lost; the last k of
                          `prompt_ids` are what it generated. Its history stands as it is, and no full queue refuses it
    """

    request_id: str
    cache_scope: str
    session_id: str | None
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_generated_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    priority: int = 0
    spans: tuple[HistorySpan, ...] = ()
    min_generated_tokens: int = 0
    logprobs: int | None = None
    choices: int = 1
    resumed_tokens: int | None = None
    grammar: GrammarSpec | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the answer."""
        return len(self.prompt_ids) - (self.resumed_tokens or 0)

    def with_own_tokens(self, own: OwnTokens) -> TurnRequest:
        """The same turn with other tokens in some of its spans."""
        if not own:
            return self
        tokens_of = dict(own)
        prompt: list[int] = []
        spans: list[HistorySpan] = []
        at = 0
        for index, span in enumerate(self.spans):
            prompt += self.prompt_ids[at : span.start]
            start = len(prompt)
            prompt += tokens_of.get(index, self.prompt_ids[span.start : span.end])
            spans.append(HistorySpan(start, len(prompt), span.digest))
            at = span.end
        return replace(self, prompt_ids=(*prompt, *self.prompt_ids[at:]), spans=tuple(spans))

    def resumed(self, generated: Sequence[int]) -> TurnRequest:
        """The turn as another replica goes on with it. `self` is as it was accepted."""
        return replace(self, prompt_ids=(*self.prompt_ids, *generated), resumed_tokens=len(generated))


class RefusalCode(StrEnum):
    """Why a turn was not accepted, and whether another replica could accept it."""

    CONTEXT_LENGTH = "context_length_exceeded"  # never fits: the client's to mend
    INVALID = "invalid_request"  # a value that the engine refuses
    GRAMMAR = "invalid_grammar"  # no grammar of its kind, or not one for this model
    SESSION_BUSY = "session_busy"  # too many turns of this session wait already
    QUEUE_FULL = "queue_full"  # this replica's queue is full
    UNAVAILABLE = "unavailable"  # draining, or its engine has failed


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """`limit` and `prompt_tokens` belong to CONTEXT_LENGTH, `retry_after` (seconds) to the temporary ones."""

    code: RefusalCode
    message: str
    prompt_tokens: int = 0
    limit: int = 0
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnAccepted:
    """The engine has taken the turn. `cached_tokens`: KV positions that are not recomputed; known at this moment,
    since the resident cache is matched when the turn begins. `own_tokens`: where history was taken from what this
    replica generated, and differs from the tokens of the request."""

    replica: str
    prompt_tokens: int
    cached_tokens: int
    own_tokens: OwnTokens = ()


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """All tokens of one step (or of several, for a reader that is behind) of one choice. EOS and stop tokens are not
    among them. `logprobs` has one entry a token if the turn asked for them, else none."""

    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class EndReason(StrEnum):
    STOP = "stop"  # EOS or a stop token
    LENGTH = "length"  # a turn or session limit
    FAILED = "failed"  # it could not go on; see the failure and the message


class Failure(StrEnum):
    """Why a turn ended as FAILED, and so who has to act."""

    ENGINE = "engine_failed"  # whoever runs the server: the same turn would fail again
    UNAVAILABLE = "unavailable"  # the engine is gone, and the turn is not to blame: another engine can go on with it
    SESSION_DELETED = "session_deleted"  # nobody: a client wanted it so
    GRAMMAR = "invalid_grammar"  # the client: its grammar gave up, and would do so again
    CONTEXT_LENGTH = "context_length_exceeded"  # the client: not even an empty pool could hold it


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The last message of a choice; an accepted turn ends with that of its last choice. `failure` and `message` belong
    to FAILED."""

    reason: EndReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    message: str = ""
    choice: int = 0
    failure: Failure = Failure.ENGINE

    @property
    def resumable(self) -> bool:
        """Another engine can go on with the turn."""
        return self.reason is EndReason.FAILED and self.failure is Failure.UNAVAILABLE


TurnDelta = TurnAccepted | TurnTokens | TurnEnded | TurnRefused


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A resident conversation. `cached_tokens` are in the KV cache; `idle_seconds` is 0 while a turn runs."""

    session_id: str
    cache_scope: str
    replica: str
    tokens: int
    cached_tokens: int
    blocks: int
    running: bool
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class MovedSession:
    """A dormant conversation on its way to another replica: what it takes to go on there, token for token.

    tokens         the whole sequence
    answers        [start, end) in it and the sha256 digest of the text, of answers in order
    cached_tokens  of them are in the KV cache, where it comes from
    kv             what that cache holds, if it comes along
    """

    cache_scope: str
    session_id: str
    tokens: tuple[int, ...]
    answers: tuple[HistorySpan, ...]
    idle_seconds: float
    cached_tokens: int = 0
    kv: KvBlocks | None = None


class ForkOutcome(StrEnum):
    """What became of the wish to fork a session."""

    FORKED = "forked"
    UNKNOWN = "unknown"  # no such session is here
    RUNNING = "running"  # a turn of it runs or waits
    EXISTS = "exists"  # the new name is taken
    UNANSWERED = "unanswered"  # an engine that may know one of the two has not answered


class DeleteOutcome(StrEnum):
    """What became of the wish to delete a session, wherever it is."""

    DELETED = "deleted"
    UNKNOWN = "unknown"  # no engine knows it
    UNANSWERED = "unanswered"  # no engine that has answered knows it, and some have not


@dataclass(frozen=True, slots=True)
class SessionHolding:
    """What one engine has of a session. `tokens`: of its whole sequence, cached or only remembered. `open`: turns of it
    run or wait there."""

    tokens: int
    open: bool


def session_key(cache_scope: str, session_id: str) -> str:
    """The name under which a session is resident and routed: bound to its cache scope, so that one tenant can neither
    reach nor guess another's session."""
    return hashlib.sha256(f"{len(cache_scope)}:{cache_scope}{session_id}".encode("utf-8", "surrogatepass")).hexdigest()
