"""What an operator chooses: `AppArgs`, the one argument of `serve_app.cluster.app:build`.

The same fields are the `args:` of a Serve config file, the keys of `moorage serve --config FILE` and, for the
common ones, flags of `moorage serve`. A value that cannot be used is refused with the name of its field
before anything starts. API keys are held as secrets: neither a repr nor a log shows them.
"""

from __future__ import annotations

import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from engine_actor.actor_options import ActorOptions
from engine_actor.limits import EngineLimits, Numerics
from serve_app.config_values import Memory, check_key, keys_of_file
from serve_app.ingress.settings import IngressSettings, RequestLimits, SamplingDefaults
from serve_app.openai.responses.store import StoreLimits

API_KEYS_VARIABLE = "MOORAGE_API_KEYS"


class AppArgs(RequestLimits):
    """The whole configuration of one application: one model, its replicas, its front door."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # The model
    model: str = Field(
        min_length=1,
        description="A known name (`moorage models` lists them), a Hugging Face folder, or a GGUF file. A path must "
        "exist on every node that runs a replica or an ingress.",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="The name clients use. Default: the known name, else that of the file or folder.",
    )
    backend: Literal["torch"] = Field("torch", description="What runs the model.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of the KV cache, and of weights that are not kept in 4 or 8 bits."
    )
    weights: Literal["auto", "stored", "expanded"] = Field(
        "auto",
        description="stored: what a GGUF file holds in 4 or 8 bits stays so in memory. expanded: it becomes dtype. "
        "auto: stored on a CPU with a compiler, else expanded.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one, else the CPU.")
    numerics: Numerics = Field(
        Numerics.AUTO,
        description="exact: a token is the same alone and in any batch. fast: near ties may fall either way. auto: "
        "exact where a probe at the start finds it so, else fast, and the start says so.",
    )

    # Replicas and what they ask of Ray
    replicas: int = Field(
        1,
        ge=0,
        le=4096,
        description="Engine replicas, each with its own copy of the model; at the start, if they vary.",
    )
    min_replicas: int | None = Field(
        None,
        ge=0,
        le=4096,
        description="Replicas that stay when little is asked. 0: none while nobody asks; the first request then waits "
        "for one to start. Default: `replicas`.",
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Replicas at most. Between min_replicas and this Ray Serve adds and removes them by load, and the "
        "cluster's autoscaler nodes for them. Default: `replicas`.",
    )
    target_pressure: float = Field(
        0.7,
        gt=0,
        le=1,
        description="Share of a replica that autoscaling wants in use: of its batch, of its KV pool, or of the prompts "
        "it can compute soon, whichever is most.",
    )
    upscale_delay_seconds: float = Field(
        5.0, ge=0, le=86_400, description="How long more replicas must be wanted before they are started."
    )
    downscale_delay_seconds: float = Field(
        300.0, ge=0, le=86_400, description="How long fewer must be wanted before one is stopped."
    )
    ingress_replicas: int = Field(1, ge=1, le=256, description="Processes that speak HTTP and render prompts.")
    cpus_per_replica: float | None = Field(
        None,
        gt=0,
        le=4096,
        description="CPUs Ray reserves for a replica. Default: what fits all of them on this machine.",
    )
    cpus_per_ingress: float = Field(0.1, gt=0, le=64, description="CPUs Ray reserves for an ingress process.")
    gpus_per_replica: float | None = Field(
        None,
        ge=0,
        le=16,
        description="GPUs Ray reserves for a replica; a fraction shares one. Default: 1 for device cuda, or for auto "
        "when the cluster has GPUs; else 0.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="Threads of a replica's math libraries. 0: cores of this machine / replicas."
    )

    # Memory and the limits of an engine
    kv_memory: Memory = Field(
        0.3,
        description='KV pool: bytes ("2GiB") for each replica, or a share (0.3) of the memory that is free at start. '
        "On the CPU the replicas divide that share among them.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest sequence, answer included. Default: the model's own context."
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens in a block of the KV pool.")
    max_batch_size: int = Field(32, ge=1, le=4096, description="Sequences in one step.")
    max_scheduled_tokens: int = Field(2048, ge=1, description="Tokens in one step.")
    chunk_size: int = Field(
        0, ge=0, description="Longest part of a prompt in one step. 0: only max_scheduled_tokens bounds it."
    )

    # Sessions and queues
    max_sessions: int = Field(256, ge=1, description="Conversations a replica keeps resident, idle ones leave first.")
    session_ttl_seconds: float = Field(
        3600.0, ge=0, le=1e9, description="A conversation idle for longer leaves the cache. 0: never."
    )
    max_running_sequences: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="Answers that a replica computes at a time; later turns wait in order of arrival. Default: "
        "max_batch_size, so that each running answer is in every step. More begin sooner, and all are slower.",
    )
    max_queued_turns: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="Turns that wait at a replica; beyond it clients get 429 with Retry-After. Default: three for each "
        "running answer, so that none waits much longer than three answers take.",
    )
    max_turns_per_session: int = Field(
        8, ge=1, description="Turns of one session, the running one included; beyond it clients get 429."
    )

    # The front door
    api_keys: tuple[SecretStr, ...] = Field(
        (), description=f"Keys clients may use. Prefer api_key_file or {API_KEYS_VARIABLE}. No key: no check."
    )
    api_key_file: Path | None = Field(
        None, description="A file with one key a line; empty lines and lines that start with # are skipped."
    )
    max_stored_responses: int = Field(
        10_000, ge=1, le=10**8, description="Responses kept for previous_response_id, in memory."
    )
    max_stored_response_bytes: int = Field(256 * 2**20, ge=1024, description="Their size, about.")
    stored_response_ttl_seconds: float = Field(
        86_400.0, gt=0, le=1e9, description="Responses of a conversation that rests for longer are forgotten."
    )

    # Operations
    log_format: Literal["text", "json"] = Field(
        "text",
        description="How replicas and ingress processes write their logs: text or json, one object a line.",
    )
    placement_timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="How long a turn waits for any replica to exist before it gets 503. Default: 10; 900 where "
        "min_replicas is 0.",
    )
    replacement_timeout_seconds: float = Field(
        900.0,
        gt=0,
        le=86_400,
        description="How long a turn whose replica is lost waits for another to take it, where one must start first.",
    )
    graceful_shutdown_timeout_seconds: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="How long a replica that is stopped may finish its answers. Must exceed the longest answer.",
    )
    health_check_period_seconds: float = Field(
        1.0,
        gt=0,
        le=600,
        description="How often Serve asks a replica if it is well; three failures, or three times 5 s without an "
        "answer, replace it.",
    )
    max_step_seconds: float = Field(
        300.0,
        ge=1,
        le=1e6,
        description="An engine that takes longer for a step counts as hung. Once its pace is known, less does: ten "
        "times what a full step (max_scheduled_tokens) takes it, but at least 10 s.",
    )
    routing_stats_period_seconds: float = Field(
        0.3, gt=0, le=60, description="How often replicas report residency and load to the routers."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_field_is_a_switch(cls, value: Any) -> Any:
        """Text is read as a number (`serve run` passes text), true and false are not."""
        if isinstance(value, bool):
            raise ValueError("true and false are not values of this field")
        return value

    @model_validator(mode="after")
    def _replicas_in_bounds(self) -> Self:
        least, most = self.replica_bounds()
        if most == 0:
            raise ValueError("replicas is 0, and without max_replicas it stays so")
        if not least <= self.replicas <= most:
            raise ValueError(
                f"replicas must be from min_replicas to max_replicas: {self.replicas} is not from {least} to {most}"
            )
        return self

    @field_validator("api_keys", mode="before")
    @classmethod
    def _plain_keys(cls, value: Any) -> Any:
        """A string is one key, not a list of letters."""
        return (value,) if isinstance(value, str | SecretStr) else value

    @field_validator("api_keys")
    @classmethod
    def _usable_keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in value:
            check_key(key.get_secret_value())
        return value

    def load_api_keys(self) -> tuple[SecretStr, ...]:
        """All keys: of `api_keys`, of the file, and of the environment (commas between). Raises
        ValueError."""
        keys = [key.get_secret_value() for key in self.api_keys]
        if self.api_key_file is not None:
            keys += keys_of_file(self.api_key_file)
        from_environment = [key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(",")]
        keys += [key for key in from_environment if key]
        for key in keys:
            check_key(key)
        return tuple(SecretStr(key) for key in dict.fromkeys(keys))

    def model_name(self) -> str:
        """The name clients use."""
        if self.served_model_name is not None:
            return self.served_model_name
        path = Path(self.model)
        return path.stem if path.suffix == ".gguf" else path.resolve().name if path.is_dir() else self.model

    def replica_bounds(self) -> tuple[int, int]:
        """Least and most replicas; equal without autoscaling. With it, `replicas` are there at the start."""
        least = self.replicas if self.min_replicas is None else self.min_replicas
        return least, self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def autoscales(self) -> bool:
        least, most = self.replica_bounds()
        return least < most

    @property
    def starts_on_demand(self) -> bool:
        """Whether there may be no replica until a turn wants one."""
        return self.replica_bounds()[0] == 0

    def resolved_placement_timeout(self) -> float:
        if self.placement_timeout_seconds is not None:
            return self.placement_timeout_seconds
        return 900.0 if self.starts_on_demand else 10.0

    def resolved_threads(self, cores: int) -> int:
        return self.threads or max(1, cores // self.replica_bounds()[1])

    def resolved_cpus(self, cores: int) -> float:
        """CPUs of a replica such that all of them and the ingress fit on a machine of `cores`; the Serve
        controller and proxies ask for none. Never more than the threads it runs."""
        if self.cpus_per_replica is not None:
            return self.cpus_per_replica
        rest = max(cores - self.ingress_replicas * self.cpus_per_ingress, 0.0)
        fitting = math.floor(rest / self.replica_bounds()[1] * 100) / 100
        return max(0.01, min(float(self.resolved_threads(cores)), fitting))

    def resolved_gpus(self, cluster_gpus: float) -> float:
        if self.gpus_per_replica is not None:
            return self.gpus_per_replica
        if self.device == "cuda":
            return 1.0
        return 1.0 if self.device == "auto" and cluster_gpus >= max(1, self.replicas) else 0.0

    def engine_resources(self, cores: int, cluster_gpus: float) -> dict[str, Any]:
        """Options of the Ray actor that one engine runs in."""
        threads = str(self.resolved_threads(cores))
        # Read when the math libraries are loaded, so it must be there before the process starts. Passive, unless the
        # operator knows better: threads that spin between operations take the cores of all other processes.
        math_libraries = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        return {
            "num_cpus": self.resolved_cpus(cores),
            "num_gpus": self.resolved_gpus(cluster_gpus),
            "runtime_env": {"env_vars": math_libraries},
        }

    def actor_options(self, *, cores: int, on_gpu: bool) -> ActorOptions:
        """Options of one engine. `model` is as given: each process resolves it on its own node."""
        share = self.kv_memory if on_gpu or self.kv_memory > 1 else self.kv_memory / self.replica_bounds()[1]
        chosen = {
            "kv_memory": share,
            "threads": self.resolved_threads(cores),
            "limits": EngineLimits(**self._named(EngineLimits)),
        }
        return ActorOptions(**(self._named(ActorOptions) | chosen))

    def _named(self, kind: type[ActorOptions | EngineLimits]) -> dict[str, Any]:
        """The values of those fields that `kind` has under the same name."""
        return {field.name: getattr(self, field.name) for field in fields(kind) if field.name in AppArgs.model_fields}

    def store_limits(self) -> StoreLimits:
        return StoreLimits(self.max_stored_responses, self.max_stored_response_bytes, self.stored_response_ttl_seconds)

    def ingress_settings(self, keys: tuple[SecretStr, ...], *, sampling: SamplingDefaults) -> IngressSettings:
        """`sampling`: the model's own defaults. How long a sequence may be, the replicas say."""
        return IngressSettings(
            **{name: getattr(self, name) for name in RequestLimits.model_fields},
            model_ids=(self.model_name(),),
            sampling=sampling,
            api_keys=tuple(key.get_secret_value() for key in keys),
            answers_request_id=False,  # Serve's proxy gives every request an id and adds it to the answer
        )


def describe_errors(error: ValidationError) -> list[str]:
    """One line a field: its name, what is wrong, and the value unless the field holds secrets or the line has it."""
    lines = []
    for item in error.errors():
        name, message = ".".join(str(part) for part in item["loc"]) or "arguments", item["msg"]
        value = repr(item["input"])
        hidden = "api_key" in name or item["type"] == "missing" or value in message
        lines.append(f"{name}: {message.removeprefix('Value error, ')}{'' if hidden else f' (got {value})'}")
    return lines
