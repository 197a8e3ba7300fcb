"""One log for a process of the application: what Moorage says goes where Ray Serve's own lines go.

Serve sets up one logger, with a file for each replica, in text or in JSON. In JSON every line has Serve's fields
(time, replica, request id) and those that we give in `extra`.
"""

from __future__ import annotations

import logging
from typing import Literal

from ray.serve.schema import EncodingType, LoggingConfig

SERVE_LOGGER = "ray.serve"
OUR_LOGGER = "moorage"


class ServeLogHandler(logging.Handler):
    """Hands records to Serve's logger, whatever its handlers are at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        serve = logging.getLogger(SERVE_LOGGER)
        if serve.isEnabledFor(record.levelno):
            serve.handle(record)


def join_serve_log() -> None:
    """To be called in the constructor of a deployment. Calling it again changes nothing."""
    ours = logging.getLogger(OUR_LOGGER)
    if not any(isinstance(handler, ServeLogHandler) for handler in ours.handlers):
        ours.addHandler(ServeLogHandler())
    ours.setLevel(logging.getLogger(SERVE_LOGGER).getEffectiveLevel())
    ours.propagate = False


def logging_config(log_format: Literal["text", "json"]) -> LoggingConfig:
    """Without Serve's access log: each request has one line of ours, which says more and holds no path."""
    encoding = EncodingType.JSON if log_format == "json" else EncodingType.TEXT
    return LoggingConfig(encoding=encoding, enable_access_log=False)
