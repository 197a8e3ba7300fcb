"""Answers all lines of a file, with engines of its own or those of a running application.

    ray job submit --working-dir . -- python -m serve_app.jobs.batch --input in.jsonl --output out.jsonl --model smollm2

Each line goes through the same API as a request over HTTP, so it is checked, refused and answered alike.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from serve_app.commands.console import fail, fetch_with_bar, say, step
from serve_app.commands.serve import StartFailed, read_args
from serve_app.config import AppArgs
from serve_app.generation_config import sampling_defaults
from serve_app.ingress.app import create_app
from serve_app.ingress.engine_client import EngineClient
from serve_app.jobs.journal import Journal, JournalError, finished_before
from serve_app.jobs.lines import output_id, read_lines
from serve_app.jobs.progress import BatchProgress
from serve_app.jobs.runner import BatchStuck, Counts, run_batch
from serve_app.local_ray import disconnect, start_ray
from serve_app.model_store import KNOWN_MODELS, ModelStoreError
from serve_app.responses.memory_store import MemoryResponseStore
from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import load_tokenizer

# The engines' batches are kept full while some lines are tokenized, and others written.
_WAITING_SHARE = 0.5
_PLACEMENT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Lines:
    """The input: `before` of its `total` lines were done by an earlier run."""

    source: Path
    before: int
    total: int


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    input: Annotated[Path, typer.Option(help="JSONL, one request a line, as for OpenAI's batches.")],
    output: Annotated[Path, typer.Option(help="Appears when all lines are done; until then OUTPUT.partial grows.")],
    model: Annotated[str | None, typer.Option(help="As for `moorage serve`. [default: smollm2]")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines. [default: 1]")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="As for `moorage serve`. [default: 0.3]")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Sequences in one step. [default: 32]")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with fields of AppArgs; flags win over it.")] = None,
    deployment: Annotated[
        str | None, typer.Option(help="Use the engines of this running application (`moorage`) instead of own ones.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Lines at a time. [default: 1.5 times what the engines run at once]")
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Attempts for a line while engines are overloaded or lost.")] = 10,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster to join. [default: a Ray of its own]")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the logs of Ray and of every process.")] = False,
) -> None:
    """Answer a file of requests with a model, as a job.

    A job that was stopped or killed goes on where it was when it is started again with the same files. Lines that
    can't be answered have an error in the output, in their place. Exits with 0 when every line is done.
    """
    flags = {"model": model, "replicas": replicas, "kv_memory": kv_memory, "max_batch_size": max_batch_size}
    given = {name: value for name, value in flags.items() if value is not None}
    raise typer.Exit(run(input, output, config, given, deployment, concurrency, tries, address, verbose))


def run(
    source: Path,
    output: Path,
    config: Path | None,
    flags: Mapping[str, Any],
    deployment: str | None,
    concurrency: int | None,
    tries: int,
    address: str | None,
    verbose: bool,
) -> int:
    """The exit code: 0 every line is done, 1 it failed, 2 it was asked for the impossible, 130 it was stopped."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        args = read_args(config, flags)
        total = sum(1 for _ in read_lines(source))
        if finished_before(output, (output_id(line) for line in read_lines(source))):
            say(f"{output} is there already, with all {total} lines")
            return 0
        journal = Journal(output)
    except (StartFailed, JournalError, OSError) as error:
        fail(str(error))
        return 2
    try:
        with journal:
            before = sum(journal.has(line) for line in read_lines(source))
            if before:
                say(f"{before} of {total} lines are done by an earlier run")
            path = fetch_with_bar(args.model)
            if args.model not in KNOWN_MODELS:  # actors have other working directories
                args = args.model_copy(update={"model": str(path), "served_model_name": args.model_name()})
            with step("Ray"):
                start_ray(address, verbose=verbose)
            lines = Lines(source, before, total)
            counts = asyncio.run(_answer_all(lines, journal, path, args, deployment, concurrency, tries))
            journal.finish(read_lines(source))
    except (StartFailed, ModelStoreError, JournalError, ConnectionError, BatchStuck) as error:
        fail(f"{error}; lines that are done are kept: start it again to go on")
        return 1
    except KeyboardInterrupt:
        say("stopped; lines that are done are kept: start it again to go on")
        return 130
    finally:
        disconnect()
    earlier = f", {before} by an earlier run" if before else ""
    say(f"{output}: {total} lines; {counts.answered} answered, {counts.failed} failed{earlier}")
    return 0


async def _answer_all(
    lines: Lines,
    journal: Journal,
    model_path: Path,
    args: AppArgs,
    deployment: str | None,
    concurrency: int | None,
    tries: int,
) -> Counts:
    client, at_once = await _engines(args, deployment)
    prompts = PromptBuilder(load_tokenizer(model_path))
    settings = args.ingress_settings((), sampling=sampling_defaults(model_path))
    api = create_app(settings.model_copy(update={"answers_request_id": True}), client, prompts, _no_store(args))
    transport = httpx.ASGITransport(api)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:
        with BatchProgress(lines.before, lines.total) as progress:
            return await run_batch(
                read_lines(lines.source),
                journal,
                http,
                concurrency=concurrency or max(1, round(at_once * (1 + _WAITING_SHARE))),
                tries=tries,
                told=progress.told,
            )


async def _engines(args: AppArgs, deployment: str | None) -> tuple[EngineClient, int]:
    """Engines, and how many sequences they run at a time."""
    if deployment is not None:
        return await _running_engines(args, deployment)
    from serve_app.jobs.pool import start_pool

    with step(f"{args.model_name()} on {args.replicas} engine{'s' if args.replicas > 1 else ''}") as progress:
        note: Callable[[int], None] = lambda started: progress.note(f"({started}/{args.replicas} ready)")  # noqa: E731
        return await start_pool(args, note), args.replicas * args.max_batch_size


async def _running_engines(args: AppArgs, deployment: str) -> tuple[EngineClient, int]:
    """Raises StartFailed if the application is not there, or serves another model."""
    from ray import serve

    from serve_app.app import ENGINES
    from serve_app.handle_client import HandleEngineClient

    application = serve.status().applications.get(deployment)
    if application is None or ENGINES not in application.deployments:
        raise StartFailed(f"--deployment {deployment}: no such application of Moorage runs here")
    handle = serve.get_deployment_handle(ENGINES, deployment)
    facts = await handle.broadcast("describe").results_async(timeout_s=30)
    if any(fact["model_name"] != args.model_name() for fact in facts):
        raise StartFailed(f"--deployment {deployment}: it serves {facts[0]['model_name']}, not {args.model_name()}")
    return HandleEngineClient(handle, placement_timeout=_PLACEMENT_SECONDS), len(facts) * args.max_batch_size


def _no_store(args: AppArgs) -> MemoryResponseStore:
    """Lines do not reach the routes that keep something."""
    return MemoryResponseStore(args.store_limits(), lease_seconds=1.0)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()
