"""`build`: from AppArgs to a Serve application.

serve run serve_app.cluster.app:build model=smollm2 replicas=2
serve deploy cluster_configs/serve.yaml
moorage serve --model smollm2 --replicas 2
"""

# Without `from __future__ import annotations`: Serve looks at the class that annotates the argument of
# `build`.
import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from serve_app.cluster.autoscaling import EnginePolicy
from serve_app.cluster.deployments import EngineDeployment
from serve_app.cluster.front_door import Ingress
from serve_app.cluster.response_store import LEASE_SECONDS
from serve_app.config import AppArgs
from serve_app.openai.responses.memory_store import MemoryResponseStore
from serve_app.telemetry.logs import logging_config

# Names of the deployments, as `serve status` and config files show them.
ENGINES = "EngineDeployment"
RESPONSES = "ResponseStore"
FRONT_DOOR = "Ingress"
# Requests queue in the engine, which knows tokens and sessions; Serve's own limits count calls and must not
# bind.
UNLIMITED = 100_000
# A constructor fails for reasons that do not pass: a wrong path, too little memory. Say so after the second
# try.
CONSTRUCTOR_TRIES = 2
# A health check answers from what is known at once. One that takes longer comes from a process that was stopped or
# whose event loop hangs; three in a row and Serve replaces it.
HEALTH_CHECK_TIMEOUT_SECONDS = 5.0
# An ingress process that is asked much at once answers late, and works: it is given more.
FRONT_DOOR_CHECK_TIMEOUT_SECONDS = 15.0
# Beyond the time that it has to stop, a replica may take so long to be gone.
ENDING_SECONDS = 15.0
# How often an engine reports what presses it.
PRESSURE_SECONDS = 1.0
# One event loop for Serve, its router and our code, which never blocks it: with threads of their own, as is Serve's
# default, every piece of a stream crosses between them. An ingress then carries a third less, and an item of a channel
# costs an engine's process a sixth more, while its owner thread wants the interpreter too.
ONE_EVENT_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
INGRESS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **ONE_EVENT_LOOP}
ROUTER = "serve_app.cluster.routing.sticky_router.StickyRouter"


def build(args: AppArgs) -> Application:
    """Raises ValueError if a key cannot be read. Runs on a node of the cluster (`serve deploy`) or in the
    driver."""
    return assemble(args, EngineDeployment)


def assemble(args: AppArgs, engine: type[EngineDeployment]) -> Application:
    """`build` with a choice of engine class; the tests bring doubles."""
    keys = args.load_api_keys()
    cores = os.cpu_count() or 1
    gpus = ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0
    resources = args.engine_resources(cores, gpus)
    options = args.actor_options(cores=cores, on_gpu=resources["num_gpus"] > 0)
    common: dict[str, Any] = {
        "max_ongoing_requests": UNLIMITED,
        "health_check_period_s": args.health_check_period_seconds,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_SECONDS,
        "graceful_shutdown_timeout_s": args.graceful_shutdown_timeout_seconds,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": CONSTRUCTOR_TRIES,
        "logging_config": logging_config(args.log_format),
    }
    engines = (
        serve.deployment(engine)
        .options(
            **common,
            name=ENGINES,
            **_number_of_engines(args),
            ray_actor_options=_with_environment(resources, ONE_EVENT_LOOP),
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER,
                # A conversation waits behind a whole batch at its home before it leaves its cache for an idle replica.
                # A new one waits behind one before it takes a home that another process might not find.
                request_router_kwargs={
                    "spill_absolute": 2 * options.running_limit,
                    "name_spill_absolute": options.running_limit,
                    "leaving_seconds": args.graceful_shutdown_timeout_seconds + ENDING_SECONDS,
                },
                request_routing_stats_period_s=args.routing_stats_period_seconds,
                request_routing_stats_timeout_s=5.0,
            ),
        )
        .bind(options, args.model_name())
    )
    responses = (
        serve.deployment(MemoryResponseStore)
        .options(**common, name=RESPONSES, num_replicas=1, ray_actor_options={"num_cpus": 0})
        .bind(args.store_limits(), LEASE_SECONDS)
    )
    application: Application = (
        serve.deployment(serve.ingress()(Ingress))
        .options(
            **{**common, "health_check_timeout_s": FRONT_DOOR_CHECK_TIMEOUT_SECONDS},
            name=FRONT_DOOR,
            num_replicas=args.ingress_replicas,
            ray_actor_options={
                "num_cpus": args.cpus_per_ingress,
                "runtime_env": {"env_vars": INGRESS_ENVIRONMENT},
            },
        )
        .bind(args, keys, engines, responses)
    )
    return application


def _with_environment(actor_options: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """The same options of a Ray actor, with these variables beside those that it has for its process."""
    runtime_env = actor_options["runtime_env"]
    return {**actor_options, "runtime_env": {**runtime_env, "env_vars": {**runtime_env["env_vars"], **variables}}}


def _number_of_engines(args: AppArgs) -> dict[str, Any]:
    if not args.autoscales:
        return {"num_replicas": args.replicas}
    least, most = args.replica_bounds()
    policy = AutoscalingPolicy(policy_function=EnginePolicy, policy_kwargs={"target": args.target_pressure})
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        initial_replicas=args.replicas,
        metrics_interval_s=PRESSURE_SECONDS,
        look_back_period_s=max(3 * PRESSURE_SECONDS, args.upscale_delay_seconds),
        upscale_delay_s=args.upscale_delay_seconds,
        downscale_delay_s=args.downscale_delay_seconds,
        policy=policy,
    )
    return {"autoscaling_config": scaling}
