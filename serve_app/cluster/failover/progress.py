"""What the caller of a turn has been told so far, and how another replica would go on from there."""

from __future__ import annotations

from dataclasses import replace

from engine_actor.messages import (
    EndReason,
    Failure,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnRequest,
    TurnTokens,
)


class Progress:
    def __init__(self, request: TurnRequest) -> None:
        self._request = request  # from acceptance on, with the history that the engine began from
        self.accepted: TurnAccepted | None = None
        self.complete = False
        self._moved = False
        self._tokens: list[int] = []  # of all choices; only a turn with one is resumed
        self._generated = dict.fromkeys(range(request.choices), 0)  # tokens of the choices that run

    @property
    def delivered(self) -> int:
        """Tokens that the caller has."""
        return len(self._tokens)

    @property
    def can_resume(self) -> bool:
        """Several choices of a turn share the blocks of one prompt, and some of them may have ended."""
        return self._request.choices == 1

    def next_request(self) -> TurnRequest:
        """What the next replica is asked: the turn itself, or what is left of it."""
        return self._request if self.accepted is None else self._request.resumed(self._tokens)

    def apply(self, delta: TurnDelta) -> TurnDelta | None:
        """What the caller is told of a replica's delta. A second acceptance is none of his business, and the end has
        the counts of the first."""
        if isinstance(delta, TurnAccepted):
            if self.accepted is not None:
                self._moved = True
                return None
            self.accepted = delta
            self._request = self._request.with_own_tokens(delta.own_tokens)
        elif isinstance(delta, TurnTokens):
            self._tokens += delta.token_ids
            self._generated[delta.choice] += len(delta.token_ids)
        elif isinstance(delta, TurnEnded):
            del self._generated[delta.choice]
            self.complete = not self._generated
            if self._moved and self.accepted is not None:
                return replace(delta, cached_tokens=self.accepted.cached_tokens)
        else:
            self.complete = True
        return delta

    def missing_end(self, refused: TurnRefused | None = None) -> list[TurnEnded]:
        """The end of a turn of which nothing else was lost: it has all the tokens that it may have, by its own limit or
        by the longest sequence that a replica can hold, which then has `refused` it for its length. (EOS or a stop
        token is no part of what was delivered: the next replica draws it again.)"""
        if self.accepted is None or not self.can_resume:
            return []
        limit = self._request.max_generated_tokens
        full = refused is not None and refused.prompt_tokens == refused.limit
        return self._end(EndReason.LENGTH) if full or 0 < limit <= self.delivered else []

    def fail(self, failure: Failure, message: str) -> list[TurnEnded]:
        """The ends of the choices that were running."""
        return self._end(EndReason.FAILED, message, failure)

    def _end(self, reason: EndReason, message: str = "", failure: Failure = Failure.ENGINE) -> list[TurnEnded]:
        assert self.accepted is not None
        self.complete = True
        prompt, cached = self.accepted.prompt_tokens, self.accepted.cached_tokens
        return [
            TurnEnded(reason, prompt, cached, generated, message, choice, failure)
            for choice, generated in self._generated.items()
        ]
