"""A batch job that is killed, started again, stopped, and started again: each line is answered once, in its place."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.serve.handle import DeploymentHandle

from engine_actor.messages import EndReason, TurnEnded, TurnRequest, TurnTokens
from engine_actor.options import SamplingParams
from serve_app.commands.local_ray import APPLICATION
from serve_app.config import AppArgs
from serve_app.jobs import pool as pool_module
from serve_app.jobs.pool import PoolClient
from tests.cluster.scripted import Deploy, MortalBatchEngine

pytestmark = pytest.mark.timeout(400)

DEADLINE_SECONDS = 150
ONE_AT_A_TIME = ("--concurrency", "1")
BAD = {
    3: (None, "invalid_json", None),
    8: ("c8", "400", 400),
    12: ("c12", "invalid_grammar", 400),
}  # line: custom_id, code of the error, status
TOTAL = 12
PAIRS = "([0-9]{2}, ){60}"
GUIDED: dict[int, dict[str, Any]] = {
    2: {"structured_outputs": {"regex": PAIRS}},
    10: {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "string", "pattern": f"^{PAIRS}$"}},
        }
    },
    12: {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
}


@pytest.fixture(scope="module")
def engines(deploy: Deploy) -> DeploymentHandle:
    return deploy(replicas=1, kv_memory="64MiB", threads=1, cpus_per_replica=1.0)


@pytest.fixture
def files(tmp_path: Path, smollm2_path: Path) -> Path:
    """A folder with an input and a config."""
    texts = []
    for number in range(1, TOTAL + 1):
        body = {"model": "smollm2", "prompt": f"{number} cats", "max_tokens": 0 if number == 8 else 40}
        body |= {"temperature": 0, **(GUIDED.get(number) or {"ignore_eos": True})}
        texts.append(json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}))
    texts[3 - 1] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(texts), "utf-8")
    (tmp_path / "config.yaml").write_text(f"model: {smollm2_path}\nserved_model_name: smollm2\nthreads: 1\n", "utf-8")
    return tmp_path


@contextmanager
def job(files: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "serve_app.jobs.batch", "--config", str(files / "config.yaml"), *flags]
    command += ["--input", str(files / "in.jsonl"), "--output", str(files / "out.jsonl")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def done(files: Path) -> list[dict[str, Any]]:
    """The records that the journal has."""
    partial = files / "out.jsonl.partial"
    whole = partial.read_bytes().split(b"\n")[:-1] if partial.exists() else []
    return [json.loads(text)["record"] for text in whole]


def wait_for_lines(files: Path, count: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + DEADLINE_SECONDS
    while len(done(files)) < count:
        assert process.poll() is None and time.monotonic() < limit, process.communicate(timeout=10)
        time.sleep(0.01)


def _is_engine(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[0].startswith("ray::BatchEngine")
    except (psutil.Error, IndexError):
        return False


def test_a_job_goes_on_where_it_was_however_it_ended_and_whose_engines_it_has(
    engines: DeploymentHandle, files: Path
) -> None:
    joined = ("--address", ray.get_runtime_context().gcs_address, "--deployment", APPLICATION, *ONE_AT_A_TIME)
    with job(files, *joined) as killed:
        wait_for_lines(files, 4, killed)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    before = done(files)
    assert 4 <= len(before) < TOTAL
    assert not (files / "out.jsonl").exists()

    with job(files, *joined) as stopped:
        wait_for_lines(files, len(before) + 2, stopped)
        stopped.send_signal(signal.SIGTERM)
        printed, _ = stopped.communicate(timeout=DEADLINE_SECONDS)
        assert stopped.returncode == 130, printed
    assert f"{TOTAL} lines, {len(before)} of them done by an earlier run" in printed
    assert printed.rstrip().endswith("start it again to go on")
    assert "Traceback" not in printed
    assert done(files)[: len(before)] == before
    before = done(files)
    assert len(before) < TOTAL

    with job(files, "--kv-memory", "64MiB") as last:  # with a Ray and an engine of its own, which is killed
        wait_for_lines(files, len(before) + 1, last)
        [engine] = [p for p in psutil.Process(last.pid).children(recursive=True) if _is_engine(p)]
        engine.kill()
        printed, _ = last.communicate(timeout=DEADLINE_SECONDS)
        assert last.returncode == 0, printed
    assert not (files / "out.jsonl.partial").exists()
    assert "engine 1 is lost, and is started again (1 of 3)" in printed and "engine 1 is ready again" in printed
    records = [json.loads(text) for text in (files / "out.jsonl").read_bytes().splitlines()]
    assert f"{TOTAL - len(BAD)} lines answered, {len(BAD)} failed ({len(before)} lines by an earlier run)" in printed

    assert [record for record in before if record not in records] == [], "a finished line was asked again"
    assert len({record["id"] for record in records}) == TOTAL
    for number, record in enumerate(records, start=1):
        if number in BAD:
            custom_id, code, status = BAD[number]
            assert (record["custom_id"], record["error"]["code"]) == (custom_id, code)
            assert (record["response"] and record["response"]["status_code"]) == status
        else:
            assert (record["custom_id"], record["error"]) == (f"c{number}", None)
            assert record["response"]["body"]["usage"]["completion_tokens"] == 40
            if number in GUIDED:
                assert re.fullmatch('"?([0-9]{2}, )+[0-9]{0,2},?', record["response"]["body"]["choices"][0]["text"])


async def told(pool: PoolClient, number: int) -> list[int]:
    prompt = tuple(range(1000 + 10 * number, 1040 + 10 * number))
    request = TurnRequest(f"r{number}", "public", None, prompt, SamplingParams(), 60, ignore_eos=True)
    deltas = [delta async for delta in pool.stream_turn(request, routing_key=None)]
    assert isinstance(deltas[-1], TurnEnded) and deltas[-1].reason is EndReason.LENGTH, deltas[-1]
    return [token for delta in deltas if isinstance(delta, TurnTokens) for token in delta.token_ids]


async def test_engines_of_a_job_that_break_hang_or_are_killed_are_replaced_and_their_lines_are_done(
    engines: DeploymentHandle, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pool_module, "say", said.append)
    monkeypatch.setattr(pool_module, "BatchEngine", MortalBatchEngine)
    args = {"model": str(smollm2_path), "kv_memory": "64MiB", "threads": 1, "cpus_per_replica": 0.1, "replicas": 2}
    pool = await pool_module.start_pool(AppArgs.model_validate({**args, "max_step_seconds": 5.0}), lambda _: None)
    try:
        expected = await asyncio.gather(*(told(pool, number) for number in range(8)))
        for how in ("break", "hang", "kill"):
            said.clear()
            running = asyncio.gather(*(told(pool, number) for number in range(8)))
            victim = pool._engines[0]
            while not victim.open:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert not running.done()
            if how == "kill":
                os.kill(await victim.actor.process.remote(), signal.SIGKILL)
            else:
                await victim.actor.harm.remote(how)
            assert await running == expected, how
            async with asyncio.timeout(DEADLINE_SECONDS):
                while pool._replacing:
                    await asyncio.sleep(0.1)
            assert [line.partition(":")[0] for line in said] == [
                "engine 1 is lost, and is started again (1 of 3)",
                "engine 1 is ready again",
            ]
            assert await asyncio.gather(*(told(pool, number) for number in range(8))) == expected
    finally:
        for engine in pool._engines:
            ray.kill(engine.actor)
