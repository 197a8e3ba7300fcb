"""What a batch job says and exits with where it needs no engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli import app
from serve_app.jobs import job
from serve_app.jobs.journal import Journal
from serve_app.jobs.lines import output_id, read_lines

INPUT = b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n{\n'


@pytest.fixture(autouse=True)
def _no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals stay those of the test run; and whoever wants engines here is wrong."""

    def refuse(batch: job.Batch) -> None:
        raise AssertionError("no line is left that needs an engine")

    monkeypatch.setattr(job, "_catch_signals", lambda: None)
    monkeypatch.setattr(job, "_answer", refuse)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(INPUT)
    return path


def batch(source: Path, output: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["batch", "--input", str(source), "--output", str(output), *flags])


def test_a_job_that_was_killed_after_its_last_line_only_writes_the_output(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output) as journal:
        for line in read_lines(source):
            journal.add(line, {"id": output_id(line), "error": None if line.number == 1 else {"code": "x"}})
    result = batch(source, output)
    assert result.exit_code == 0, result.output
    assert f"{output}: 1 lines answered, 1 failed (2 lines by an earlier run)" in result.output
    assert [json.loads(text)["id"] for text in output.read_bytes().splitlines()] == [
        output_id(line) for line in read_lines(source)
    ]
    again = batch(source, output)
    assert again.exit_code == 0
    assert "is there already, with all 2 lines" in again.output


def test_a_second_job_on_the_same_output_is_refused(source: Path, tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl"):
        result = batch(source, tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "another job writes" in result.stderr


@pytest.mark.parametrize("moment", ["read_args", "read_lines", "_announce", "_answer"])
def test_a_job_can_be_stopped_at_any_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, moment, stopped)
    result = batch(source, tmp_path / "out.jsonl")
    assert result.exit_code == 130
    assert "stopped" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["out.jsonl.partial", "out.jsonl.new", "out.jsonl"])
def test_the_input_is_not_overwritten(source: Path, tmp_path: Path, name: str) -> None:
    source = source.rename(tmp_path / name)
    result = batch(source, tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert source.read_bytes() == INPUT


@pytest.mark.parametrize(
    ("name", "flags", "told"),
    [("no-such-file", (), "No such file"), ("in.jsonl", ("--replicas", "0"), "replicas"), ("", (), "directory")],
)
def test_what_cannot_be_is_said_and_nothing_is_written(
    source: Path, tmp_path: Path, name: str, flags: tuple[str, ...], told: str
) -> None:
    result = batch(tmp_path / name, tmp_path / "out.jsonl", *flags)
    assert result.exit_code == 2
    assert told in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_output_in_rays_copy_of_the_working_directory_is_warned_of(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    with Journal(copy / "out.jsonl") as journal:
        for line in read_lines(source):
            journal.add(line, {"id": output_id(line), "error": None})
    assert "absolute path" in batch(source, copy / "out.jsonl").output
    assert "absolute path" not in batch(source, copy / "out.jsonl").output  # done before: nothing to warn of
