"""Metrics without Ray: what is recorded for a turn, a step and a reading of the engine."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from engine_actor.messages import (
    EndReason,
    Failure,
    RefusalCode,
    TurnAccepted,
    TurnDelta,
    TurnEnded,
    TurnRefused,
    TurnTokens,
)
from engine_actor.requests.outcomes import Deferral, DeferralReason, StepOutcome, StepReport
from serve_app import telemetry
from serve_app.telemetry import metrics as m
from serve_app.telemetry.observers import StepWatch, TurnWatch
from serve_app.telemetry.reporter import PUBLISH_SECONDS, Reporter
from tests.support.doubles import SyntheticDecoder
from tests.support.engines import engine_of
from tests.unit.actor.helpers import ask, start_actor, turn


class Exported:
    """What Ray would export: sums of counters, last values of gauges, all observations."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = defaultdict(float)
        self.observed: dict[str, list[float]] = defaultdict(list)
        self.metrics = m.EngineMetrics(self._open)

    def _open(self, metric: m.Metric) -> m.Record:
        def record(value: float, tag: str) -> None:
            assert bool(tag) == (metric.tag is not None), (metric, tag)
            if metric.kind is m.Kind.HISTOGRAM:
                self.observed[metric.name].append(value)
            elif metric.kind is m.Kind.COUNTER:
                assert value > 0  # Ray refuses anything else
                self.values[metric.name, tag] += value
            else:
                self.values[metric.name, tag] = value

        return record

    def of(self, name: str) -> dict[str, float]:
        return {tag: value for (known, tag), value in self.values.items() if known == name}


@pytest.fixture(autouse=True)
def recorded(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What `Exported` refuses is only told in the log."""
    yield
    if "caplog" not in request.function.__code__.co_varnames:
        assert "cannot be recorded" not in caplog.text


STATS = {
    "blocks_usable": 10.0,
    "running": 0.0,
    "waiting": 0.0,
    "waiting_turns": 0.0,
    "blocks_active": 0.0,
    "blocks_free": 0.0,
    "blocks_idle": 0.0,
    "sessions": 0.0,
    "preemptions": 0.0,
    "draft_tokens": 0.0,
    "accepted_draft_tokens": 0.0,
    "prefill_tokens": 0.0,
    "decode_tokens": 0.0,
    "evicted_for_blocks": 0.0,
    "evicted_for_sessions": 0.0,
    "expired": 0.0,
    "rollbacks": 0.0,
    "committed_steps": 0.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(exported: Exported, *deltas: tuple[float, TurnDelta], choices: int = 1) -> None:
    """Deltas with the seconds since the one before."""
    clock = Clock()
    with TurnWatch(exported.metrics, choices, clock) as turn_watch:
        for seconds, delta in deltas:
            clock.now += seconds
            turn_watch.note(delta)
    exported.metrics.publish(STATS)


def test_a_metric_that_cannot_be_recorded_hurts_nobody_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Else it would end the turn, or stop the engine, whose thread reports each step."""

    def refuse(value: float, tag: str) -> None:
        raise ValueError("no exporter")

    metrics = m.EngineMetrics(lambda _: refuse)
    step = StepReport(transaction_id=1, outcome=StepOutcome.COMMITTED, rows=1, tokens=1)
    for _ in range(2):
        StepWatch(metrics)(step)
        with TurnWatch(metrics, 1) as turn_watch:
            turn_watch.note(TurnAccepted("r", 3, 0))
            turn_watch.note(TurnTokens((1,)))
            turn_watch.note(TurnEnded(EndReason.STOP, 3, 0, 1))
        metrics.publish(STATS)
    told = [record.getMessage() for record in caplog.records]
    assert f"the metric {m.END_TO_END.name} cannot be recorded" in told
    assert len(told) == len(set(told))


def test_a_turn_is_counted_with_its_tokens_its_cache_and_its_times() -> None:
    exported = Exported()
    watch(
        exported,
        (1.0, TurnAccepted("r", 100, 60)),
        (1.0, TurnTokens((7,))),
        (0.5, TurnTokens((8, 9))),
        (0.5, TurnEnded(EndReason.STOP, 100, 76, 3)),
    )
    assert exported.of("vllm_prompt_tokens") == {"": 100}
    assert exported.of("vllm_generation_tokens") == {"": 3}
    assert exported.of("vllm_prefix_cache_queries") == {"": 100}
    assert exported.of("vllm_prefix_cache_hits") == {"": 76}
    assert exported.of("moorage_cached_tokens") == {"session": 60, "prefix": 16}
    assert exported.of("vllm_request_success") == {"stop": 1}
    assert exported.observed["vllm_time_to_first_token_seconds"] == [2.0]
    assert exported.observed["vllm_inter_token_latency_seconds"] == [0.25]
    assert exported.observed["vllm_e2e_request_latency_seconds"] == [3.0]
    assert exported.observed["vllm_request_generation_tokens"] == [3]


def test_choices_share_one_prompt_and_a_client_that_leaves_aborts_those_that_are_open() -> None:
    exported = Exported()
    watch(
        exported,
        (0.0, TurnAccepted("r", 10, 4)),
        (1.0, TurnTokens((1,), choice=0)),
        (0.0, TurnTokens((2,), choice=1)),
        (0.0, TurnEnded(EndReason.LENGTH, 10, 9, 1, choice=1)),
        choices=3,
    )
    assert exported.of("vllm_prompt_tokens") == {"": 10}
    assert exported.of("vllm_prefix_cache_hits") == {"": 4}
    assert exported.of("vllm_request_success") == {"length": 1, "abort": 2}
    assert exported.observed["vllm_time_to_first_token_seconds"] == [1.0]
    assert not exported.observed["vllm_e2e_request_latency_seconds"]


def test_a_refused_turn_counts_by_its_code_and_nowhere_else() -> None:
    exported = Exported()
    watch(exported, (0.0, TurnRefused(RefusalCode.QUEUE_FULL, "full")))
    assert exported.of("moorage_refused_turns") == {"queue_full": 1}
    assert not exported.of("vllm_request_success")
    assert not exported.of("vllm_prompt_tokens")


def test_a_failed_answer_counts_as_an_error_and_one_whose_session_is_deleted_as_aborted() -> None:
    exported = Exported()
    watch(exported, (0.0, TurnAccepted("r", 5, 0)), (1.0, TurnEnded(EndReason.FAILED, 5, 0, 0, "gone")))
    deleted = TurnEnded(EndReason.FAILED, 5, 0, 0, "deleted", failure=Failure.SESSION_DELETED)
    watch(exported, (0.0, TurnAccepted("r", 5, 0)), (1.0, deleted))
    assert exported.of("vllm_request_success") == {"error": 1, "abort": 1}


def test_a_step_is_split_into_model_and_host_and_its_deferrals_into_reasons() -> None:
    exported = Exported()
    step = StepWatch(exported.metrics)
    reasons = (DeferralReason.BLOCKS, DeferralReason.ROWS, DeferralReason.BLOCKS)
    deferrals = tuple(Deferral(number, reason) for number, reason in enumerate(reasons))
    step(
        StepReport(
            transaction_id=1,
            outcome=StepOutcome.COMMITTED,
            deferrals=deferrals,
            rows=2,
            tokens=33,
            prefill_tokens=32,
            decoder_seconds=0.75,
            step_seconds=1.0,
        )
    )
    step(StepReport(transaction_id=2, outcome=StepOutcome.CAPACITY_DEFERRED, deferrals=deferrals[:1]))
    exported.metrics.publish(STATS)
    assert exported.of("moorage_step_seconds") == {"forward": 0.75, "host": 0.25}
    assert exported.of("moorage_deferrals") == {"blocks": 3, "rows": 1}
    assert exported.observed["vllm_iteration_tokens_total"] == [33]


def test_counters_are_handed_on_once_and_gauges_every_time() -> None:
    exported = Exported()
    exported.metrics.publish(STATS | {"preemptions": 2.0, "blocks_active": 4.0, "blocks_free": 1.0, "blocks_idle": 2.0})
    exported.metrics.publish(STATS | {"preemptions": 3.0, "waiting": 1.0, "waiting_turns": 2.0})
    assert exported.of("vllm_num_preemptions") == {"": 3}
    assert exported.of("vllm_num_requests_waiting") == {"": 3}
    assert exported.of("vllm_kv_cache_usage_perc") == {"": 0}
    assert exported.of("moorage_kv_blocks") == {"active": 0, "dormant": 10, "idle": 0, "free": 0}


async def test_a_reading_of_a_real_engine_has_all_that_is_exported() -> None:
    """Blocks of a conversation that rests are dormant, not in use."""
    exported = Exported()
    actor = await start_actor(SyntheticDecoder(), blocks=16)
    await ask(actor, turn([1, 2, 3, 4, 5], limit=3, session="a"))
    await Reporter("r", exported.metrics, actor.stats).report()
    await actor.stop()
    assert exported.of("moorage_resident_sessions") == {"": 1}
    assert exported.of("vllm_kv_cache_usage_perc") == {"": 0}
    blocks = exported.of("moorage_kv_blocks")
    assert sum(blocks.values()) == 16
    assert blocks["active"] == 0
    assert blocks["dormant"] == 2
    assert exported.of("moorage_computed_tokens") == {"prefill": 5, "decode": 2}


def test_blocks_in_use_are_those_of_running_requests_shared_ones_once() -> None:
    engine = engine_of(SyntheticDecoder(), num_blocks=16, block_size=4, max_batch_size=4)
    first = engine.create_request()
    first.begin_turn([1, 2, 3, 4, 5, 6])
    engine.run(16)
    assert engine.active_blocks() == 2
    second = engine.create_request()
    second.begin_turn([1, 2, 3, 4, 9])  # finds the first block in the prefix index
    engine.run(16)
    assert engine.active_blocks() == 3


async def test_the_summary_comes_once_an_interval_and_only_after_work(caplog: pytest.LogCaptureFixture) -> None:
    exported, clock = Exported(), Clock()
    stats = dict(STATS)

    async def read() -> dict[str, float]:
        return stats

    reporter = Reporter("r1", exported.metrics, read, clock)
    with caplog.at_level("INFO", "moorage.engine"):
        clock.now += 5
        exported.metrics.add(m.GENERATION_TOKENS, 50)
        exported.metrics.add(m.CACHE_QUERIES, 200)
        exported.metrics.add(m.CACHE_HITS, 150)
        stats |= {"prefill_tokens": 40.0, "running": 1.0, "blocks_active": 5.0, "sessions": 3.0}
        await reporter.report()
        assert not caplog.messages
        clock.now += 5
        await reporter.report()
        [line] = caplog.messages
        stats["running"] = 0.0
        clock.now += 10
        await reporter.report()
        assert caplog.messages == [line]
    for part in (
        "r1: Avg prompt throughput: 4.0 tokens/s",
        "generation throughput: 5.0 tokens/s",
        "Running: 1 reqs",
        "KV cache usage: 50.0%",
        "Prefix cache hit rate: 75.0%",
        "Resident sessions: 3",
    ):
        assert part in line


def test_names_are_what_prometheus_and_ray_take_and_the_guide_lists_them_all() -> None:
    names = [metric.name for metric in m.METRICS]
    assert len(set(names)) == len(names) > 20
    guide = (Path(__file__).parents[3] / "serve_app" / "docs" / "operations.md").read_text("utf-8")
    for name in names:
        assert re.fullmatch(r"(vllm|moorage)_[a-z0-9_]+", name)
        assert f"`{name}`" in guide, name


def test_the_guide_says_how_old_a_gauge_may_be() -> None:
    handed_on = ray._config.metrics_report_interval_ms() / 1000
    guide = Path(telemetry.__path__[0]).parent.joinpath("docs/operations.md").read_text("utf-8")
    words = " ".join(guide.split())
    assert f"to the node's port every {handed_on:g} s, so a gauge that is scraped is up to" in words
    assert f"is up to {handed_on + PUBLISH_SECONDS:g} s old" in words
