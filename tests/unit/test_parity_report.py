"""The behaviours' document, what the report makes of tests and outcomes, and that no citation leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.behaviours import house_behaviours, read_behaviours
from tests.support.parity import ABSENT, Carriers, lines_of_tests
from tests.support.parity_state import Carrier, State, state_of

ROOT = Path(__file__).parents[2]
BEHAVIOURS = house_behaviours()


# -- the document -----------------------------------------------------------------------------------------------------


def test_sections_a_to_w_hold_every_number_once_in_order() -> None:
    assert "".join(section.letter for section in BEHAVIOURS.sections) == "ABCDEFGHIJKLMNOPQRSTUVW"
    numbers = [number for section in BEHAVIOURS.sections for number in section.numbers]
    assert numbers == [f"F{n:03d}" for n in range(1, 367)]
    assert list(BEHAVIOURS.rules) == [f"C{n:02d}" for n in range(1, 38)]
    assert all(section.title for section in BEHAVIOURS.sections)


def test_every_number_has_one_sentence_of_its_own() -> None:
    sentences = list(BEHAVIOURS.sentences.values())
    assert len(set(sentences)) == len(sentences) == 366 + 37
    assert [s for s in sentences if not re.fullmatch(r"[A-Z`].*\.", s) or ". " in s] == []


@pytest.mark.parametrize(
    "text",
    ["- **F001** Before any heading.", "## A. T\n- F001 no number.", "## A. T\n- **F001** One.\n- **F001** Two."],
)
def test_a_line_that_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a new number with its sentence"):
        read_behaviours(text)


def sources() -> Iterator[Path]:
    for package in ("engine_actor", "serve_app", "kernels"):
        yield from (ROOT / package).rglob("*.py")
        yield from (ROOT / package).rglob("*.md")


def test_every_number_that_the_product_cites_is_explained() -> None:
    cited = {
        (number, str(path.relative_to(ROOT)))
        for path in sources()
        for number in re.findall(r"\b(?:F\d{3}|C\d{2})\b", re.sub(r"noqa: *[A-Z]+\d+", "", path.read_text("utf-8")))
    }
    assert len(cited) > 100
    assert sorted(where for where in cited if where[0] not in BEHAVIOURS.sentences) == []


def test_the_product_cites_numbers_and_no_document_that_is_not_here() -> None:
    """S0, S1 and S3 are short names of documents that only the authors of BEHAVIOURS.md had."""
    named = re.compile(r"\b(?:S[013]|PARITY)\b")
    assert [str(path.relative_to(ROOT)) for path in sources() if named.search(path.read_text("utf-8"))] == []


def test_absent_behaviours_are_explained() -> None:
    assert set(ABSENT) <= set(BEHAVIOURS.sentences) and all(ABSENT.values())


# -- the state of a behaviour ------------------------------------------------------------------------------------------


PLAIN, OTHER = Carrier("t.py::plain"), Carrier("t.py::other")
STAND_IN, LACKING = Carrier("t.py::stand_in", stand_in="one step only"), Carrier("t.py::lacking", lacks="no n-grams")
PASSED = {carrier.test: "passed" for carrier in (PLAIN, OTHER, STAND_IN, LACKING)}


@pytest.mark.parametrize(
    ("carriers", "changed", "expected"),
    [
        ([], {}, (State.OPEN, "no test carries it")),
        ([PLAIN, OTHER], {}, (State.PASSED, "")),
        ([PLAIN, OTHER], {PLAIN.test: "failed"}, (State.FAILED, "")),
        ([PLAIN], {PLAIN.test: "skipped"}, (State.OPEN, "every test of it was skipped")),
        ([PLAIN, OTHER], {PLAIN.test: "skipped"}, (State.PASSED, "")),
        ([PLAIN, OTHER], {PLAIN.test: "skipped", OTHER.test: "skipped"}, (State.OPEN, "every test of it was skipped")),
        ([PLAIN, STAND_IN], {}, (State.STAND_IN, "one step only")),
        ([STAND_IN, STAND_IN], {}, (State.STAND_IN, "one step only")),
        ([STAND_IN], {STAND_IN.test: "skipped"}, (State.OPEN, "every test of it was skipped")),
        ([STAND_IN], {STAND_IN.test: "failed"}, (State.FAILED, "")),
        ([PLAIN, LACKING], {}, (State.OPEN, "no n-grams")),
        ([PLAIN, LACKING], {LACKING.test: "failed"}, (State.FAILED, "")),
    ],
)
def test_a_behaviour_is_as_good_as_its_tests(
    carriers: list[Carrier], changed: dict[str, str], expected: tuple[State, str]
) -> None:
    assert state_of(carriers, PASSED | changed) == expected


def test_a_test_without_an_outcome_leaves_its_behaviour_not_run() -> None:
    assert state_of([PLAIN, OTHER], {PLAIN.test: "passed"}) == (State.NOT_RUN, "")
    assert state_of([STAND_IN], {}) == (State.NOT_RUN, "one step only")


def test_cases_of_a_test_are_one_line_with_their_worst_outcome() -> None:
    carriers = [Carrier("t.py::a[1]"), Carrier("t.py::a[2]"), Carrier("t.py::b", scenario="EV-06")]
    outcomes = {"t.py::a[1]": "passed", "t.py::a[2]": "skipped", "t.py::b": "passed"}
    assert lines_of_tests(carriers, outcomes) == ["skipped: t.py::a (2 cases)", "passed: t.py::b (EV-06)"]


# -- the option --------------------------------------------------------------------------------------------------------


MARKED = """
import pytest

@pytest.mark.parity("F105", scenario="PL-02")
def test_passes(): pass

@pytest.mark.parity("F106")
def test_is_skipped(): pytest.skip("not here")

@pytest.mark.parity("F289", stand_in="masks are made in turn")
def test_stands_in(): pass

@pytest.mark.parity("F277", lacks="no n-grams")
def test_part(): pass
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-p", "tests.support.parity", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["in one process", "in two"])
def test_the_report_tells_what_the_last_run_left_and_runs_nothing(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (tmp_path / "test_marked.py").write_text(MARKED)
    before = run_pytest(tmp_path, "--parity-report", "--parity-sections", "F")
    assert (
        before.returncode == 0
        and "        not run: test_marked.py::test_passes (PL-02)" in before.stdout
        and "F289" not in before.stdout
    )

    assert run_pytest(tmp_path, *processes).returncode == 0
    (tmp_path / "test_marked.py").write_text(MARKED.replace(": pass", ": assert False"))
    report = run_pytest(tmp_path, "--parity-report")
    assert report.returncode == 0
    lines = report.stdout.splitlines()
    assert f"F105  passed    {BEHAVIOURS.sentences['F105']}" in lines
    assert "        passed: test_marked.py::test_passes (PL-02)" in lines
    assert f"F106  open      {BEHAVIOURS.sentences['F106']}" in lines
    assert "        stand-in: masks are made in turn" in lines and "stand-in: F289" in lines
    assert "        open: no n-grams" in lines and "        passed: test_marked.py::test_part" in lines
    assert f"absent: {' '.join(sorted(ABSENT))}" in lines
    assert "366 behaviours: 1 passed, 1 stand-in, 348 open, 16 absent, 0 not run, 0 failed" in lines
    assert all(f"{section.letter}. {section.title}" in lines for section in BEHAVIOURS.sections)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (pytest.mark.parity("F999"), "'F999' is no number of tests/parity/BEHAVIOURS.md"),
        (pytest.mark.parity("F105", standin="typo"), "parity mark with standin; it takes"),
        (pytest.mark.parity("F332"), "carries F332, which is said to be absent"),
    ],
)
def test_a_wrong_mark_stops_the_run(mark: pytest.MarkDecorator, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        Carriers(BEHAVIOURS).take("t.py::test", mark.mark)


def test_an_unknown_section_is_refused() -> None:
    assert [section.letter for section in BEHAVIOURS.in_sections("CA")] == ["A", "C"]
    with pytest.raises(ValueError, match="no section X, Z"):
        BEHAVIOURS.in_sections("AXZ")
