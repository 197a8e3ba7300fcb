"""`moorage doctor`: would serving work on this machine, and how well."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from engine_actor.memory.free_memory import free_host_bytes
from kernels.instruction_cap import VARIABLE, InvalidCap, requested_cap
from serve_app.commands.arguments import StartFailed, read_args
from serve_app.commands.console import console
from serve_app.commands.findings import Finding, Mark
from serve_app.commands.preflight import preflight, visible_gpus
from serve_app.ingress.health import SERVER
from serve_app.local_ports import BindRefused, reachable_address, require_free_port, require_key_beyond_loopback
from serve_app.model_store import KNOWN_MODELS, ModelStoreError, cached_path, home, resolve_model

_RAM_NEEDED = 2 * 2**30  # Ray's own processes and one small model
_DISK_NEEDED = 2**30


@dataclass(frozen=True, slots=True)
class Options:
    """What `moorage serve` would be given. `flags`: of AppArgs, those that were set."""

    host: str
    port: int
    config: Path | None
    flags: Mapping[str, Any]


def run(options: Options) -> int:
    """Prints the findings and a verdict. The exit code: 1 if any is bad."""
    findings = [finding for check in checks(options) for finding in check()]
    table = Table(box=None, show_header=False)
    for overflow in ("ellipsis", "ellipsis", "fold"):  # a path is shown whole, on several lines if need be
        table.add_column(overflow=overflow)
    for finding in findings:
        table.add_row(finding.mark, escape(finding.what), escape(finding.detail))
    console.print(table)
    bad = [finding.what for finding in findings if finding.mark is Mark.BAD]
    notes = sum(finding.mark is Mark.NOTE for finding in findings)
    if bad:
        console.print(f"[bold red]Serving would fail here[/]: {escape(', '.join(bad))}.")
    elif notes:
        console.print(f"[bold green]Ready to serve[/], with {notes} note{'s' if notes > 1 else ''} above.")
    else:
        console.print("[bold green]Ready to serve.[/]")
    return 1 if bad else 0


def checks(options: Options) -> list[Callable[[], Iterator[Finding]]]:
    devices, port = partial(_devices, options.flags.get("device")), partial(_port, options.host, options.port)
    return [_versions, devices, _kernels, port, _memory, _storage, partial(_start, options)]


def _start(options: Options) -> Iterator[Finding]:
    """What `moorage serve` itself looks at before it starts anything."""
    try:
        args = read_args(options.config, options.flags)
        keys = args.load_api_keys()
        require_key_beyond_loopback(options.host, has_keys=bool(keys))
    except (StartFailed, BindRefused, ValueError) as error:
        yield Finding(Mark.BAD, "settings", str(error))
        return
    yield Finding(Mark.GOOD, "settings", f"model {args.model}, {len(keys)} API keys")
    package = KNOWN_MODELS.get(args.model)
    if package is not None and cached_path(package) is None:
        size = f"{package.download_bytes / 1e6:.0f} MB"
        yield Finding(Mark.NOTE, "model", f"{args.model} is not here yet; the first start fetches {size}")
        return
    try:
        model = resolve_model(args.model)
    except ModelStoreError as error:
        yield Finding(Mark.BAD, "model", str(error))
        return
    yield from preflight(args, model)


def _versions() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding(Mark.GOOD if sys.version_info >= (3, 11) else Mark.BAD, "python", f"{version} (3.11 or newer)")
    try:
        requirements = importlib.metadata.requires("moorage") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(Mark.NOTE, "moorage", "runs from its sources, not installed: versions are not compared")
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed_version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(Mark.BAD, requirement.name, f"not installed; wanted {requirement}")
            continue
        fits = requirement.specifier.contains(installed_version, prereleases=True)
        yield Finding(
            Mark.GOOD if fits else Mark.BAD,
            requirement.name,
            installed_version if fits else f"{installed_version}; wanted {requirement}",
        )


def _devices(device: object) -> Iterator[Finding]:
    """`device`: the flag."""
    import torch

    gpus = visible_gpus()
    if not torch.cuda.is_available() and gpus and torch.version.cuda is not None:
        mark = Mark.BAD if device == "cuda" else Mark.NOTE
        yield Finding(mark, "devices", f"{gpus[0].name} is there, and torch cannot use it: its driver may be too old")
    elif not torch.cuda.is_available():
        yield Finding(Mark.GOOD, "devices", "CPU; no CUDA device")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(Mark.GOOD, f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def _kernels() -> Iterator[Finding]:
    """The processor, the native library, which is compiled if it is not there yet, and one product of each type: all
    as the first replica would have them."""
    try:
        requested_cap()
    except InvalidCap as error:
        yield Finding(Mark.BAD, "processor", str(error))
        return
    import torch

    from kernels import native, processor
    from kernels.selfcheck import check_products

    fast, cores = processor.instructions(), os.cpu_count() or 1
    mark = Mark.GOOD if processor.has_bf16_arithmetic() else Mark.NOTE
    note = "" if mark is Mark.GOOD else "; no bf16 instructions, so bf16 is slower here"
    cap = os.environ.get(VARIABLE)
    capped = f"; {VARIABLE}={cap} allows no more" if cap else ""
    machine = platform.machine()
    yield Finding(mark, "processor", f"{cores} cores, {machine}, {', '.join(fast) or 'no AVX2'}{note}{capped}")
    available, where = native.status()
    reason = where if available else f"none, so CPUs are several times slower: {where}"
    yield Finding(Mark.GOOD if available else Mark.NOTE, "native kernels", reason)
    for outcome in check_products(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        mark = Mark.BAD if outcome.failure else Mark.GOOD
        yield Finding(mark, outcome.product, outcome.failure or outcome.path)


def _port(host: str, port: int) -> Iterator[Finding]:
    try:
        require_free_port(host, port)
        yield Finding(Mark.GOOD, "port", f"{host}:{port} is free")
    except BindRefused as error:
        if _is_moorage(host, port):
            yield Finding(Mark.NOTE, "port", f"Moorage serves on {host}:{port}; another one needs another --port")
        else:
            yield Finding(Mark.BAD, "port", str(error))


def _is_moorage(host: str, port: int) -> bool:
    where = reachable_address(host, port)
    for scheme in ("http", "https"):
        try:
            # Only its name is asked for, and a certificate may be for another one.
            answer = httpx.get(f"{scheme}://{where}/health", timeout=2, verify=False, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            continue
        return isinstance(answer, dict) and answer.get("server") == SERVER
    return False


def _memory() -> Iterator[Finding]:
    free = free_host_bytes()
    mark = Mark.GOOD if free >= _RAM_NEEDED else Mark.BAD
    yield Finding(mark, "memory", f"{free / 2**30:.1f} GiB free (at least {_RAM_NEEDED / 2**30:.0f})")


def _storage() -> Iterator[Finding]:
    folder = home()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    here = [name for name, model in KNOWN_MODELS.items() if cached_path(model) is not None]
    detail = f"{folder}: {free / 2**30:.1f} GiB free, models here: {', '.join(here) or 'none yet'}"
    if not (place.is_dir() and os.access(place, os.W_OK)):
        # What lies there already, or in a folder of its own, is served all the same.
        mark = Mark.NOTE if here else Mark.BAD
        yield Finding(mark, "cache folder", f"{folder} cannot be written, so no model can be fetched; set MOORAGE_HOME")
    else:
        yield Finding(Mark.GOOD if here or free >= _DISK_NEEDED else Mark.BAD, "cache folder", detail)
