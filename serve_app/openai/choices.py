"""One answer of a turn as it grows: its text, and what is told of its tokens when their text is out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_actor.messages import TurnTokens
from engine_actor.sampling.logprobs import TokenLogprob
from serve_app.text.calls import CallDelta, Calls, CallSplitter, joined_calls
from serve_app.text.stream import AnswerText, TokenPlaces
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of an answer, and where in the answer's text it begins, in characters."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next text of one choice, or all of it. `tokens` are those whose text is out with it, if they were asked
    for; a character that is spread over tokens, or text that was held back, lets them come later than its beginning."""

    choice: int
    text: str
    tokens: tuple[PlacedToken, ...] = ()
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.calls)


class ChoiceText:
    """Tokens of one choice in, pieces out. `generated` counts the tokens that made the answer."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        logprobs: bool = False,
        calls: Calls = Calls.NOWHERE,
    ) -> None:
        """Calls are told from the text. Logprobs are for text alone."""
        assert not logprobs or calls is Calls.NOWHERE
        self._index = index
        self._calls = None if calls is Calls.NOWHERE else CallSplitter(calls)
        self._places = TokenPlaces() if logprobs else None
        self._text = AnswerText(tokenizer, stops, self._places)
        self._logprobs: deque[TokenLogprob] = deque()

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def generated(self) -> int:
        return self._text.tokens

    @property
    def has_calls(self) -> bool:
        """When it has ended: there are calls, and all of them are whole."""
        return self._calls is not None and self._calls.calls > 0 and not self._calls.cut

    def push(self, tokens: TurnTokens) -> Piece:
        self._logprobs.extend(tokens.logprobs)
        piece = self._piece(self._text.push(tokens.token_ids))
        return self._with_the_last(piece) if self.stopped else piece

    def finish(self) -> Piece:
        return self._with_the_last(self._piece(self._text.finish()))

    def _with_the_last(self, piece: Piece) -> Piece:
        """What waited for the text that now does not come."""
        if self._calls is None:
            return piece
        text, calls = self._calls.finish()
        return replace(piece, text=piece.text + text, calls=tuple(joined_calls((*piece.calls, *calls))))

    def _piece(self, text: str) -> Piece:
        if self._calls is not None:
            shown, calls = self._calls.push(text)
            return Piece(self._index, shown, calls=tuple(calls))
        if self._places is None:
            return Piece(self._index, text)
        offsets = self._places.drain()
        return Piece(self._index, text, tuple(PlacedToken(self._logprobs.popleft(), at) for at in offsets))


def joined(pieces: Sequence[Piece], choices: int) -> list[Piece]:
    """The whole of each choice."""
    texts: list[list[str]] = [[] for _ in range(choices)]
    calls: list[list[CallDelta]] = [[] for _ in range(choices)]
    tokens: list[list[PlacedToken]] = [[] for _ in range(choices)]
    for piece in pieces:
        texts[piece.choice].append(piece.text)
        tokens[piece.choice] += piece.tokens
        calls[piece.choice] += piece.calls
    return [Piece(i, "".join(texts[i]), tuple(tokens[i]), tuple(joined_calls(calls[i]))) for i in range(choices)]
