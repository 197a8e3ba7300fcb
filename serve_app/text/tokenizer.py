"""Text to token ids and back, for a Hugging Face folder or a GGUF file.

Only the `tokenizers` library is needed, so that a front door starts in a fraction of a second and without
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine_actor.errors import ModelError
from engine_actor.sampling.vocabulary import Vocabulary
from engine_actor.weights.gguf_file import GgufFile
from serve_app.text.control_tokens import SHIELD, ControlTokens, unshielded
from serve_app.text.errors import TokenizerError
from serve_app.text.gguf_vocabulary import build_tokenizer
from serve_app.text.least_tokens import LeastTokens
from serve_app.text.token_bytes import TokenBytes

_LONG = 16 * 1024  # characters
_MARK = "\x02"  # a character that no token joins with what follows it


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads.

    eos_token_ids   end an answer; empty if the files name none
    template        source of the chat template; None: the model has none
    special_tokens  name to text, such as bos_token: what a template may refer to
    """

    def __init__(
        self,
        backend: Backend,
        eos_token_ids: frozenset[int],
        bos_token_id: int | None,
        template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self.token_bytes = TokenBytes(backend)
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.template = template
        self.special_tokens = dict(special_tokens)

    @property
    def vocab_size(self) -> int:
        """Ids that have a token are all below this."""
        return len(self.token_bytes)

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """`special_tokens`: add those that the model expects around a plain text, such as BOS. A chat
        template writes its own.
        """
        if len(text) < _LONG:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special_tokens).ids
            return ids
        # Without the places of tokens in the text, which take most of the time and the memory of a long one.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        return list(encoding.ids)

    @cached_property
    def least_tokens(self) -> LeastTokens:
        """Of a text, by its bytes. Takes up to a second when it is first asked for."""
        return LeastTokens(self._backend, self.token_bytes)

    def vocabulary(self) -> Vocabulary:
        """For grammars. Spells every token, which takes up to half a second."""

        tokens = [self.token_bytes[i] for i in range(self.vocab_size)]
        return Vocabulary(tokens, self.token_bytes.special, self._encode_inside)

    def _encode_inside(self, text: str) -> list[int]:
        """Of a text that others precede: no space is put before it. What looks like a control token is text."""
        if not self.token_bytes.strips_space:
            return self._encode_plain(text)
        ids, spelled = self._encode_plain(_MARK + text), b""
        while ids and not spelled.endswith(_MARK.encode()):
            spelled += self.token_bytes[ids.pop(0)]
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """What looks like a control token is text, too."""
        ids = self.encode(text, special_tokens=False)
        return (
            ids if self.token_bytes.special.isdisjoint(ids) else self._plain.encode(text, add_special_tokens=False).ids
        )

    @cached_property
    def _plain(self) -> Backend:
        """Takes as much memory as the other one, and as long to read; hardly any text needs it."""
        plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Those of the vocabulary, by their spellings."""
        return ControlTokens(added.content for added in self._controls.values())

    @cached_property
    def _controls(self) -> dict[int, AddedToken]:
        return {i: token for i, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def control_token_at(self, text: str) -> frozenset[int]:
        """The control token with which a text begins, white space aside; empty if it begins with none."""
        piece, is_control = next(self.control_tokens.pieces(text.lstrip()), ("", False))
        return frozenset(i for i, token in self._controls.items() if is_control and token.content == piece)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what a chat template rendered. Where it holds shields, only control tokens that the template wrote
        become such tokens."""
        if SHIELD not in text:
            return self.encode(text, special_tokens=False)
        by_text = {token.content: (i, token) for i, token in self._controls.items()}
        ids: list[int] = []
        pieces = list(self.control_tokens.pieces(text))
        for at, (piece, is_control) in enumerate(pieces):
            if is_control:
                ids.append(by_text[piece][0])
                continue
            # A control token can swallow the white space around it.
            if at and pieces[at - 1][1] and by_text[pieces[at - 1][0]][1].rstrip:
                piece = piece.lstrip()
            if at + 1 < len(pieces) and by_text[pieces[at + 1][0]][1].lstrip:
                piece = piece.rstrip()
            ids += self._encode_plain(piece) if not at else self._encode_inside(piece)
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int] | None]:
        """Ids of what a chat template rendered, and where each of them ends in the text, without shields, as UTF-8.

        The ends are None if the tokens do not spell the text byte for byte, as when a normalizer changed it.
        """
        ids = self.encode_rendered(text)
        pieces = [self.token_bytes[i] for i in ids]
        spelled, expected = b"".join(pieces), unshielded(text).encode()
        if spelled == expected:
            return ids, list(accumulate(map(len, pieces)))
        if spelled == b" " + expected:  # SentencePiece puts a space before a text
            return ids, [end - 1 for end in accumulate(map(len, pieces))]
        return ids, None

    def decode(self, ids: Iterable[int], *, continuation: bool = False, control_tokens: bool = False) -> str:
        """The text of these tokens; bytes that are no UTF-8 become U+FFFD.

        `continuation`: other text stands before it, so a leading space is kept where a text of its own would
        lose it. `control_tokens`: they are spelled out, which otherwise are no part of the text.
        """
        special = frozenset[int]() if control_tokens else self.token_bytes.special
        text = b"".join(self.token_bytes[i] for i in ids if i not in special).decode(errors="replace")
        if self.token_bytes.strips_space and not continuation:
            return text.removeprefix(" ")
        return text


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a folder in Hugging Face layout or a GGUF file. Raises TokenizerError."""
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_gguf(path)
    raise TokenizerError(f"{path} is neither a folder nor a file")


def _from_gguf(path: Path) -> Tokenizer:
    try:
        metadata = GgufFile(path).fields
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    backend = build_tokenizer(metadata)

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: token_id(key) for name, key in ids.items()}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        frozenset(i for i in (named["eos_token"], token_id("eot"), token_id("eom")) if i is not None),
        named["bos_token"],
        template if isinstance(template, str) else None,
        {name: cast(str, backend.id_to_token(i)) for name, i in named.items() if i is not None},
    )


def _from_folder(folder: Path) -> Tokenizer:
    backend = _folder_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: text for name in names if (text := _token_text(config.get(name))) is not None}
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    eos: set[object] = {backend.token_to_id(special["eos_token"])} if "eos_token" in special else set()
    for name in ("generation_config.json", "config.json"):
        listed = _read_json(folder / name).get("eos_token_id")
        eos |= set(listed) if isinstance(listed, list) else {listed}
    return Tokenizer(
        backend,
        frozenset(i for i in eos if isinstance(i, int)),
        bos,
        _folder_template(folder, config),
        special,
    )


def _folder_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return Backend.from_file(str(file))
        # Older layouts need a conversion that only transformers knows. It is slow to import, hence not at the
        # top.
        from transformers import AutoTokenizer

        backend: Backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
        return backend
    except Exception as error:  # both libraries raise plain Exception for files that they cannot read
        raise TokenizerError(f"no tokenizer can be read from {folder}: {error}") from error


def _folder_template(folder: Path, config: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, Sequence) and not isinstance(template, str):  # several, by name
        named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", template)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    """A special token is written as its text or as an object with its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return content
