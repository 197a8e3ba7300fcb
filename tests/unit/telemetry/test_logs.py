"""Our records take the way of Serve's logger."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from ray._common.formatters import JSONFormatter

from serve_app.telemetry.logs import OUR_LOGGER, SERVE_LOGGER, join_serve_log, logging_config


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def serve_log() -> Iterator[Kept]:
    """Serve's logger with a handler of the test; both loggers are afterwards as they were."""
    loggers = [logging.getLogger(name) for name in (SERVE_LOGGER, OUR_LOGGER)]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    kept = Kept()
    loggers[0].addHandler(kept)
    loggers[0].setLevel(logging.INFO)
    join_serve_log()
    join_serve_log()
    yield kept
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


def test_a_record_reaches_serves_handlers_once_and_with_its_fields(serve_log: Kept) -> None:
    logging.getLogger("moorage.engine").info("hello", extra={"request_id": "r-1", "session": "abc"})
    logging.getLogger("moorage.engine").debug("not at this level")
    [record] = serve_log.records
    written = json.loads(JSONFormatter().format(record))
    assert (written["message"], written["request_id"], written["session"]) == ("hello", "r-1", "abc")


def test_the_level_is_serves(serve_log: Kept) -> None:
    logging.getLogger(SERVE_LOGGER).setLevel(logging.WARNING)
    logging.getLogger("moorage.engine").info("too low now")
    assert not serve_log.records


def test_the_format_is_chosen_and_requests_are_not_logged_twice() -> None:
    assert logging_config("json").encoding == "JSON"
    assert logging_config("text").encoding == "TEXT"
    assert logging_config("text").enable_access_log is False
