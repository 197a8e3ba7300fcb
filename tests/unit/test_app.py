from __future__ import annotations

from typing import Any

from serve_app.cluster.app import ENGINES, FRONT_DOOR, ONE_EVENT_LOOP, build
from serve_app.config import AppArgs


def environments(args: AppArgs) -> dict[str, dict[str, str]]:
    """What the processes of each deployment find in their environment, by its name."""

    def visit(bound: Any) -> None:
        deployment = bound._bound_deployment
        found[deployment.name] = deployment.ray_actor_options.get("runtime_env", {}).get("env_vars", {})
        for argument in deployment.init_args:
            if hasattr(argument, "_bound_deployment"):
                visit(argument)

    found: dict[str, dict[str, str]] = {}
    visit(build(args))
    return found


def test_engines_have_the_environment_of_their_math_libraries_and_that_of_serve() -> None:
    args = AppArgs(model="smollm2", threads=3)
    wanted = args.engine_resources(8, 0.0)["runtime_env"]["env_vars"]
    assert wanted["OMP_NUM_THREADS"] == "3"
    found = environments(args)
    assert found[ENGINES] == {**wanted, **ONE_EVENT_LOOP}
    assert found[FRONT_DOOR].items() >= ONE_EVENT_LOOP.items()
