"""What a caller chooses: per request and per turn. (For an engine: `engine_actor.limits`.)

Both are frozen, so a snapshot is a reference: nobody can change options after they were used (F015, F049).
Bad values raise `InvalidOption`, which names the field and the value, before anything is changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from engine_actor.errors import InvalidOption

MAX_INT32 = 2**31 - 1
UNBOUNDED = MAX_INT32
MIN_TEMPERATURE = 1e-5  # below it only the largest logit has any weight left in float32


def require_integer(name: str, value: object, low: int, high: int = MAX_INT32) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidOption(name, value, f"an integer from {low} to {high}")


def require_number(name: str, value: object, low: float, high: float) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= value <= high:  # type: ignore[operator]
        raise InvalidOption(name, value, f"a number from {low} to {high}")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What holds for a request's whole life.

    max_session_tokens  prompt + generated + all continuation input; 0: the engine's max_length (F023)
    salt                tenant: only requests of equal salt share prefix blocks
    num_beams           anything but 1 is refused (F013)
    """

    max_session_tokens: int = 0
    salt: bytes = b""
    num_beams: int = 1

    def __post_init__(self) -> None:
        require_integer("max_session_tokens", self.max_session_tokens, 0)
        if self.num_beams != 1:
            raise InvalidOption("num_beams", self.num_beams, "1 (beam search is not served)")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from its logits: bias and penalties, temperature, min_p, top_k, top_p over what top_k left.

    temperature 0 (or below 1e-5) or top_k 1 is greedy. top_k 0, top_p 1 and min_p 0 mean no limit. `seed` is the key of
    the random stream; the counter is the token's absolute index in its sequence, so a draw depends on nothing else.

    min_p                 least probability, as a share of the likeliest token's
    presence_penalty      taken once from the logit of each token that this turn has generated
    frequency_penalty     taken as often as this turn has generated it
    repetition_penalty    divides the positive and multiplies the negative logits of all tokens in the sequence (F279)
    logit_bias            (token, bias) pairs that are added to the logits
    no_repeat_ngram_size  n: no token may complete a run of n tokens that the sequence has already (F280); 0: any may
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0.0, 100.0)
        require_integer("top_k", self.top_k, 0)
        require_number("top_p", self.top_p, 0.0, 1.0)
        require_integer("seed", self.seed, 0, 2**64 - 1)
        require_number("min_p", self.min_p, 0.0, 1.0)
        require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        require_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        for token, bias in self.logit_bias:
            require_integer("logit_bias", token, 0)
            require_number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def reshapes(self) -> bool:
        """The logits are changed before a token is chosen."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.logit_bias or self.no_repeat_ngram_size)


class GrammarKind(StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # in the dialect of llguidance


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The grammar that an answer follows: its text, and what that is written in. `trigger`: until the answer has this
    text any token may come, which the grammar must allow; so most steps of such an answer need no mask. `writes_json`:
    what comes, from the trigger on, has quotes and brackets as those of JSON alone; so no key of an object comes
    twice."""

    kind: GrammarKind
    data: str
    trigger: str = ""
    writes_json: bool = False

    def __post_init__(self) -> None:
        if not self.kind or not self.data:
            rule = "both: guidance type and data must be provided together"  # F287
            raise InvalidOption("grammar", self.kind or self.data, rule)


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """What holds for one turn (C10).

    max_generated_tokens  0: no limit beyond the session's (F024)
    stop_token_ids        end the turn as EOS does, with reason StopSequence
    ignore_eos            EOS is an ordinary token
    min_generated_tokens  before this many, nothing that would end the turn can be chosen (C12)
    logprobs              None: none; k: the chosen token's logarithm of probability, and those of the k likeliest
    priority              lower goes first; equal priorities keep their order
    grammar               None: any text. A grammar says when an answer may end, so EOS can't be ignored beside one, nor
                          a minimum be set
    resumed_tokens        so many last tokens of the sequence were generated by this turn on another engine: they count
                          as generated, for limits, penalties and usage
    """

    max_generated_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    priority: int = 0
    min_generated_tokens: int = 0
    logprobs: int | None = None
    resumed_tokens: int = 0
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        require_integer("max_generated_tokens", self.max_generated_tokens, 0)
        most = self.max_generated_tokens or MAX_INT32
        require_integer("min_generated_tokens", self.min_generated_tokens, 0, most)
        require_integer("resumed_tokens", self.resumed_tokens, 0, most - 1)
        if self.logprobs is not None:
            require_integer("logprobs", self.logprobs, 0)
        require_integer("priority", self.priority, -MAX_INT32)
        if self.grammar is not None and (self.ignore_eos or self.min_generated_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_generated_tokens"
            raise InvalidOption(name, getattr(self, name), "absent beside a grammar, which says when an answer may end")
        for token in self.stop_token_ids:
            require_integer("stop_token_ids", token, 0)
