"""The command line of a batch job; `moorage batch` is the same.

ray job submit --working-dir . -- python -m serve_app.jobs.batch --input /data/in.jsonl --output /data/out.jsonl
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from serve_app.commands.orphans import adopt_orphans

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
    can't be answered have an error in the output, in their place. Exit codes: 0 every line is done, 1 it failed, 2 it
    was asked for the impossible, 130 it was stopped.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from serve_app.jobs.job import BatchOptions, run

    flags = {"model": model, "replicas": replicas, "kv_memory": kv_memory, "max_batch_size": max_batch_size}
    chosen = {name: value for name, value in flags.items() if value is not None}
    options = BatchOptions(input, output, config, deployment, concurrency, tries, address, verbose)
    raise typer.Exit(run(options, chosen))


if __name__ == "__main__":
    adopt_orphans()
    app()
