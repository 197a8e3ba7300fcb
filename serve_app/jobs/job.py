"""Answers all lines of a file, with engines of its own or those of a running application.

Each line goes through the same API as a request over HTTP, so it is checked, refused and answered alike.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serve_app.api import create_app
from serve_app.commands.arguments import StartFailed, read_args
from serve_app.commands.console import fail, fetch_with_bar, say, step
from serve_app.commands.local_ray import disconnect, start_ray
from serve_app.commands.ray_address import BadAddress
from serve_app.config import AppArgs
from serve_app.generation_config import sampling_defaults
from serve_app.ingress.engine_client import EngineClient
from serve_app.jobs.journal import Journal, JournalError, finished_before
from serve_app.jobs.lines import output_id, read_lines
from serve_app.jobs.progress import BatchProgress
from serve_app.jobs.runner import BatchStuck, run_batch
from serve_app.model_store import KNOWN_MODELS, ModelStoreError, NoSuchModel
from serve_app.openai.desk import open_desk, side_desk
from serve_app.openai.responses.memory_store import MemoryResponseStore

# The engines' batches are kept full while some lines are tokenized, and others written.
_WAITING_SHARE = 0.5
_PLACEMENT_SECONDS = 600.0
_DESCRIBE_SECONDS = 30.0
# Part of the path of the copies that Ray makes of a job's --working-dir.
_RAYS_COPIES = "working_dir_files"
_GOES_ON = "lines that are done are kept: start it again to go on"


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """As the command line explains them."""

    source: Path
    output: Path
    config: Path | None
    deployment: str | None
    concurrency: int | None
    tries: int
    address: str | None
    verbose: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One run over the lines: `before` of `total` were done by an earlier one."""

    options: BatchOptions
    args: AppArgs
    journal: Journal
    before: int
    total: int


def run(options: BatchOptions, flags: Mapping[str, Any]) -> int:
    """The exit code: 0 every line is done, 1 it failed, 2 it was asked for the impossible, 130 it was stopped."""
    _catch_signals()
    source, output = options.source, options.output
    with ExitStack() as stack:
        try:
            args = read_args(options.config, flags)
            total = sum(1 for _ in read_lines(source))
            if finished_before(output, (output_id(line) for line in read_lines(source))):
                say(f"{output} is there already, with all {total} lines")
                return 0
            journal = Journal(output)
            journal.check_source(source)
            stack.enter_context(journal)
        except OSError as error:  # names the file
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
            return 2
        except (StartFailed, JournalError) as error:
            fail(str(error))
            return 2
        except KeyboardInterrupt:
            say("stopped")
            return 130
        try:
            before = sum(journal.has(line) for line in read_lines(source))
            _announce(output, before, total)
            if before < total:
                _answer(Batch(options, args, journal, before, total))
            counts = journal.write_output(read_lines(source))
        except (StartFailed, ModelStoreError, ConnectionError) as error:
            fail(str(error))
            return 2 if isinstance(error, NoSuchModel | BadAddress) else 1
        except (BatchStuck, JournalError, OSError) as error:
            fail(f"{error}; {_GOES_ON}")
            return 1
        except KeyboardInterrupt:
            say(f"stopped; {_GOES_ON}")
            return 130
    earlier = f" ({before} lines by an earlier run)" if before else ""
    say(f"{output}: {counts.answered} lines answered, {counts.failed} failed{earlier}")
    return 0


def _announce(output: Path, before: int, total: int) -> None:
    say(f"{total} lines, {before} of them done by an earlier run; output: {output.absolute()}")
    if _RAYS_COPIES in output.absolute().parts:
        say("this is in Ray's copy of the working directory, which goes with the cluster: better an absolute path")


def _catch_signals() -> None:
    """SIGTERM, which stops a job, does what Ctrl-C does; a shell starts what it puts in the background with SIGINT
    ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def _answer(batch: Batch) -> None:
    """With a Ray that is there or is started. Raises what `run` tells."""
    args = batch.args
    path = fetch_with_bar(args.model)
    if args.model not in KNOWN_MODELS:  # actors have other working directories
        args = args.model_copy(update={"model": str(path), "served_model_name": args.model_name()})
    try:
        start_ray(batch.options.address, verbose=batch.options.verbose, attempt=step)
        asyncio.run(_answer_all(batch, args, path))
    finally:
        disconnect()


async def _answer_all(batch: Batch, args: AppArgs, model_path: Path) -> None:
    options = batch.options
    settings = args.ingress_settings((), sampling=sampling_defaults(model_path))
    settings = settings.model_copy(update={"answers_request_id": True})
    no_store = MemoryResponseStore(args.store_limits(), lease_seconds=1.0)  # lines reach no route that keeps something
    desk = open_desk(settings, model_path)
    with closing(side_desk(settings, model_path)) as side:
        async with _engines(args, options.deployment) as (client, at_once):
            transport = httpx.ASGITransport(create_app(desk, side, client, no_store))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as http:
                with BatchProgress(batch.before, batch.total) as progress:
                    await run_batch(
                        read_lines(options.source),
                        batch.journal,
                        http,
                        concurrency=options.concurrency or max(1, round(at_once * (1 + _WAITING_SHARE))),
                        tries=options.tries,
                        on_line=progress.advance,
                    )


@asynccontextmanager
async def _engines(args: AppArgs, deployment: str | None) -> AsyncIterator[tuple[EngineClient, int]]:
    """Engines, and how many sequences they run at a time. Raises StartFailed."""
    if deployment is None:
        from serve_app.jobs.pool import start_pool

        with step(f"{args.model_name()} on {args.replicas} engine{'s' if args.replicas > 1 else ''}") as progress:
            pool = await start_pool(args, lambda started: progress.note(f"({started}/{args.replicas} ready)"))
        yield pool, args.replicas * (args.max_running_sequences or args.max_batch_size)
        return
    from serve_app.cluster.client import HandleEngineClient

    with step(f"engines of {deployment}"):
        handle, at_once = await _running_engines(args, deployment)
    client = HandleEngineClient(handle, placement_timeout=_PLACEMENT_SECONDS)
    try:
        yield client, at_once
    finally:
        client.close()
        await handle.shutdown_async()


async def _running_engines(args: AppArgs, deployment: str) -> tuple[Any, int]:
    """The handle, and how many sequences run at a time. Where an application is scaled to zero, this starts an engine.
    Raises StartFailed if it is not there, or serves another model."""
    from ray import serve

    from serve_app.cluster.app import ENGINES

    application = serve.status().applications.get(deployment)
    if application is None or ENGINES not in application.deployments:
        raise StartFailed(f"--deployment {deployment}: no such application of Moorage runs here")
    handle = serve.get_deployment_handle(ENGINES, deployment)
    try:
        async with asyncio.timeout(_PLACEMENT_SECONDS):
            first = await handle.options(method_name="describe").remote()
    except TimeoutError:
        raise StartFailed(f"--deployment {deployment}: none of its engines runs") from None
    if first["model_name"] != args.model_name():
        raise StartFailed(f"--deployment {deployment}: it serves {first['model_name']}, not {args.model_name()}")
    facts = await handle.broadcast("describe").results_async(timeout_s=_DESCRIBE_SECONDS)
    return handle, sum(fact["max_running_sequences"] for fact in facts)
