"""`pytest --parity-report`: every behaviour of BEHAVIOURS.md with its sentence, its tests and how they ended.

A test says what it carries with `@pytest.mark.parity("F105", ...)`. Where it tests only what stands in the place of a
behaviour the mark says `stand_in="why"`, and where a part of a behaviour is not built `lacks="which"`;
`scenario="EV-06"` names the acceptance scenario that it plays. Each run keeps the outcomes of these tests in pytest's
cache, so the report runs no test: it collects them and tells how each ended when it ran last.

`ABSENT` holds behaviours that are not here at all and that no test could carry; engine_actor/README.md says more. A
number there that a test carries after all is an error.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import pytest

from tests.support.behaviours import Behaviours, Section, house_behaviours
from tests.support.parity_state import Carrier, State, state_of

ONE_PATH = "every request is batched dynamically; a static path comes with ONNX graphs that have no block tables"
ONE_LAYOUT = "every layer that keeps the whole sequence has one row a position; others come with models that have them"
NOTHING_STORED = "nothing leaves the device yet: what gives up its memory is computed again from its tokens"
ABSENT = {
    "F001": ONE_PATH,
    **dict.fromkeys([f"F{n}" for n in range(317, 326)], ONE_PATH),
    "F332": ONE_LAYOUT,
    **dict.fromkeys([f"F{n}" for n in range(357, 362)], NOTHING_STORED),
}

_CACHE_KEY = "parity/outcomes"
_MARK_KEYS = {"stand_in", "lacks", "scenario"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--parity-report", action="store_true", help="list behaviours with their tests; runs no test")
    group.addoption("--parity-sections", metavar="LETTERS", help="sections of the report (default: all)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "parity(*numbers, stand_in, lacks, scenario): behaviours that a test carries, such as F105"
    )
    behaviours = house_behaviours()
    carriers = Carriers(behaviours)
    config.pluginmanager.register(carriers, "parity-carriers")
    if config.getoption("--parity-report"):
        letters = config.getoption("--parity-sections")
        try:
            sections = behaviours.in_sections(letters) if letters else list(behaviours.sections)
        except ValueError as error:
            raise pytest.UsageError(f"--parity-sections: {error}") from None
        config.pluginmanager.register(ParityReport(behaviours, sections, carriers), "parity-report")


class Carriers:
    """The tests of this run that carry behaviours, and the outcomes that their last runs left."""

    def __init__(self, behaviours: Behaviours) -> None:
        self._behaviours = behaviours
        self._run: dict[str, str] = {}
        self.by_number: dict[str, dict[str, Carrier]] = defaultdict(dict)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("parity"):
                self.take(item.nodeid, mark)

    def take(self, test: str, mark: pytest.Mark) -> None:
        """Raises UsageError for a number or an argument that a mark can't have."""
        unknown = sorted(set(mark.kwargs) - _MARK_KEYS)
        if unknown:
            raise pytest.UsageError(f"{test}: parity mark with {', '.join(unknown)}; it takes {', '.join(_MARK_KEYS)}")
        for number in mark.args:
            if number not in self._behaviours.sentences:
                raise pytest.UsageError(f"{test}: {number!r} is no number of tests/parity/BEHAVIOURS.md")
            if number in ABSENT:
                raise pytest.UsageError(f"{test} carries {number}, which is said to be absent")
            self.by_number[number][test] = Carrier(test, **mark.kwargs)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "parity" in report.keywords and (report.when == "call" or report.outcome != "passed"):
            self._run[report.nodeid] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        beside_others = hasattr(session.config, "workerinput")  # then the process that started it hears of all tests
        if self._run and not beside_others:
            outcomes = last_outcomes(session.config) | self._run
            if (cache := cache_of(session.config)) is not None:
                cache.set(_CACHE_KEY, dict(sorted(outcomes.items())))


def cache_of(config: pytest.Config) -> pytest.Cache | None:
    """None where it is switched off."""
    return getattr(config, "cache", None)


def last_outcomes(config: pytest.Config) -> dict[str, str]:
    cache = cache_of(config)
    return {} if cache is None else dict(cache.get(_CACHE_KEY, {}))


class ParityReport:
    def __init__(self, behaviours: Behaviours, sections: list[Section], carriers: Carriers) -> None:
        self._behaviours = behaviours
        self._sections = sections
        self._carriers = carriers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        return True  # nothing runs: collecting was enough

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        write, outcomes = terminalreporter.write_line, last_outcomes(config)
        by_state: dict[State, list[str]] = {state: [] for state in State}
        terminalreporter.section("behaviours, with how each test ended when it ran last")
        for section in self._sections:
            write(f"\n{section.letter}. {section.title}")
            for number in section.numbers:
                carriers = list(self._carriers.by_number.get(number, {}).values())
                absent = ABSENT.get(number, "")
                state, why = (State.ABSENT, absent) if absent else state_of(carriers, outcomes)
                by_state[state].append(number)
                write(f"{number}  {state:8}  {self._behaviours.sentences[number]}")
                if why:
                    write(f"        {state}: {why}")
                for line in lines_of_tests(carriers, outcomes):
                    write(f"        {line}")
        total = sum(len(numbers) for numbers in by_state.values())
        write(f"\n{total} behaviours: " + ", ".join(f"{len(found)} {state}" for state, found in by_state.items()))
        for state, found in by_state.items():
            if found and state is not State.PASSED:
                write(f"{state}: {' '.join(found)}")


def lines_of_tests(carriers: list[Carrier], outcomes: dict[str, str]) -> list[str]:
    """One line for each test function: its worst outcome, how many cases it has, its scenario."""
    lines = []
    for name, group in groupby(carriers, key=lambda carrier: carrier.test.partition("[")[0]):
        cases = list(group)
        found = {outcomes.get(case.test, "not run") for case in cases}
        worst = next(outcome for outcome in ("failed", "not run", "skipped", "passed") if outcome in found)
        count = f" ({len(cases)} cases)" if len(cases) > 1 else ""
        scenario = f" ({cases[0].scenario})" if cases[0].scenario else ""
        lines.append(f"{worst}: {name}{count}{scenario}")
    return lines
