"""The `moorage` command. Each command lives in `serve_app/commands`, loaded when it is used: `--help` starts
no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app import __version__
from serve_app.commands.orphans import adopt_orphans
from serve_app.jobs.batch import main as batch

app = typer.Typer(
    name="moorage",
    help="Serves language models for conversations: a turn costs only its new tokens.\n\n"
    "Start with `moorage serve`, then `moorage chat` in another terminal.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The models that are known by name: what they are, what is fetched.")
app.add_typer(models_app, name="models")

Url = Annotated[str, typer.Option(help="Where the server is.")]
Model = Annotated[
    str | None,
    typer.Option(help="A known name (`moorage models`), a Hugging Face folder or a GGUF file. [default: smollm2]"),
]
Replicas = Annotated[int | None, typer.Option(help="Engine replicas. [default: 1]")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16 or float32. [default: bfloat16]")]
Weights = Annotated[
    str | None,
    typer.Option(help="Of quantized files: auto, stored (kept in 4 or 8 bits) or expanded. [default: auto]"),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda. [default: auto]")]
KvMemory = Annotated[
    str | None, typer.Option(help="KV cache: a share of free memory (0.3) or bytes (2GiB). [default: 0.3]")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest sequence, answer included. [default: the model's context]")
]
ApiKeyFile = Annotated[Path | None, typer.Option(help="A file with one key a line.")]
Config = Annotated[Path | None, typer.Option(help="YAML file with fields of AppArgs; flags win over it.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the logs of Ray and of every process.")]


def _show_version(shown: bool) -> None:
    if shown:
        typer.echo(f"moorage {__version__}")
        raise typer.Exit


@app.callback()
def moorage(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    model: Model = None,
    replicas: Replicas = None,
    host: Annotated[str, typer.Option(help="Address to serve on; beyond loopback an API key is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 8000,
    backend: Annotated[str | None, typer.Option(help="What runs the model: torch. [default: torch]")] = None,
    dtype: Dtype = None,
    weights: Weights = None,
    device: Device = None,
    numerics: Annotated[
        str | None,
        typer.Option(
            help="exact: a token is the same in any batch; fast: near ties may differ; auto: exact where a probe at "
            "the start finds it so. [default: auto]"
        ),
    ] = None,
    kv_memory: KvMemory = None,
    max_model_len: MaxModelLen = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Sequences in one step. [default: 32]")] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Conversations kept resident. [default: 256]")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads a replica. [default: cores / replicas]")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use.")] = None,
    ingress_replicas: Annotated[int | None, typer.Option(help="HTTP processes. [default: 1]")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients may use; repeat it for more. Others see it in `ps`: prefer a file."),
    ] = None,
    api_key_file: ApiKeyFile = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin whose pages may use the server, such as http://localhost:3000; repeat for more."),
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="Logs of the processes: text or json. [default: text]")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM certificate chain: serve HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key, without a password.")] = None,
    config: Config = None,
    address: Annotated[
        str | None,
        typer.Option(help="Join this Ray cluster (`auto`, or host:port) instead of starting one of our own."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Serve a model over an OpenAI-compatible API until Ctrl-C.

    Fetches the model if need be, checks that it can be served here, starts a Ray of its own (or joins one with
    --address), and prints one `ready` line with a request to paste. Ctrl-C or SIGTERM stops what it started and nothing
    else, also while it starts. Keys may also come from MOORAGE_API_KEYS. Every field of --config: `moorage config`.

    Exit codes: 0 it was stopped; 1 it failed; 2 it was asked for what cannot be.
    """
    from serve_app.commands.serve import ServeOptions, run

    flags: dict[str, Any] = {
        "model": model,
        "replicas": replicas,
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "numerics": numerics,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "max_batch_size": max_batch_size,
        "max_sessions": max_sessions,
        "threads": threads,
        "served_model_name": served_model_name,
        "ingress_replicas": ingress_replicas,
        "api_keys": tuple(api_key) if api_key else None,
        "api_key_file": api_key_file,
        "allowed_origins": tuple(allowed_origin) if allowed_origin else None,
        "log_format": log_format,
    }
    chosen = {name: value for name, value in flags.items() if value is not None}
    raise typer.Exit(run(ServeOptions(host, port, address, config, verbose, ssl_certfile, ssl_keyfile), chosen))


@app.command()
def chat(
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="[default: the first that the server names]")] = None,
    session: Annotated[str | None, typer.Option(help="Go on with this session. [default: a new one]")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="[default: the server's]")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    api_key: Annotated[str | None, typer.Option(envvar="MOORAGE_API_KEY", help="Key of the server.")] = None,
) -> None:
    """Talk to a running server in the terminal.

    The conversation is one session: its turns go to the replica that holds it. /new begins another one, /quit
    leaves; Ctrl-C stops an answer.
    """
    from serve_app.commands.chat import Chat

    raise typer.Exit(Chat(url, model, session, system, temperature, max_tokens, api_key).run())


app.command("batch")(batch)


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the models that are known by name, with their size and whether they are here."""
    from serve_app.commands.models import show

    if context.invoked_subcommand is None:
        show()


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(help="One of the names that `moorage models` lists.")]) -> None:
    """Fetch a model into $MOORAGE_HOME (default ~/.cache/moorage) and check it. Instant if it is there."""
    from serve_app.commands.models import fetch_by_name

    raise typer.Exit(fetch_by_name(name))


@app.command()
def doctor(
    model: Model = None,
    replicas: Replicas = None,
    host: Annotated[str, typer.Option(help="Address to check.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to check.")] = 8000,
    dtype: Dtype = None,
    weights: Weights = None,
    device: Device = None,
    kv_memory: KvMemory = None,
    max_model_len: MaxModelLen = None,
    api_key_file: ApiKeyFile = None,
    config: Config = None,
) -> None:
    """Check whether `moorage serve` with these flags would work on this machine, and how well.

    Looks at versions, devices, kernels and one product of each type, the port, memory, disk, the model's files with
    their tokenizer and template, and keys. Starts nothing and fetches nothing. Exit code 1 if serving would fail.
    """
    from serve_app.commands.doctor import Options, run

    flags: dict[str, Any] = {
        "model": model,
        "replicas": replicas,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "api_key_file": api_key_file,
    }
    chosen = {name: value for name, value in flags.items() if value is not None}
    raise typer.Exit(run(Options(host, port, config, chosen)))


@app.command("config")
def show_config(
    markdown: Annotated[bool, typer.Option("--markdown", help="As tables in Markdown: the guide's own.")] = False,
) -> None:
    """Show every field that a config file may have, with its default and its meaning.

    They are the `args:` of a Serve config file and the keys of `moorage serve --config FILE`.
    """
    from serve_app.commands.config import run

    raise typer.Exit(run(as_markdown=markdown))


@app.command("drain-node")
def drain_node(
    address: Annotated[str, typer.Option(help="The Ray cluster: `auto`, or host:port.")] = "auto",
    timeout: Annotated[int, typer.Option(min=1, help="Seconds that running answers have.")] = 600,
) -> None:
    """Take the Ray node on this machine out of its cluster and cut no answer; for a machine that is about to go.

    Its replicas are replaced elsewhere, finish their answers and end, and so does the node. A preStop hook on
    Kubernetes.
    """
    from serve_app.commands.drain_node import run

    raise typer.Exit(run(address, timeout))


def main() -> None:
    """Entry point of the console script."""
    adopt_orphans()
    app()


if __name__ == "__main__":
    main()
