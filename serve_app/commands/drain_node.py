"""`moorage drain-node`: takes the Ray node on this machine out of its cluster and cuts no answer.

Ray places nothing new on a node that is drained, and Serve starts replacements elsewhere before it stops the replicas
here, which finish their answers. An empty node ends by itself; that is what is waited for.
"""

from __future__ import annotations

import subprocess
import sys

import psutil

from serve_app.commands.console import fail, say, step
from serve_app.commands.local_ray import prepare_environment
from serve_app.commands.ray_address import BadAddress, find_ray, not_joined

_HEAD = "node:__internal_head__"  # a resource that only the head node has
# To Ray the words say why nothing can refuse: the machine is going.
_REASON = "DRAIN_NODE_REASON_PREEMPTION"


def run(address: str, timeout: int) -> int:
    """The exit code: 0 when the node has ended, 1 if it could not be drained or has not ended after `timeout` seconds,
    2 on a head node, or for what is no address."""
    prepare_environment(address)
    import ray

    try:
        where = find_ray(address)
    except ConnectionError as error:
        fail(str(error))
        return 2 if isinstance(error, BadAddress) else 1
    try:
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray has no type of its own for a cluster that cannot be joined
        fail(str(not_joined(address, where, error)))
        return 1
    context = ray.get_runtime_context()
    node_id, gcs_address = context.get_node_id(), context.gcs_address
    [node] = [node for node in ray.nodes() if node["NodeID"] == node_id]
    ray.shutdown()  # a driver would keep its node from being empty
    if _HEAD in node["Resources"]:
        fail("this is the cluster's head node; without it the cluster ends")
        return 2
    return drain(node_id, gcs_address, timeout)


def drain(node_id: str, gcs_address: str, timeout: int) -> int:
    """Drains a node whose processes are on this machine. The exit code, as in `run`."""
    raylets = [process for process in psutil.process_iter(["cmdline"]) if _is_raylet(process, node_id)]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", gcs_address, "--node-id", node_id),
        *("--reason", _REASON, "--reason-message", "moorage drain-node"),
        *("--deadline-remaining-seconds", str(timeout)),
    ]
    command_result = subprocess.run(command, capture_output=True, text=True, check=False)
    if command_result.returncode:
        fail(f"the node could not be drained: {(command_result.stderr or command_result.stdout).strip()[-500:]}")
        return 1
    if not raylets:
        fail("the node is being drained, but its processes are not seen from here, so its end is not either")
        return 1
    with step("draining; running answers are finished"):
        _, alive = psutil.wait_procs(raylets, timeout=timeout)
    if alive:
        fail(f"still running after {timeout} s")
        return 1
    say("drained")
    return 0


def _is_raylet(process: psutil.Process, node_id: str) -> bool:
    return f"--node_id={node_id}" in (process.info["cmdline"] or ())
