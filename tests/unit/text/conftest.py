from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2: Tokenizer) -> PromptBuilder:
    return PromptBuilder(smollm2)


def sentencepiece_backend() -> Backend:
    """A small SentencePiece-like tokenizer as Llama 2 has it: byte fallback and a space before every text."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "▁a", "▁the", "th", "the", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    backend = Backend(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), frozenset({2}), 1, None, {"bos_token": "<s>", "eos_token": "</s>"})
