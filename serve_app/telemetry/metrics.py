"""The metrics of an engine replica: their names, and how they reach Ray, which exports them for Prometheus.

Names and labels are those that vLLM has when Ray Serve runs it, so that boards made for it show Moorage too: Ray puts
`ray_` before a name and `_total` behind a counter's, and since it takes no colon, `vllm:x` is `vllm_x`. What vLLM has
no word for begins with `moorage_`. Ray Serve adds the labels deployment, replica and application.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ray.serve import metrics as serve_metrics

logger = logging.getLogger("moorage.engine")

ENGINE = "0"
"""Label `engine`: vLLM counts engines inside a replica, and here a replica has one."""

# Fine steps, since Ray keeps counts alone: a histogram's sum, and so its mean, is made from the middles of the buckets.
_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
_SECONDS = tuple(round(step * 10.0**power, 4) for power in range(-3, 3) for step in _STEPS)
_TOKENS = tuple(step * 10.0**power for power in range(6) for step in _STEPS)


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`tag`: a label besides model_name and engine. `boundaries`: upper ends of a histogram's buckets."""

    name: str
    kind: Kind
    description: str
    tag: str | None = None
    boundaries: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """Its names in Prometheus."""
        suffixes = {Kind.GAUGE: ("",), Kind.COUNTER: ("_total",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
        return tuple(f"ray_{self.name}{suffix}" for suffix in suffixes[self.kind])


def _gauge(name: str, description: str, tag: str | None = None) -> Metric:
    return Metric(name, Kind.GAUGE, description, tag)


def _counter(name: str, description: str, tag: str | None = None) -> Metric:
    return Metric(name, Kind.COUNTER, description, tag)


def _histogram(name: str, description: str, boundaries: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, description, None, boundaries)


RUNNING = _gauge("vllm_num_requests_running", "Requests that the engine computes now.")
WAITING = _gauge("vllm_num_requests_waiting", "Requests that wait for a place, for memory, or for an earlier turn.")
KV_USAGE = _gauge("vllm_kv_cache_usage_perc", "Share (0 to 1) of the KV cache that running requests hold.")
PREEMPTIONS = _counter("vllm_num_preemptions", "Running requests that gave their memory to another one.")
PROMPT_TOKENS = _counter("vllm_prompt_tokens", "Prompt tokens of accepted turns, cached ones included.")
GENERATION_TOKENS = _counter("vllm_generation_tokens", "Generated tokens that were delivered.")
CACHE_QUERIES = _counter("vllm_prefix_cache_queries", "Prompt tokens that were looked up in the KV cache.")
CACHE_HITS = _counter("vllm_prefix_cache_hits", "Prompt tokens that were found there.")
SUCCESS = _counter("vllm_request_success", "Answers by how they ended: stop, length, abort, error.", "finished_reason")
DRAFTS = _counter("vllm_spec_decode_num_draft_tokens", "Draft tokens that were verified.")
ACCEPTED_DRAFTS = _counter("vllm_spec_decode_num_accepted_tokens", "Draft tokens that were right.")
FIRST_TOKEN = _histogram("vllm_time_to_first_token_seconds", "From a turn's arrival at its replica.", _SECONDS)
INTER_TOKEN = _histogram("vllm_inter_token_latency_seconds", "Time per token after the first.", _SECONDS)
END_TO_END = _histogram("vllm_e2e_request_latency_seconds", "From a turn's arrival to its last token.", _SECONDS)
REQUEST_PROMPT = _histogram("vllm_request_prompt_tokens", "Prompt tokens of a turn.", _TOKENS)
REQUEST_GENERATION = _histogram("vllm_request_generation_tokens", "Generated tokens of an answer.", _TOKENS)
ITERATION_TOKENS = _histogram("vllm_iteration_tokens_total", "Tokens in one step of the engine.", _TOKENS)

SESSIONS = _gauge("moorage_resident_sessions", "Conversations whose KV cache is resident.")
KV_BLOCKS = _gauge("moorage_kv_blocks", "Blocks of the KV pool: active, dormant, idle (prefixes), free.", "state")
CACHED_TOKENS = _counter("moorage_cached_tokens", "Prompt tokens not recomputed, by source: session, prefix.", "source")
COMPUTED_TOKENS = _counter("moorage_computed_tokens", "Tokens that went through the model: prefill, decode.", "phase")
DEFERRALS = _counter("moorage_deferrals", "Requests that a step left for later, by what was missing.", "reason")
EVICTIONS = _counter("moorage_evicted_sessions", "Sessions that lost their KV cache to: blocks, places, ttl.", "reason")
ROLLBACKS = _counter("moorage_rollbacks", "Steps that were undone.")
STEPS = _counter("moorage_steps", "Steps that were committed.")
STEP_SECONDS = _counter("moorage_step_seconds", "Time in steps: forward (the model), host (all the rest).", "part")
REFUSALS = _counter("moorage_refused_turns", "Turns that this replica refused, by reason.", "code")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

Record = Callable[[float, str], None]
"""Takes a value and that of the metric's own tag ("" if it has none)."""


def open_in_ray(metric: Metric, model_name: str) -> Record:
    """The metric as an object of Ray Serve. Inside a replica only, which gives it its labels."""
    keys = ("model_name", "engine", *((metric.tag,) if metric.tag else ()))
    if metric.kind is Kind.GAUGE:
        gauge = serve_metrics.Gauge(metric.name, metric.description, keys)
        record = gauge.set
    elif metric.kind is Kind.COUNTER:
        gauge = serve_metrics.Counter(metric.name, metric.description, keys)
        record = gauge.inc
    else:
        gauge = serve_metrics.Histogram(metric.name, metric.description, list(metric.boundaries), keys)
        record = gauge.observe
    gauge.set_default_tags({"model_name": model_name, "engine": ENGINE})
    if metric.tag is None:
        return lambda value, _: record(value)
    return lambda value, tag: record(value, {metric.tag: tag})


class EngineMetrics:
    """All metrics of one engine. Counters are summed up here, which costs next to nothing, and handed on by `publish`.

    `add` and `observe` may be called from two threads, as long as each counter has only one that adds to it. What is
    measured must not suffer from it, so a metric that cannot be recorded is told of in the log, once.
    """

    def __init__(self, open_metric: Callable[[Metric], Record]) -> None:
        self._records = {metric: open_metric(metric) for metric in METRICS}
        self._totals: dict[tuple[Metric, str], float] = {}
        self._published: dict[tuple[Metric, str], float] = {}
        self._broken: set[Metric] = set()

    def observe(self, histogram: Metric, value: float) -> None:
        self._record(histogram, value, "")

    def _record(self, metric: Metric, value: float, tag: str) -> None:
        try:
            self._records[metric](value, tag)
        except Exception:
            if metric not in self._broken:
                self._broken.add(metric)
                logger.exception("the metric %s cannot be recorded", metric.name)

    def add(self, counter: Metric, amount: float, tag: str = "") -> None:
        key = (counter, tag)
        self._totals[key] = self._totals.get(key, 0.0) + amount

    def total(self, counter: Metric) -> float:
        """Over all values of its tag."""
        return sum(value for (metric, _), value in self._totals.copy().items() if metric is counter)

    def publish(self, stats: Mapping[str, float]) -> None:
        """`stats`: of the EngineActor, at this moment."""
        for gauge, tag, value in _gauges(stats):
            self._record(gauge, value, tag)
        self._totals.update({(counter, tag): total for counter, tag, total in _totals(stats)})
        for (counter, tag), total in self._totals.copy().items():  # the owner thread may add a key meanwhile
            growth = total - self._published.get((counter, tag), 0.0)
            if growth > 0:
                self._record(counter, growth, tag)
                self._published[counter, tag] = total


def _gauges(stats: Mapping[str, float]) -> Iterator[tuple[Metric, str, float]]:
    usable, active = stats["blocks_usable"], stats["blocks_active"]
    free, idle = stats["blocks_free"], stats["blocks_idle"]
    yield RUNNING, "", stats["running"]
    yield WAITING, "", stats["waiting"] + stats["waiting_turns"]
    yield KV_USAGE, "", active / usable
    yield SESSIONS, "", stats["sessions"]
    yield KV_BLOCKS, "active", active
    yield KV_BLOCKS, "dormant", usable - free - idle - active
    yield KV_BLOCKS, "idle", idle
    yield KV_BLOCKS, "free", free


def _totals(stats: Mapping[str, float]) -> Iterator[tuple[Metric, str, float]]:
    yield PREEMPTIONS, "", stats["preemptions"]
    yield DRAFTS, "", stats["draft_tokens"]
    yield ACCEPTED_DRAFTS, "", stats["accepted_draft_tokens"]
    yield COMPUTED_TOKENS, "prefill", stats["prefill_tokens"]
    yield COMPUTED_TOKENS, "decode", stats["decode_tokens"]
    yield EVICTIONS, "blocks", stats["evicted_for_blocks"]
    yield EVICTIONS, "places", stats["evicted_for_sessions"]
    yield EVICTIONS, "ttl", stats["expired"]
    yield ROLLBACKS, "", stats["rollbacks"]
    yield STEPS, "", stats["committed_steps"]
