"""A whole job whose engines are lost: it ends with the reason, and is gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from serve_app.config import AppArgs
from serve_app.jobs import job, pool, runner
from serve_app.jobs.job import BatchOptions
from serve_app.jobs.pool import PoolClient
from tests.support.batch_engines import GOOD, STOPPED, ScriptedEngine

LINES = 20


@pytest.fixture
def options(tmp_path: Path, smollm2_path: Path) -> BatchOptions:
    source = tmp_path / "in.jsonl"
    calls = [
        {"custom_id": f"c{i}", "url": "/v1/completions", "body": {"model": "smollm2", "prompt": f"{i} cats"}}
        for i in range(LINES)
    ]
    source.write_text("\n".join(json.dumps(call) for call in calls))
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {smollm2_path}\nserved_model_name: smollm2\n")
    return BatchOptions(source, tmp_path / "out.jsonl", config, None, 4, 5, None, verbose=False)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Engines for the next job. Ray is not started, and nothing is waited for."""
    for name in ("_catch_signals", "disconnect"):
        monkeypatch.setattr(job, name, lambda: None)
    monkeypatch.setattr(job, "start_ray", lambda *_, **__: None)
    monkeypatch.setattr(ray, "kill", lambda *_, **__: None)
    monkeypatch.setattr(pool, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(runner, "_LONGEST_PAUSE_SECONDS", 0.001)

    def put(*engines: ScriptedEngine) -> None:
        async def start_pool(args: AppArgs, told: Any) -> PoolClient:
            return PoolClient(engines, 100)

        monkeypatch.setattr(pool, "start_pool", start_pool)

    return put


def test_engines_that_are_all_lost_end_the_job_and_the_next_one_goes_on(
    options: BatchOptions, use: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(ScriptedEngine(*[GOOD] * 5, STOPPED), ScriptedEngine(*[GOOD] * 3, RayActorError()))
    assert job.run(options, {}) == 1
    told = capsys.readouterr()
    assert "engine 1 is lost, and is started again (1 of 3): the engine stopped" in told.out
    assert "is lost for good, and 0 are left" in told.out
    assert "no answer in 5 tries" in told.err and "the engines of this job are lost" in told.err
    assert "lines that are done are kept: start it again to go on" in told.err
    assert not options.output.exists()
    done = options.output.with_name("out.jsonl.partial").read_bytes().count(b"\n")
    assert done == 8

    use(ScriptedEngine(GOOD), ScriptedEngine(RayActorError(), GOOD))
    assert job.run(options, {}) == 0
    assert f"{LINES} lines answered, 0 failed ({done} lines by an earlier run)" in capsys.readouterr().out
    records = [json.loads(line) for line in options.output.read_bytes().splitlines()]
    assert [record["custom_id"] for record in records] == [f"c{i}" for i in range(LINES)]
    assert all(record["error"] is None for record in records)
