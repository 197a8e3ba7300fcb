"""The guide of the configuration, made of the fields themselves, so that it says what they say."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from pydantic_core import PydanticUndefined

from serve_app.config import AppArgs

# By what an operator asks for; a field that nobody named stands at the end.
_GROUPS = {
    "The model": ("model", "served_model_name", "backend", "dtype", "weights", "device", "numerics"),
    "Replicas and what they ask of Ray": (
        *("replicas", "min_replicas", "max_replicas", "target_pressure", "upscale_delay_seconds"),
        *("downscale_delay_seconds", "ingress_replicas", "cpus_per_replica", "cpus_per_ingress", "gpus_per_replica"),
        "threads",
    ),
    "Memory and the limits of an engine": (
        *("kv_memory", "max_model_len", "block_size", "max_batch_size", "max_scheduled_tokens", "chunk_size"),
    ),
    "Sessions and queues": (
        *("max_sessions", "session_ttl_seconds", "max_running_sequences", "max_queued_turns", "max_turns_per_session"),
        *("max_turns", "max_turns_per_key"),
    ),
    "Keys and doors": ("api_keys", "api_key_file", "allowed_hosts", "allowed_origins", "session_header"),
    "Operations": (
        *("log_format", "placement_timeout_seconds", "replacement_timeout_seconds"),
        "graceful_shutdown_timeout_seconds",
        *("health_check_period_seconds", "max_step_seconds", "routing_stats_period_seconds"),
    ),
}
_REST = "What a request may be"


def groups() -> dict[str, list[str]]:
    """Names of all fields by the title of their group."""
    named = {title: [name for name in names if name in AppArgs.model_fields] for title, names in _GROUPS.items()}
    listed = {name for names in named.values() for name in names}
    return named | {_REST: [name for name in AppArgs.model_fields if name not in listed]}


def rows(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """(name, default, description) of each field."""
    for name in names:
        field = AppArgs.model_fields[name]
        text = field.description or ""
        yield name, "see right" if field.default is None and "Default:" in text else _shown(field.default), text


def _shown(default: object) -> str:
    if default is PydanticUndefined:
        return "needed"
    if isinstance(default, Enum):
        return str(default.value)
    if default is None or default == ():
        return "none"
    if isinstance(default, int) and default and default % 2**20 == 0:
        return f"{default // 2**20} MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def markdown() -> str:
    """One table for each group."""
    parts = []
    for title, names in groups().items():
        lines = [f"| `{name}` | {default} | {text} |" for name, default, text in rows(names)]
        parts.append("\n".join([f"## {title}", "", "| Field | Default | Meaning |", "|---|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"
