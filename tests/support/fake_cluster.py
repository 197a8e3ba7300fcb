"""A Ray cluster on this machine that grows: a head, and an autoscaler that adds nodes with a GPU that nobody has.

The nodes are processes here, and the GPUs are numbers in the books of Ray: placement, start and removal of nodes are
real, and what an engine computes it computes on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

HEAD = "ray.head.default"  # the fake provider knows the head by this name
_LISTS = (  # that a cluster must have, and this one needs nothing of
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)
_OBJECT_STORE_BYTES = 100_000_000
_END_SECONDS = 10.0


def free_ports(count: int) -> list[int]:
    """All different: none is given back before the last one is found."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def fake_cluster(*, head_cpus: int, node_cpus: int, most_nodes: int, idle_seconds: float) -> Iterator[str]:
    """The address of a cluster whose head has no GPU. `serve_app.commands.local_ray.prepare_environment` must have been
    called: the cluster's processes are known by the token in their environment, and none is left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="moorage-"))
    gcs, client = free_ports(2)
    address = f"127.0.0.1:{gcs}"
    config = folder / "cluster.json"
    config.write_text(json.dumps(_cluster(address, head_cpus, node_cpus, most_nodes, idle_seconds)), "utf-8")
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--node-ip-address=127.0.0.1", f"--port={gcs}",
        f"--ray-client-server-port={client}", f"--temp-dir={folder}", "--include-dashboard=false", "--num-gpus=0",
        f"--num-cpus={head_cpus}", f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--autoscaling-config={config}",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    try:
        with (folder / "start.log").open("wb") as log:
            started = subprocess.run(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, check=False
            )
        if started.returncode:
            raise ConnectionError(f"Ray did not start:\n{(folder / 'start.log').read_text('utf-8')}")
        yield address
    finally:
        _end(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _cluster(address: str, head_cpus: int, node_cpus: int, most_nodes: int, idle_seconds: float) -> dict[str, Any]:
    """What `ray up` would be given, for the provider that starts nodes as processes."""
    worker = {"CPU": node_cpus, "GPU": 1, "object_store_memory": _OBJECT_STORE_BYTES}
    nothing: dict[str, Any] = {name: [] for name in _LISTS}
    return {
        **nothing,
        "cluster_name": "moorage-fake",
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,  # else the one on Ray's usual port, whoever has that
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "max_workers": most_nodes,
        "idle_timeout_minutes": idle_seconds / 60,
        "upscaling_speed": 1.0,
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {"resources": {"CPU": head_cpus, "GPU": 0}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": most_nodes},
        },
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
    }


def _end(folder: Path) -> None:
    """All processes of the cluster, by their ids. Those that Ray names itself (workers) may hide their environment, but
    they are children of those that do not."""
    mine = psutil.Process()
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            token = process.environ().get("RAY_AUTH_TOKEN")
            if token == os.environ["RAY_AUTH_TOKEN"] or str(folder) in " ".join(process.cmdline()):
                found |= {process, *process.children(recursive=True)}
    found -= {mine, *mine.parents()}
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(found, timeout=_END_SECONDS)
