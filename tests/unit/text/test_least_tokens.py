"""A lower bound of a text's tokens, from its bytes alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from serve_app.text.errors import PromptTooLong
from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import Tokenizer
from tests.support.tokenizers import backend_of

# Long runs of one piece are where few tokens stand for many bytes. Some characters have no token, some normalize.
PIECES = ["a", " ", "the", " the", "\x04", "\n", "e\u0301", "\u1112\u1161\u11ab", "😀", "<|im_end|>", "</s>", "-", "7"]
TEXTS = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 200))).map(
    lambda runs: "".join(piece * times for piece, times in runs)
)


def copy_of(tokenizer: Tokenizer) -> Backend:
    backend: Backend = Backend.from_str(backend_of(tokenizer).to_str())
    return backend


@pytest.fixture(scope="module", params=["as it is", "NFC"])
def normalized(request: pytest.FixtureRequest, sentencepiece: Tokenizer) -> Tokenizer:
    backend = copy_of(sentencepiece)
    if request.param == "NFC":
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), backend.normalizer])
    return Tokenizer(backend, frozenset(), None, None, {})


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_it_never_says_too_much(smollm2: Tokenizer, normalized: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, normalized):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, special_tokens=False))


def test_it_says_something(smollm2: Tokenizer, normalized: Tokenizer) -> None:
    assert smollm2.least_tokens("a" * 8100) == 100  # the longest token has 81 bytes
    assert smollm2.least_tokens("\x04" * 8100) == 0  # there is no token for this one
    assert normalized.least_tokens("a" * 9000) > 500


def _stripping(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def _cutting(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")


def _splitting_space(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def _folding(backend: Backend) -> None:
    backend.normalizer = normalizers.NFKC()


def _replacing(backend: Backend) -> None:
    backend.normalizer = normalizers.Replace("aaaa", "a")


@pytest.mark.parametrize("change", [_stripping, _cutting, _splitting_space, _folding, _replacing])
def test_where_text_can_vanish_there_is_no_bound(change: Callable[[Backend], None], sentencepiece: Tokenizer) -> None:
    backend = copy_of(sentencepiece)
    change(backend)
    assert Tokenizer(backend, frozenset(), None, None, {}).least_tokens("a" * 10_000) == 0


def test_a_prompt_that_can_not_fit_is_not_tokenized(
    smollm2_prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenized")

    text = "a" * 810_000
    monkeypatch.setattr(Tokenizer, "encode", fail)
    with pytest.raises(PromptTooLong) as refused:
        smollm2_prompts.text(text, limit=9_999)
    assert (refused.value.at_least, refused.value.limit) == (10_000, 9_999)
    with pytest.raises(PromptTooLong):
        smollm2_prompts.chat([{"role": "user", "content": text}], limit=9_999)
    with pytest.raises(AssertionError):
        smollm2_prompts.text(text, limit=10_000)
    with pytest.raises(AssertionError):
        smollm2_prompts.text(text)
