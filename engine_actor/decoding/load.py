"""From options to a decoder in memory, with the free memory that its pools may take."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine_actor.actor_options import ActorOptions
from engine_actor.decoding.decoder import Decoder
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.free_memory import free_host_bytes
from engine_actor.stopwatch import Stopwatch
from engine_actor.weights.checkpoint import LoadProgress
from kernels import native


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    decoder: Decoder
    free_bytes: int
    weight_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # of the steps of loading
    notes: tuple[str, ...] = ()  # what makes it slower than it could be, and what to do


def load_decoder(options: ActorOptions, progress: LoadProgress | None = None) -> LoadedDecoder:
    """Loads weights and sets the thread count of the math library for this process.

    progress(done, total) is called as tensors arrive. Raises UnsupportedModel for a checkpoint that cannot be served.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    watch = Stopwatch()
    with watch.step("build or load kernels"):
        available, reason = native.status()
    with watch.step("load weights"):
        decoder = TorchDecoder.load(
            options.model, dtype=options.dtype, device=options.device, weights=options.weights, progress=progress
        )
    if decoder.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(decoder.device)
    else:
        free_bytes = free_host_bytes()
    slow = decoder.device.type == "cpu" and not available
    notes = (f"no native kernels, so it is several times slower: {reason}",) if slow else ()
    return LoadedDecoder(decoder, free_bytes, decoder.weight_bytes, watch.seconds, notes)
