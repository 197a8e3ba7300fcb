"""What `moorage serve` prints when it is ready: sizes and times of each replica, and a request to paste."""

from __future__ import annotations

import json
import shlex

from serve_app.commands.console import say
from serve_app.commands.local_ray import APPLICATION, RaySession
from serve_app.config import AppArgs


def print_facts(session: RaySession) -> None:
    import ray
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError

    from serve_app.cluster.app import ENGINES

    handle = serve.get_deployment_handle(ENGINES, APPLICATION)
    try:
        replicas = handle.broadcast("describe").results(timeout_s=30)
    except DeploymentUnavailableError:
        replicas = []
        say("  no replica yet: the first request starts one, and waits for it")
    finally:
        handle.shutdown()  # where replicas come and go it reports its calls, and would do so when Ray has ended
    for facts in replicas:
        short = " (less than the model's context: give it more with --kv-memory)" if facts["limited_by_pool"] else ""
        say(
            f"  {facts['replica']}: weights {facts['weight_bytes'] / 2**20:.0f} MiB; {facts['dtype']} KV cache "
            f"{facts['pool_bytes'] / 2**20:.0f} MiB = {facts['blocks']} blocks of {facts['block_size']} = "
            f"{facts['pool_tokens']} tokens; longest prompt {facts['longest_sequence'] - 1} tokens{short}; numerics "
            f"{facts['numerics']}"
        )
        for note in facts["notes"]:
            say(f"  {facts['replica']}: {note}")
        steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts["start_seconds"].items())
        say(f"  {facts['replica']}: {steps}")
    if session.owned:
        [node] = ray.nodes()
        say(f"  metrics: http://127.0.0.1:{node['MetricsExportPort']}/metrics; logs: {session.folder}/logs/serve")


def curl(base_url: str, args: AppArgs, *, chats: bool) -> str:
    """One line to paste. `chats`: the model has a chat template; else the request is for a completion."""
    question = "What is the capital of France?"
    prompt = {"messages": [{"role": "user", "content": question}]} if chats else {"prompt": "The capital of France is"}
    body = json.dumps({"model": args.model_name(), **prompt, "max_tokens": 64, "temperature": 0})
    path = "chat/completions" if chats else "completions"
    key = ' -H "authorization: Bearer $MOORAGE_API_KEY"' if args.load_api_keys() else ""
    return f"curl {base_url}/v1/{path} -H 'content-type: application/json'{key} -d {shlex.quote(body)}"
