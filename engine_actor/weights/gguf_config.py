"""The header of a GGUF file as a `ModelConfig`."""

from __future__ import annotations

from engine_actor.errors import UnreadableModel, UnsupportedModel
from engine_actor.weights.config import ModelConfig, RopeConfig
from engine_actor.weights.gguf_file import GgufFile
from engine_actor.weights.rope_scaling import linear_divisors

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

# Gemma 3 files do not say these; they are the same for all sizes but one (27B, known by its 62 layers).
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62

_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


class _Fields:
    """Typed look-ups under the architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self._prefix}.{key}"
        value = self._file.fields.get(name, default)
        if value is None:
            raise UnreadableModel(self._file.path, f"the header lacks {name!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModel(self._file.path, f"{name!r} must be a number, not {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def read_config(file: GgufFile, rope_divisors: tuple[float, ...]) -> ModelConfig:
    """rope_divisors: the file's `rope_freqs.weight`, or () where it has none.

    Raises UnsupportedModel for an architecture or a setting that Moorage cannot run, UnreadableModel for a missing key.
    """
    architecture = file.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        architectures = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            file.path, f"architecture {architecture!r} is not supported (supported: {architectures})"
        )
    fields = _Fields(file, str(architecture))
    if fields.integer("expert_count", 0) > 0:
        raise UnsupportedModel(file.path, f"{architecture}.expert_count: mixtures of experts are not supported")
    hidden, heads, layers = (fields.integer(key) for key in ("embedding_length", "attention.head_count", "block_count"))
    if heads < 1:
        raise UnreadableModel(file.path, f"{architecture}.attention.head_count must be at least 1, not {heads}")
    head_size = fields.integer("attention.key_length", hidden // heads)
    for key, expected in (("attention.value_length", head_size), ("rope.dimension_count", head_size)):
        if fields.integer(key, expected) != expected:
            raise UnsupportedModel(file.path, f"{architecture}.{key} must be {expected}, not {fields.integer(key)}")
    gemma = architecture == "gemma3"
    rope = RopeConfig(
        fields.number("rope.freq_base", 1_000_000.0 if gemma else 10_000.0),
        rope_divisors or _scaling(file, str(architecture), head_size),
    )
    score_size = hidden / heads if gemma and layers == _GEMMA3_27B_LAYERS else head_size
    try:
        return ModelConfig(
            architecture="gemma3" if gemma else "llama",
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=fields.integer("attention.head_count_kv", heads),
            head_size=head_size,
            intermediate_size=fields.integer("feed_forward_length"),
            vocab_size=_vocab_size(file),
            context_length=fields.integer("context_length"),
            rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            local_rope=RopeConfig(_GEMMA3_LOCAL_THETA) if gemma else rope,
            windows=_windows(fields, layers) if gemma else (0,) * layers,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            tie_embeddings="output.weight" not in file.tensors,
            activation="gelu_tanh" if gemma else "silu",
            embedding_scale=hidden**0.5 if gemma else 1.0,
            query_scale=score_size**-0.5,
            eos_token_ids=_end_tokens(file),
        )
    except ValueError as error:
        raise UnsupportedModel(file.path, str(error)) from error


def _windows(fields: _Fields, layers: int) -> tuple[int, ...]:
    window = fields.integer("attention.sliding_window")
    return tuple(window if (layer + 1) % _GEMMA3_PATTERN else 0 for layer in range(layers))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModel(file.path, "tensor 'model.embed_tokens.weight' ('token_embd.weight') is missing")
    return embedding.shape[0]


def _end_tokens(file: GgufFile) -> frozenset[int]:
    ids = (file.fields.get(f"tokenizer.ggml.{key}") for key in _END_TOKENS)
    return frozenset(token for token in ids if isinstance(token, int))


def _scaling(file: GgufFile, architecture: str, head_size: int) -> tuple[float, ...]:
    kind = file.fields.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return ()
    if kind == "linear":
        return linear_divisors(head_size, _Fields(file, architecture).number("rope.scaling.factor"))
    raise UnsupportedModel(file.path, f"{architecture}.rope.scaling.type {kind!r} is not supported")
