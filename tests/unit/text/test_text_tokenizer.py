from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.weights.gguf_file import GgufFile
from serve_app.text.errors import TokenizerError
from serve_app.text.gguf_vocabulary import build_tokenizer
from serve_app.text.tokenizer import Tokenizer, load_tokenizer

# SmolLM2 has no token for some control characters and for the first byte of the unassigned planes.
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF), max_size=60)


def test_smollm2_gives_the_ids_that_its_model_was_trained_with(smollm2: Tokenizer) -> None:
    # Digits stand alone, also after a space: the published tokenizer splits them before byte-level BPE.
    cases = {
        "Hello world": [19556, 905],
        "12345 émoji 😀 中文": [33, 34, 35, 36, 37, 26411, 15771, 10381, 40303, 218, 216, 28589, 29184],
        "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
        "a  5": [81, 256, 37],
        "don't": [12420, 982],
    }
    for text, ids in cases.items():
        assert smollm2.encode(text, special_tokens=True) == ids, text


def test_smollm2_knows_its_special_tokens_and_template(smollm2: Tokenizer) -> None:
    assert smollm2.eos_token_ids == {2}
    assert smollm2.bos_token_id == 1
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.vocab_size == 49152
    assert smollm2.template is not None and "<|im_start|>" in smollm2.template


def test_agrees_with_transformers_on_the_same_file(smollm2: Tokenizer, smollm2_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    # No digit after a space here: for that transformers' conversion misses the model's own splitting rule.
    for text in ["Hello!\n\n  def f(x):\n\treturn x", "Größe 中文 😀 العربية", "it's   spaced\r\nout   ", ""]:
        ids = smollm2.encode(text, special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert smollm2.decode(ids) == theirs.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_decoding_gives_the_text_back(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text, special_tokens=False)) == text


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_ends_are_where_the_tokens_end(smollm2: Tokenizer, text: str) -> None:
    ids, ends = smollm2.encode_with_ends(text)
    assert ends is not None and len(ends) == len(ids)
    start = 0
    for token_id, end in zip(ids, ends, strict=True):
        assert text.encode()[start:end] == smollm2.token_bytes[token_id]
        start = end
    assert start == len(text.encode())


def test_there_are_no_ends_where_the_tokens_do_not_spell_the_text(smollm2: Tokenizer) -> None:
    assert smollm2.encode_with_ends("a\x16b")[1] is None


@settings(max_examples=200, deadline=None)
@given(text=st.text("the a.é😀", max_size=30))
def test_sentencepiece_text_comes_back_and_its_ends_are_right(sentencepiece: Tokenizer, text: str) -> None:
    ids, ends = sentencepiece.encode_with_ends(text)
    assert sentencepiece.decode(ids) == text
    if text:
        assert ends is not None and ends[-1] == len(text.encode())


def test_a_continuation_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the", special_tokens=False)
    assert sentencepiece.decode(ids) == "the"
    assert sentencepiece.decode(ids, continuation=True) == " the"


def test_control_tokens_are_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([1, 4093, 2]) == "user"


def test_ids_beyond_the_vocabulary_are_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([19556, 49152, 10**9, -1]) == "Hello"


def test_a_folder_gives_the_same_tokenizer(smollm2: Tokenizer, smollm2_path: Path, tmp_path: Path) -> None:
    build_tokenizer(GgufFile(smollm2_path).fields).save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": "mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    folder = load_tokenizer(tmp_path)
    assert folder.encode("a  5 中文", special_tokens=True) == smollm2.encode("a  5 中文", special_tokens=True)
    assert folder.eos_token_ids == {0, 2}
    assert folder.bos_token_id == 1
    assert folder.template == "mine"
    (tmp_path / "chat_template.jinja").write_text("in its own file")
    assert load_tokenizer(tmp_path).template == "in its own file"
    several = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_tokenizer(tmp_path).template == "a"


def test_a_folder_in_an_older_layout_is_converted_by_transformers(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "<|endoftext|>": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab a", special_tokens=False) == [2, 3, 0]
    assert tokenizer.eos_token_ids == {4}


def gguf(entries: dict[str, object], version: int = 3) -> bytes:
    """A GGUF header with these keys and no tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(item: object) -> bytes:
        match item:
            case bool():
                return struct.pack("<I?", 7, item)
            case int():
                return struct.pack("<II", 4, item)
            case str():
                return struct.pack("<I", 8) + string(item)
            case list() if item and isinstance(item[0], str):
                return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
            case list() if item and isinstance(item[0], float):
                return struct.pack(f"<IIQ{len(item)}f", 9, 6, len(item), *item)
            case list():
                return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
        raise AssertionError(item)

    body = b"".join(string(key) + value(item) for key, item in entries.items())
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(entries)) + body


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        "<0xC3>",
        "<0xA9>",
        "▁",
        "a",
        "b",
        "ab",
        "▁ab",
        "bb",
        "\n\n",
    ],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_a_sentencepiece_file_merges_by_score(write_gguf: Callable[[bytes], Path]) -> None:
    tokenizer = load_tokenizer(write_gguf(gguf(SENTENCEPIECE)))
    # "bb" has a lower score than "ab", so "abb" is ab + b.
    assert tokenizer.encode("abb", special_tokens=True) == [1, 9, 7]
    assert tokenizer.encode("bb ab", special_tokens=False) == [5, 10, 9]
    assert tokenizer.encode("é\n\na", special_tokens=False)[1:3] == [3, 4]
    assert 11 in tokenizer.encode("a\n\na", special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("abb é", special_tokens=True)) == "abb é"
    assert tokenizer.template is None


def test_a_sentencepiece_file_can_go_without_the_leading_space(write_gguf: Callable[[bytes], Path]) -> None:
    off = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    entries = SENTENCEPIECE | off
    tokenizer = load_tokenizer(write_gguf(gguf(entries)))
    assert tokenizer.encode("ab ab", special_tokens=True) == [8, 9]
    assert tokenizer.decode([9]) == " ab"


@pytest.mark.parametrize(
    ("cut", "text", "pieces"),
    [
        ("gpt-2", "x 12", ["x", " 12"]),
        ("smollm", "x 12", ["x", " ", "1", "2"]),
        ("llama-bpe", "x1234\n\nDON'T", ["x", "123", "4", "\n\n", "DON", "'T"]),
        ("qwen2", "x12 (y)", ["x", "1", "2", " (", "y", ")"]),
    ],
)
def test_text_is_cut_as_the_file_says(cut: str, text: str, pieces: list[str]) -> None:
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "Ċ"]
    backend = build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": cut,
            "tokenizer.ggml.tokens": letters,
            "tokenizer.ggml.merges": [],
        }
    )
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    cuts = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in found]
    assert cuts == pieces


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"PK\x03\x04" + bytes(100), "does not start with 'GGUF'"),
        (gguf({"a": "b"}, version=1), "version 1"),
        (gguf(SENTENCEPIECE)[:-20], "header is damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "header is damaged"),
        (gguf({"a": "b"}), "holds no vocabulary"),
        (gguf(SENTENCEPIECE | {"tokenizer.ggml.model": "bert"}), "'bert'"),
        (gguf(SENTENCEPIECE | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "viking"}), "'viking'"),
        (gguf(SENTENCEPIECE | {"tokenizer.ggml.scores": [0.0]}), "one score for each"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(
    write_gguf: Callable[[bytes], Path], content: bytes, reason: str
) -> None:
    with pytest.raises(TokenizerError, match=reason):
        load_tokenizer(write_gguf(content))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer can be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="neither a folder nor a file"):
        load_tokenizer(tmp_path / "missing")


def test_a_decoder_that_is_not_known_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders
    from tokenizers.models import WordPiece

    backend = Backend(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(tmp_path)
