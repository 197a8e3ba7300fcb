"""The other end of `side_process`: reads jobs from its input, one after the other, and writes what they give.

It ends when its input does, so it does not outlive the process that started it by more than a job.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.ingress.errors import ApiError


@dataclass(frozen=True, slots=True)
class Overrun:
    """The job wanted more memory than it may have."""


@dataclass(frozen=True, slots=True)
class Failed:
    trace: str


@dataclass(frozen=True, slots=True)
class JobResult:
    """`is_last`: the job has left much memory behind, which the process gives back by ending."""

    result: Any
    is_last: bool = False


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one Ctrl-C reaches all processes of a terminal
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer

    def send(answer: JobResult) -> None:
        pickle.dump(answer, sink, pickle.HIGHEST_PROTOCOL)
        sink.flush()

    make, job_bytes = pickle.load(source)
    try:
        held = make()
    except Exception:
        send(JobResult(Failed(traceback.format_exc())))
        return
    bound_memory(job_bytes)
    tired_at = resident_bytes() + job_bytes // 4
    send(JobResult(None))
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other process has gone, or needs this one no more
        while True:
            job, args = pickle.load(source)
            result = _result_of(job, held, args)
            answer = JobResult(result, is_last=resident_bytes() > tired_at)
            send(answer)
            if answer.is_last:
                return
            del job, args, result, answer


def _result_of(job: Any, held: object, args: tuple[object, ...]) -> Any:
    try:
        return job(held, *args)
    except ApiError as error:
        return error
    except MemoryError:
        return Overrun()
    except Exception:
        return Failed(traceback.format_exc())


def bound_memory(more_bytes: int) -> None:
    """From now on this process can allocate so much more, on Linux. Beyond it Python raises MemoryError, and a library
    in Rust ends the process."""
    if (pages := _pages()) is not None:
        most = pages[5] * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def resident_bytes() -> int:
    """0 where there is no /proc."""
    pages = _pages()
    return 0 if pages is None else pages[1] * resource.getpagesize()


def _pages() -> list[int] | None:
    """In all, resident, shared, code, libraries, data."""
    try:
        return [int(field) for field in Path("/proc/self/statm").read_text("ascii").split()]
    except OSError:
        return None
