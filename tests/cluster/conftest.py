"""One Ray with Serve for the whole session; each module brings its own application."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import cloudpickle, serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from serve_app.cluster.app import ENGINES, assemble
from serve_app.cluster.deployments import EngineDeployment
from serve_app.commands.local_ray import APPLICATION, disconnect, start_ray, start_serve
from serve_app.config import AppArgs
from tests.cluster import scripted
from tests.cluster.scripted import Deploy
from tests.support import actor_view

# Replicas import what is installed; the doubles travel with their class.
for module in (scripted, actor_view):
    cloudpickle.register_pickle_by_value(module)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This folder comes last: even an idle Ray takes time from whatever runs beside it."""
    items.sort(key=lambda item: Path(__file__).parent in item.path.parents)


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    session = start_ray(None)
    try:
        start_serve(session, "127.0.0.1", port)
        yield f"http://127.0.0.1:{port}"
    finally:
        _get_global_client().shutdown_cached_handles()  # they report calls, and would do so when Ray has ended
        disconnect()


@pytest.fixture(scope="session")
def deploy(base_url: str, smollm2_path: Path) -> Deploy:
    """Deploys an application, in place of the one before, and returns the handle of its engines."""

    def run(engine: type[EngineDeployment] = EngineDeployment, **fields: object) -> DeploymentHandle:
        serve.delete(APPLICATION)
        args = AppArgs.model_validate({"model": str(smollm2_path), "served_model_name": "smollm2", **fields})
        serve.run(assemble(args, engine), name=APPLICATION)
        return serve.get_deployment_handle(ENGINES, APPLICATION)

    return run
