"""The torch backend: a transformer over packed tokens with its keys and values in paged pools, on CPU or CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_actor.decoding.decoder import Int64, Launched, PackedStep
from engine_actor.decoding.failures import step_failures
from engine_actor.decoding.host_sampler import Float32, HostSampler
from engine_actor.errors import ContractViolation, InvalidOption
from engine_actor.manifest import DecoderManifest
from engine_actor.memory.layout import PoolGeometry
from engine_actor.models.rotary_table import RotaryTable
from engine_actor.models.step_tensors import StepTensors
from engine_actor.models.transformer import Transformer
from engine_actor.sampling.sample_row import SampleRow
from engine_actor.weights.checkpoint import LoadProgress
from engine_actor.weights.header import require_head_size
from engine_actor.weights.opening import open_checkpoint
from kernels import native
from kernels.block_copy import copy_blocks
from kernels.paged_attention import attention_is_row_invariant

WEIGHTS = ("auto", "stored", "expanded")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# numpy has no bfloat16.
_PLAIN = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}
_CACHE_LINE = 64
MAX_DRAFT_TOKENS = 16


class TorchDecoder:
    """Implements `Decoder`. Made by `load`."""

    def __init__(self, model: Transformer, device: torch.device, dtype: torch.dtype) -> None:
        config = model.config
        self._model, self._device, self._dtype = model, device, dtype
        self._pools: PoolGeometry | None = None
        self._sampler = HostSampler()
        self._manifest = DecoderManifest(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            eos_token_ids=config.eos_token_ids,
            paged=config.paged_state(dtype.itemsize),
            # Only where a row is the same in any company does a verified draft say what decoding would have said.
            max_draft_tokens=MAX_DRAFT_TOKENS if self.row_invariant else 0,
            cache_identity=f"{model.fingerprint} {dtype}",
        )

    @staticmethod
    def load(
        path: str | Path,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        weights: str = "auto",
        progress: LoadProgress | None = None,
    ) -> TorchDecoder:
        """Reads a Hugging Face folder or a GGUF file.

        dtype     of the KV cache and of expanded matrices: "bfloat16" or "float32"; products are summed in float32
        weights   quantized matrices stay "stored" as the file has them, or are "expanded" to dtype; "auto": stored
                  where that can run, which is on a CPU with a compiler
        device    "auto" (CUDA where there is one), "cpu" or "cuda"
        progress  called with (tensors read, tensors in the checkpoint)
        Raises InvalidOption, UnreadableModel or UnsupportedModel.
        """
        if dtype not in _DTYPES:
            raise InvalidOption("dtype", dtype, " or ".join(map(repr, _DTYPES)))
        where = _choose_device(device)
        as_stored = _choose_stored(weights, where)
        checkpoint = open_checkpoint(path, progress)
        require_head_size(str(path), checkpoint.config)
        with torch.inference_mode():
            model = Transformer(checkpoint, _DTYPES[dtype], where, as_stored)
        return TorchDecoder(model, where, _DTYPES[dtype])

    @property
    def manifest(self) -> DecoderManifest:
        return self._manifest

    @property
    def device(self) -> torch.device:
        """Where the weights and the pools are."""
        return self._device

    @property
    def weight_bytes(self) -> int:
        """Memory of the model's matrices."""
        return self._model.weight_bytes

    @property
    def row_invariant(self) -> bool:
        """As far as linears and attention are, on this device and processor; all else treats each row by itself."""
        config = self._model.config
        return all(linear.row_invariant for linear in self._model.linears()) and attention_is_row_invariant(
            config.heads, config.kv_heads, config.head_size, self._device.type
        )

    def allocate(self, pools: PoolGeometry) -> None:
        """Reserves the pools; on the CPU the machine gives the pages when they are first written."""
        if self._pools is not None:
            raise ContractViolation("the pools of this decoder are allocated already")
        config = self._model.config
        shape = (pools.num_blocks, pools.block_size, config.kv_heads, config.head_size)
        with torch.inference_mode():
            for layer in self._model.layers:
                layer.attention.bind(self._pool(shape), self._pool(shape))
            length = min(config.context_length, pools.num_blocks * pools.block_size)
            self._rotary = RotaryTable(config.rope, config.head_size, length, self._device)
            same = config.local_rope == config.rope
            self._local_rotary = (
                self._rotary if same else RotaryTable(config.local_rope, config.head_size, length, self._device)
            )
        self._pools = pools

    def launch(self, step: PackedStep, rows: Sequence[SampleRow]) -> Launched:
        return self._sampler.launch(self._forward_to_host, step, rows)

    def _forward_to_host(self, step: PackedStep) -> Float32:
        with step_failures(len(step.input_ids)):
            logits: Float32 = self.forward(step).cpu().numpy()
            return logits

    @torch.inference_mode()
    def forward(self, step: PackedStep) -> Tensor:
        """Logits, float32 [len(step.logits_rows), vocab_size], on `device`. Raises what torch raises."""
        for layer in self._model.layers if step.block_copies else ():
            copy_blocks(layer.attention.key_cache, layer.attention.value_cache, step.block_copies)
        return self._model(self._on_device(step))

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> NDArray[Any]:
        pools = self._paged_pools()
        index = torch.tensor(blocks, device=self._device)
        shape = (len(pools), len(blocks), *pools[0].shape[1:])
        parts = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part, pool in zip(parts, pools, strict=True):
            torch.index_select(pool, 0, index, out=part)
        content: NDArray[Any] = parts.cpu().view(_PLAIN[self._dtype]).numpy()
        return content

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], content: NDArray[Any]) -> None:
        index = torch.tensor(blocks, device=self._device)
        for pool, part in zip(self._paged_pools(), content, strict=True):
            # `torch.tensor` copies, which is what a read-only array needs; a part is small.
            pool.index_copy_(0, index, torch.tensor(part, device=self._device).view(self._dtype))

    def _paged_pools(self) -> list[Tensor]:
        attentions = [layer.attention for layer in self._model.layers]
        return [pool for attention in attentions for pool in (attention.key_cache, attention.value_cache)]

    def _on_device(self, step: PackedStep) -> StepTensors:
        if self._pools is None:
            raise ContractViolation("forward before allocate")
        positions = self._tensor(step.position_ids)
        rotary = self._rotary.at(positions)
        local = rotary if self._local_rotary is self._rotary else self._local_rotary.at(positions)
        tokens = len(step.input_ids)
        everything = np.array_equal(step.logits_rows, np.arange(tokens))
        return StepTensors(
            input_ids=self._tensor(step.input_ids),
            slots=self._tensor(slots_of(step, self._pools.block_size)),
            block_table=self._tensor(step.block_table),
            cumulative=self._tensor(step.cumulative_sequence_lengths),
            past=self._tensor(step.past_sequence_lengths),
            rotary=rotary,
            local_rotary=local,
            logits_rows=None if everything else self._tensor(step.logits_rows),
        )

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> Tensor:
        value = torch.from_numpy(array)
        return value if self._device.type == "cpu" else value.to(self._device, non_blocking=True)

    def _pool(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # numpy asks the system for zeroed pages, which cost nothing until they are used; torch writes the zeros.
        nbytes = int(np.prod(shape)) * self._dtype.itemsize
        raw = np.zeros(nbytes + _CACHE_LINE, np.uint8)
        start = -raw.ctypes.data % _CACHE_LINE
        return torch.from_numpy(raw[start : start + nbytes]).view(self._dtype).view(shape)


def slots_of(step: PackedStep, block_size: int) -> Int64:
    """Where the key and value of each packed token go: int64 [tokens], block * block_size + offset in the block."""
    lengths = np.diff(step.cumulative_sequence_lengths)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    blocks = step.block_table[rows, step.position_ids // block_size].astype(np.int64)
    assert (blocks >= 0).all(), "a token lies past the end of its row's block table"
    slots: Int64 = blocks * block_size + step.position_ids % block_size
    return slots


def _choose_device(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidOption("device", device, "'auto', 'cpu' or 'cuda'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise InvalidOption("device", device, "'cpu' here: torch finds no CUDA device")
    return torch.device(device)


def _choose_stored(weights: str, device: torch.device) -> bool:
    if weights not in WEIGHTS:
        raise InvalidOption("weights", weights, " or ".join(map(repr, WEIGHTS)))
    available, reason = native.status()
    if weights != "stored":
        return weights == "auto" and device.type == "cpu" and available
    if device.type != "cpu":
        raise InvalidOption("weights", weights, f"'auto' or 'expanded' on {device.type}")
    if not available:
        raise InvalidOption("weights", weights, f"'auto' or 'expanded' where there are no native kernels: {reason}")
    return True
