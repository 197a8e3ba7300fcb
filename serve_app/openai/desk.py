"""Where requests are read: all that it takes to make turns of a body, and nothing that belongs to one process.

A small body is read where it arrives, a large one in the side process, which has a desk of its own. Both run the same
functions, `parse` and then `prepare` of each route, whose arguments and results can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from serve_app.ingress.settings import IngressSettings
from serve_app.ingress.side_process import SideProcess
from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Desk:
    settings: IngressSettings
    prompts: PromptBuilder

    @property
    def vocab_size(self) -> int:
        return self.prompts.tokenizer.vocab_size


def open_desk(settings: IngressSettings, model_path: Path) -> Desk:
    """Raises TokenizerError."""
    return Desk(settings, PromptBuilder(load_tokenizer(model_path)))


# What reading a body takes, in bytes of memory for each of its own: a token of a byte, with all that the tokenizer
# notes of it, is the dearest.
_BYTES_FOR_EACH = 256
_LEAST_BYTES = 256 * 2**20
_WAITING_BODIES = 16  # of the largest size


def side_desk(settings: IngressSettings, model_path: Path) -> SideProcess:
    """A process with a desk. The caller closes it."""
    return SideProcess(
        partial(open_desk, settings, model_path),
        seconds=settings.max_reading_seconds,
        job_bytes=max(_LEAST_BYTES, _BYTES_FOR_EACH * settings.max_body_bytes),
        waiting_bytes=_WAITING_BODIES * settings.max_body_bytes,
    )
