"""`pytest --parity-report`: which tests carry which PARITY behaviour, and which behaviours nobody carries.

A test says what it carries with `@pytest.mark.parity("F105", ...)`. The report comes after the run; with
`--collect-only` it lists the tests without an outcome.

`ABSENT` holds the behaviours that Moorage leaves out by decision; engine_actor/README.md says why at more length. A
number there that a test carries after all is an error.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

SECTIONS = {
    "A": (1, 11),
    "B": (12, 51),
    "C": (52, 60),
    "D": (61, 83),
    "E": (84, 102),
    "F": (103, 125),
    "G": (126, 137),
    "H": (138, 155),
    "I": (156, 168),
    "J": (169, 180),
    "K": (181, 188),
    "L": (189, 218),
    "M": (219, 222),
    "N": (223, 232),
    "O": (233, 245),
    "P": (246, 252),
    "Q": (253, 276),
    "R": (277, 282),
    "S": (283, 294),
    "T": (295, 307),
    "U": (308, 317),
    "V": (318, 325),
    "W": (326, 366),
}
ENGINE_SECTIONS = "ABCDEFGHIJKW"
LAST_NUMBER = 366

ONE_PATH = "there is one way to run a step; no configuration chooses another"
SAME_ROWS = "every layer that keeps the whole sequence has one row a position in a block"
NOTHING_STORED = "no state leaves the device: what gives up its memory is computed again from its tokens"
ABSENT = {
    "F001": ONE_PATH,
    **dict.fromkeys([f"F{n}" for n in range(317, 326)], ONE_PATH),
    "F332": SAME_ROWS,
    **dict.fromkeys([f"F{n}" for n in range(357, 362)], NOTHING_STORED),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--parity-report", action="store_true", help="list PARITY behaviours with their tests")
    group.addoption(
        "--parity-sections",
        default=ENGINE_SECTIONS,
        metavar="LETTERS",
        help=f"sections of the report (default {ENGINE_SECTIONS})",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--parity-report"):
        config.pluginmanager.register(ParityReport(numbers_of(config.getoption("--parity-sections"))), "parity-report")


def numbers_of(sections: str) -> list[str]:
    """The F numbers of the given section letters, in order."""
    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown:
        raise pytest.UsageError(f"--parity-sections: no section {', '.join(unknown)}")
    return [f"F{n:03d}" for letter in sections for n in range(SECTIONS[letter][0], SECTIONS[letter][1] + 1)]


class ParityReport:
    def __init__(self, numbers: list[str]) -> None:
        self._numbers = numbers
        self._tests: dict[str, list[str]] = defaultdict(list)
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("parity"):
                for number in mark.args:
                    if not re.fullmatch(r"F\d{3}", str(number)) or not 1 <= int(number[1:]) <= LAST_NUMBER:
                        raise pytest.UsageError(f"{item.nodeid}: {number!r} is not a PARITY number")
                    if item.nodeid not in self._tests[number]:
                        self._tests[number].append(item.nodeid)

        decided = sorted(number for number in ABSENT if self._tests[number])
        if decided:
            raise pytest.UsageError(f"absent by decision, and yet carried by tests: {', '.join(decided)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("parity")
        absent = [number for number in self._numbers if number in ABSENT]
        missing = [number for number in self._numbers if not self._tests[number] and number not in ABSENT]
        for number in self._numbers:
            tests = self._tests[number]
            write(f"{number}  {f'absent by decision: {ABSENT[number]}' if number in ABSENT else self._outcome(tests)}")
            for test in tests:
                write(f"      {self._outcomes.get(test, 'not run')}: {test}")
        write(f"{len(absent)} of {len(self._numbers)} behaviours are absent by decision: {' '.join(absent) or '-'}")
        write(f"{len(missing)} of {len(self._numbers)} behaviours are carried by no test: {' '.join(missing) or '-'}")

    def _outcome(self, tests: list[str]) -> str:
        """The worst outcome of a behaviour's tests."""
        if not tests:
            return "MISSING"
        outcomes = {self._outcomes.get(test, "not run") for test in tests}
        return next(o for o in ("failed", "not run", "skipped", "passed") if o in outcomes)
