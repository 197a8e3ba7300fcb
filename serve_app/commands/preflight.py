"""What would stop a start on this machine, or make it slow, found in a second, without torch and Ray.

`moorage serve` looks before it starts its Ray, `moorage doctor` at the same things and more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine_actor.errors import InvalidOption, ModelError
from engine_actor.manifest import DecoderManifest
from engine_actor.memory.free_memory import free_host_bytes
from engine_actor.memory.layout import pools_in_memory
from engine_actor.weights.header import Header, read_header
from kernels.compiler import BuildError, find_compiler
from serve_app.commands.accelerator import Gpu, TorchBuild, nvidia_gpus, torch_build
from serve_app.commands.findings import Finding, Mark
from serve_app.config import AppArgs
from serve_app.generation_config import sampling_defaults
from serve_app.text.errors import TokenizerError
from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import load_tokenizer

CHAT = "chat"  # the finding that says whether the model takes messages
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_SHM_NEEDED = 256 * 2**20
_SHARED_MEMORY = Path("/dev/shm")
# Ray's own processes, the front door, and what a step allocates.
_BESIDE_ENGINES = 2**30


def preflight(args: AppArgs, model: Path) -> Iterator[Finding]:
    """`model`: where its files are."""
    gpus, build = visible_gpus(), torch_build()
    yield from device(args, gpus, build)
    yield from compiler(args)
    yield from shared_memory()
    try:
        header = read_header(model)
    except ModelError as error:
        yield Finding(Mark.BAD, "model", str(error))
        return
    yield from text(model)
    on_gpu = args.device == "cuda" or (args.device == "auto" and _can_use(gpus, build))
    yield from memory(args, header, gpus[0].free_bytes if on_gpu and gpus else None, on_gpu=on_gpu)


def visible_gpus() -> tuple[Gpu, ...]:
    """Those that CUDA would be shown."""
    shown = os.environ.get(VISIBLE_VARIABLE)
    return () if shown is not None and shown.strip() in ("", "-1", "NoDevFiles") else nvidia_gpus()


def _can_use(gpus: tuple[Gpu, ...], build: TorchBuild | None) -> bool:
    return bool(gpus) and build is not None and build.cuda is not None


def device(args: AppArgs, gpus: tuple[Gpu, ...], build: TorchBuild | None) -> Iterator[Finding]:
    names = ", ".join(gpu.name for gpu in gpus)
    cpu_build = build is not None and build.cuda is None
    if args.device == "cuda" and not gpus:
        hidden = f"; {VISIBLE_VARIABLE} is {os.environ[VISIBLE_VARIABLE]!r}" if VISIBLE_VARIABLE in os.environ else ""
        yield Finding(Mark.BAD, "device", f"cuda: this machine shows no NVIDIA GPU{hidden}; try --device cpu")
    elif args.device == "cuda" and cpu_build:
        yield Finding(
            Mark.BAD, "device", f"cuda: {build}, cannot use {names}; `make install TORCH=cuda` takes the other one"
        )
    elif args.device == "auto" and gpus and cpu_build:
        yield Finding(
            Mark.NOTE, "device", f"cpu: {build}, cannot use {names}; `make install TORCH=cuda` takes the other one"
        )
    else:
        yield Finding(Mark.GOOD, "device", names if args.device != "cpu" and gpus else "cpu")


def compiler(args: AppArgs) -> Iterator[Finding]:
    if args.device == "cuda":
        return
    try:
        yield Finding(Mark.GOOD, "compiler", find_compiler())
    except BuildError as error:
        if args.weights == "stored":
            yield Finding(Mark.BAD, "compiler", f"--weights stored wants native kernels: {error}")
        else:
            yield Finding(Mark.NOTE, "compiler", f"without native kernels CPUs are several times slower: {error}")


def text(model: Path) -> Iterator[Finding]:
    """The tokenizer, the chat template, and the sampling that the model's authors recommend."""
    try:
        prompts = PromptBuilder(load_tokenizer(model))
        sampling_defaults(model)
    except (TokenizerError, ValueError) as error:
        yield Finding(Mark.BAD, "tokenizer", str(error))
        return
    if prompts.why_no_chat is None:
        yield Finding(Mark.GOOD, CHAT, "the template compiles")
    else:
        yield Finding(Mark.NOTE, CHAT, prompts.why_no_chat)


def memory(args: AppArgs, header: Header, gpu_bytes: int | None, *, on_gpu: bool) -> Iterator[Finding]:
    """Of weights and KV pools of all replicas, which are all on this machine. `gpu_bytes`: free on a GPU, where one
    replica has it; None: nobody tells."""
    if on_gpu and gpu_bytes is None:
        return
    replicas = 1 if on_gpu else max(1, args.replicas)
    free = gpu_bytes if gpu_bytes is not None and on_gpu else free_host_bytes() - _BESIDE_ENGINES
    as_stored = args.weights == "stored" or (args.weights == "auto" and not on_gpu and _has_compiler())
    element_bytes = _ELEMENT_BYTES[args.dtype]
    weights = replicas * header.weight_bytes(element_bytes, as_stored=as_stored)
    pools = replicas * args.kv_memory if args.kv_memory > 1 else 0.0
    where = "on the GPU" if on_gpu else "here"
    needs = f"weights {_gib(weights)}" + (f" and KV pools {_gib(pools)}" if pools else "")
    sentence = f"{needs} of {replicas} replica{'s' if replicas > 1 else ''}; {_gib(free)} are free {where}"
    if weights + pools > free:
        hint = "fewer --replicas, a smaller --kv-memory, a smaller model"
        yield Finding(Mark.BAD, "memory for the model", f"{sentence}: too little; try {hint}")
        return
    config, options = header.config, args.actor_options(cores=os.cpu_count() or 1, on_gpu=on_gpu)
    manifest = DecoderManifest(
        config.vocab_size, config.context_length, config.eos_token_ids, config.paged_state(element_bytes)
    )
    try:
        pools_in_memory(
            manifest,
            options.limits,
            kv_memory=options.kv_memory,
            free_bytes=int(free - weights),
            max_sessions=options.max_sessions,
            max_model_len=options.max_model_len,
        )
        yield Finding(Mark.GOOD, "memory for the model", sentence)
    except InvalidOption as error:
        yield Finding(Mark.BAD, "memory for the model", f"{sentence}: {error}")


def _has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True


def shared_memory() -> Iterator[Finding]:
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        enough = free >= _SHM_NEEDED
        hint = "" if enough else ", less than Ray's object store wants, so it is slower: in a container --shm-size 2g"
        yield Finding(Mark.GOOD if enough else Mark.NOTE, "shared memory", f"{_gib(free)} in {_SHARED_MEMORY}{hint}")


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 / 10 else f"{number / 2**20:.0f} MiB"
