"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF header.

Two kinds exist: "gpt2" (byte-level BPE, merges in the file) and "llama" (SentencePiece BPE, where a merge is
allowed when its result is a piece, and the piece of the highest score goes first). How text is cut before BPE
is only named in the file; a name that is not known here is refused, since a guess would give wrong tokens for
some texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from serve_app.text.errors import TokenizerError

_CONTROL, _USER_DEFINED = 3, 4  # token types

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS_BY_THREE = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_SINGLE_DIGITS = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


def build_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """Raises TokenizerError for a missing vocabulary and for kinds that are not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise TokenizerError("the file holds no vocabulary (tokenizer.ggml.tokens)")
    tokens = cast("list[str]", metadata["tokenizer.ggml.tokens"])
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, metadata)
    else:
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are known")
    types = cast("list[int]", metadata.get("tokenizer.ggml.token_type", []))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _of_type(tokens, types, _CONTROL)])
    # A normalizer that only writes spaces as SentencePiece does lets "▁▁" be found in a text; one that also
    # puts a space before it would do so before the token, too.
    normalized = kind == "llama" and not _prefixes_space(metadata)
    user_defined = _of_type(tokens, types, _USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=normalized) for token in user_defined])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and isinstance(bos, int):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _of_type(tokens: list[str], types: list[int], token_type: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=False) if kind == token_type]


def _prefixes_space(metadata: Mapping[str, object]) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _byte_level(tokens: list[str], metadata: Mapping[str, object]) -> Tokenizer:
    merges = [tuple(m.split(" ")) for m in cast("list[str]", metadata.get("tokenizer.ggml.merges", []))]
    cut = metadata.get("tokenizer.ggml.pre", "gpt-2")
    normalizer: normalizers.Normalizer | None = None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    splits: list[pre_tokenizers.PreTokenizer]
    if cut in ("gpt-2", "smollm"):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
        splits = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    elif cut == "llama-bpe":
        splits = [pre_tokenizers.Split(Regex(_DIGITS_BY_THREE), "isolated")]
    elif cut == "qwen2":
        normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(_SINGLE_DIGITS), "isolated")]
    else:
        raise TokenizerError(f"tokenizer.ggml.pre is {cut!r}; 'gpt-2', 'smollm', 'llama-bpe' and 'qwen2' are known")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe")  # type: ignore[arg-type]
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], metadata: Mapping[str, object]) -> Tokenizer:
    scores = cast("list[float]", metadata.get("tokenizer.ggml.scores"))
    if scores is None or len(scores) != len(tokens):
        raise TokenizerError("tokenizer.ggml.scores must hold one score for each token")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, scores),
        unk_token=tokens[unknown] if isinstance(unknown, int) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _prefixes_space(metadata):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two pieces, best score first, longest left half first among
    equals.
    """
    ranked: list[tuple[float, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]
