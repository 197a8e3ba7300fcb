"""What a batch has done survives the end of its process, at any byte."""

from __future__ import annotations

import json
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.jobs.journal import Counts, Journal, JournalError, finished_before
from serve_app.jobs.lines import Line, output_id

LINES = [Line(number, b'{"n": %d}' % number) for number in range(1, 9)]


def record(line: Line) -> dict[str, object]:
    return {
        "id": output_id(line),
        "custom_id": f"é {line.number}",
        "response": {"text": "\ud800 \u2028 x"},
        "error": None,
    }


def written(output: Path) -> list[dict[str, object]]:
    return [json.loads(text) for text in output.read_text("utf-8").splitlines()]


def test_lines_done_in_any_order_are_written_in_that_of_the_input(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out.jsonl"
    with Journal(output) as journal:
        for line in reversed(LINES):
            assert not journal.has(line)
            journal.add(line, record(line))
            assert journal.has(line)
        assert not output.exists()
        assert journal.write_output(LINES) == Counts(answered=len(LINES))
    assert written(output) == [record(line) for line in LINES]
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


@given(st.integers(0, 2000))
def test_a_journal_that_was_cut_anywhere_is_gone_on_from(cut: int) -> None:

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        with Journal(output) as journal:
            for line in LINES:
                journal.add(line, record(line))
        partial = output.with_name("out.jsonl.partial")
        whole = partial.read_bytes()
        partial.write_bytes(whole[:cut])
        with Journal(output) as journal:
            done = [line for line in LINES if journal.has(line)]
            assert done == LINES[: whole[:cut].count(b"\n")]
            for line in LINES[len(done) :]:
                journal.add(line, record(line))
            journal.write_output(LINES)
        assert written(output) == [record(line) for line in LINES]


def test_a_record_counts_with_the_end_of_its_line(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output) as journal:
        journal.add(LINES[0], record(LINES[0]))
    partial = output.with_name("out.jsonl.partial")
    partial.write_bytes(partial.read_bytes()[:-1])
    with Journal(output) as journal:
        assert not journal.has(LINES[0])
        for line in LINES:
            journal.add(line, record(line))
        journal.write_output(LINES)
    assert written(output) == [record(line) for line in LINES]


def test_what_a_full_disk_has_taken_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as full, Journal(output) as journal:
            for line in LINES:
                journal.add(line, record(line))
        assert full.value.__context__ is None, "it is told once"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Journal(output) as journal:
        done = [line for line in LINES if journal.has(line)]
        assert done == LINES[: len(done)]
        assert 0 < len(done) < len(LINES)
        for line in LINES[len(done) :]:
            journal.add(line, record(line))
        journal.write_output(LINES)
    assert written(output) == [record(line) for line in LINES]


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(b"precious\n")
    with pytest.raises(JournalError, match="is not what a job has left"), Journal(tmp_path / "out.jsonl"):
        pass
    assert partial.read_bytes() == b"precious\n"


def test_an_input_that_has_grown_meanwhile_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl") as journal:
        journal.add(LINES[0], record(LINES[0]))
        with pytest.raises(JournalError, match="line 2 is new"):
            journal.write_output(LINES[:2])
    with Journal(tmp_path / "out.jsonl") as journal:
        assert journal.has(LINES[0])
        journal.write_output(LINES[:1])


def test_a_line_that_has_changed_is_not_done(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl") as journal:
        journal.add(LINES[0], record(LINES[0]))
        assert not journal.has(Line(1, b'{"n": "other"}'))
        assert not journal.has(Line(2, LINES[0].text))


def test_a_job_that_did_nothing_leaves_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl") as journal:
        assert not journal.has(LINES[0])
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_do_not_write_one_output(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl") as journal:
        journal.add(LINES[0], record(LINES[0]))
        with pytest.raises(JournalError, match="another job writes"), Journal(tmp_path / "out.jsonl"):
            pass
    with Journal(tmp_path / "out.jsonl") as journal:
        assert journal.has(LINES[0])


def test_an_output_that_is_there_is_recognized_or_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    ids = [output_id(line) for line in LINES]
    assert not finished_before(output, ids)
    with Journal(output) as journal:
        for line in LINES:
            journal.add(line, record(line))
        journal.write_output(LINES)
    assert finished_before(output, ids)
    with pytest.raises(JournalError, match=r"out\.jsonl exists"):
        finished_before(output, ids[1:])
    output.write_text("something else\n")
    with pytest.raises(JournalError, match="remove it"):
        finished_before(output, ids)
