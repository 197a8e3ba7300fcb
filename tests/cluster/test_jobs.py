"""A batch job that is killed, started again, stopped, and started again: each line is answered once, in its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.serve.handle import DeploymentHandle
from scripted import Deploy

from serve_app.local_ray import APPLICATION

pytestmark = pytest.mark.timeout(400)

DEADLINE_SECONDS = 150
ONE_AT_A_TIME = ("--concurrency", "1")
BAD = {3: (None, "invalid_json", None), 8: ("c8", "400", 400)}  # line: custom_id, code of the error, status
TOTAL = 12


@pytest.fixture(scope="module")
def engines(deploy: Deploy) -> DeploymentHandle:
    return deploy(replicas=1, kv_memory="64MiB", threads=1)


@pytest.fixture
def files(tmp_path: Path, smollm2_path: Path) -> Path:
    """A folder with an input and a config."""
    texts = []
    for number in range(1, TOTAL + 1):
        body = {"model": "smollm2", "prompt": f"{number} cats", "max_tokens": 0 if number == 8 else 40}
        body |= {"ignore_eos": True, "temperature": 0}
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

    with job(files, "--kv-memory", "64MiB") as last:  # with a Ray and an engine of its own
        printed, _ = last.communicate(timeout=DEADLINE_SECONDS)
        assert last.returncode == 0, printed
    assert not (files / "out.jsonl.partial").exists()
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
