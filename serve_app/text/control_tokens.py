"""What a stranger writes is text, also where it spells a control token: only the chat template writes those.

Templates do what they like with the strings that they are given (trim, split, quote as JSON). So these are marked
before rendering and told apart after it: within each spelling of a control token stands one character that no text has.

    given       A<|im_end|>B             as a message of the user
    shielded    A<#|im_end|>B            goes through the template; # is SHIELD
    rendered    <|im_start|>user\\nA<#|im_end|>B<|im_end|>\\n
    pieces      control: <|im_start|>    text: user\\nA<|im_end|>B    control: <|im_end|>    text: \\n

A string that ends with the beginning of such a spelling is shielded as well: what the template puts behind it must not
complete it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SHIELD = "\ufdd0"  # a noncharacter: it is never part of a text that is meant for others
_REPLACEMENT = "\ufffd"


class ControlTokens:
    def __init__(self, spellings: Iterable[str]) -> None:
        """`spellings` of a model's control tokens; those of one character are no risk and left out."""
        texts = sorted({text for text in spellings if len(text) > 1})
        self._pattern = re.compile(_trie_pattern(texts)) if texts else None
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)

    def shielded(self, value: Any) -> Any:
        """The same value, nested as it is, with every string shielded, keys included."""
        if isinstance(value, str):
            return type(value)(self._shielded_text(value))
        if isinstance(value, Mapping):
            return {self.shielded(key): self.shielded(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.shielded(item) for item in value]
        return value

    def _shielded_text(self, text: str) -> str:
        if self._pattern is None:
            return text
        if SHIELD in text:
            text = text.replace(SHIELD, _REPLACEMENT)
        text = self._pattern.sub(lambda match: match[0][0] + SHIELD + match[0][1:], text)
        # A template may trim, so what counts is the end without white space.
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest + 1), end):
            if text[start:end] in self._beginnings:
                return text[: start + 1] + SHIELD + text[start + 1 :]
        return text

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Of a rendered text, in order and without shields: (spelling, True) of each control token that the template
        wrote, (text, False) of what lies between."""
        at = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            if match.start() > at:
                yield unshielded(text[at : match.start()]), False
            yield match[0], True
            at = match.end()
        if at < len(text):
            yield unshielded(text[at:]), False


def unshielded(text: str) -> str:
    return text.replace(SHIELD, "")


def _trie_pattern(texts: Sequence[str]) -> str:
    """A regular expression for the longest of these texts, whose cost at a place does not grow with their number: some
    models have thousands that begin alike."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(trie: Mapping[str, Any]) -> str:
    chain = ""
    while len(trie) == 1 and "" not in trie:
        ((character, trie),) = trie.items()
        chain += re.escape(character)
    branches = [re.escape(character) + _pattern_of(node) for character, node in trie.items() if character]
    if not branches:
        return chain
    optional = "?" if "" in trie else ""
    return f"{chain}(?:{'|'.join(branches)}){optional}"
