"""From what a client sends to what the engine takes: prompt ids, and where in them old answers stand.

An old answer may have come from this server. Its text says nothing about which tokens the model chose for
it, but the engine remembers: so every assistant message gets a span with a digest of its text, and the engine
can put its own tokens there. A span is given only where it is certain: the message stands in the prompt
unchanged, and its borders are token borders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from engine_actor.messages import HistorySpan
from serve_app.text.chat_template import ChatTemplate, Message
from serve_app.text.control_tokens import unshielded
from serve_app.text.errors import ChatTemplateError, PromptTooLong
from serve_app.text.stream import text_digest
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_prompts import spelled_out

Tools = Sequence[Mapping[str, object]]

# Characters. To tokenize less takes no longer than to find out that it is too much.
_LONG = 16 * 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ends`: tokens that end its answer beside the model's own: those by which the template ends one. A file can name
    the base model's end where its template has another."""

    ids: tuple[int, ...]
    spans: tuple[HistorySpan, ...] = ()
    ends: frozenset[int] = frozenset()


class PromptBuilder:
    """The tokenizer and the chat template of one model. Has no state; any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._turn_ends: frozenset[int] = frozenset()
        self.why_no_chat: str | None = None  # what every request with messages is told
        if tokenizer.template is None:
            self.why_no_chat = "This model has no chat template, so it can't chat; use /v1/completions."
            return
        try:
            self._template = ChatTemplate(tokenizer.template, tokenizer.special_tokens)
        except ChatTemplateError as error:
            self.why_no_chat = f"{error}. It serves /v1/completions only."
        else:
            ends = tokenizer.control_token_at(self._template.after_answer)
            self._turn_ends = ends - tokenizer.eos_token_ids

    @property
    def thinks(self) -> bool:
        """Whether answers begin with thoughts that the model's template could be asked to leave out."""
        return self._template is not None and self._template.thinks

    def text(self, text: str, *, limit: int | None = None) -> Prompt:
        """A plain text, with BOS where the model wants one. Raises PromptTooLong where it is certain, before it is
        tokenized, that it has more than `limit` tokens."""
        self._check_length(text, limit)
        return Prompt(tuple(self.tokenizer.encode(text, special_tokens=True)))

    def chat(self, messages: Sequence[Message], tools: Tools = (), *, limit: int | None = None) -> Prompt:
        """`tools`: as OpenAI has them, each with its `function`. Raises ChatTemplateError if the model has no template,
        or its template refuses the messages; PromptTooLong as `text` does."""
        if self._template is None:
            raise ChatTemplateError(self.why_no_chat)
        shielded = self.tokenizer.control_tokens.shielded
        # Roles are words of our own, which templates compare.
        messages = [cast(Message, shielded(message) | {"role": message["role"]}) for message in messages]
        tools = shielded(tools)
        if not self._template.knows_tools:
            messages, tools = spelled_out(messages, tools, system=self._template.knows_system), ()
        rendered = self._template.render(messages, tools)
        self._check_length(unshielded(rendered), limit)
        ids, ends = self.tokenizer.encode_with_ends(rendered)
        if ends is None or all(message["role"] != "assistant" for message in messages):
            return Prompt(tuple(ids), ends=self._turn_ends)
        borders = [0, *ends]
        spans = (
            HistorySpan(first, last, text_digest(answer))
            for start, end, answer in _answers_in(unshielded(rendered), self._frame(messages, tools), messages)
            if (first := _border(borders, start)) is not None and (last := _border(borders, end)) is not None
        )
        return Prompt(tuple(ids), tuple(spans), self._turn_ends)

    def _check_length(self, text: str, limit: int | None) -> None:
        if limit is not None and len(text) >= _LONG:
            least = self.tokenizer.least_tokens(text)
            if least > limit:
                raise PromptTooLong(least, limit)

    def _frame(self, messages: Sequence[Message], tools: Tools) -> list[str]:
        """The rendered text before each answer: from the start, or from the end of the answer before it.

        Found by rendering once more with marks in their place. Empty if the template can't do that.
        """
        assert self._template is not None
        marks = [f"\ue000{i}\ue001" for i, message in enumerate(messages) if message["role"] == "assistant"]
        waiting = iter(marks)
        marked = [cast(Message, {**m, "content": next(waiting)}) if m["role"] == "assistant" else m for m in messages]
        try:
            text = self._template.render(marked, tools)
        except ChatTemplateError:
            return []
        frame: list[str] = []
        at = 0
        for mark in marks:
            start = text.find(mark, at)
            if start < 0:  # this template leaves the answer out, so what follows can't be told apart
                return frame
            frame.append(unshielded(text[at:start]))
            at = start + len(mark)
        return frame


def _answers_in(rendered: str, frame: Sequence[str], messages: Sequence[Message]) -> Iterator[tuple[int, int, str]]:
    """(start, end, text) of each answer that stands unchanged in `rendered`, as far as the frame fits.

    Positions are those in `rendered.encode()`.
    """
    at = byte = 0
    answers = [unshielded(message["content"]) for message in messages if message["role"] == "assistant"]
    for before, answer in zip(frame, answers, strict=False):
        if not rendered.startswith(before, at):
            return
        at, byte = at + len(before), byte + len(before.encode())
        unchanged = rendered.startswith(answer, at)
        # Many templates trim. The text is then another one, but what follows can still be found.
        shown = answer if unchanged else answer.strip()
        if not rendered.startswith(shown, at):
            return
        start = byte
        at, byte = at + len(shown), byte + len(shown.encode())
        if unchanged and shown:
            yield start, byte, shown


def _border(borders: Sequence[int], position: int) -> int | None:
    """How many tokens end at or before this byte, if one of them ends exactly there.

    Tokens without bytes make borders equal; the first of them is taken, so that they stay outside to the
    right.
    """
    index = bisect_left(borders, position)
    return index if index < len(borders) and borders[index] == position else None
