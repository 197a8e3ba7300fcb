"""One process beside this one, for work whose size strangers choose.

A large body takes seconds to parse, check, render and tokenize, and much of that time no other Python runs in its
process, in whatever thread it is done. So it is done in another process. That one has a bound on the time and the
memory of a job, and is ended where a job meets one; the next job then starts another.

Jobs run one at a time, the smallest first: what many send does not wait for the giants of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar, cast

from serve_app.ingress.errors import ApiError, retry_later
from serve_app.ingress.side_worker import Failed, JobResult, Overrun

T = TypeVar("T")

_START_SECONDS = 120.0  # to import, and to load a tokenizer, on a busy machine
_END_SECONDS = 2.0
_FIRST = -1  # before jobs of any size


@dataclass(frozen=True, slots=True, order=True)
class _Task:
    """`ask` is None where the thread is to end."""

    size: int
    number: int
    ask: Callable[[], Any] | None = field(compare=False)
    result: Future[Any] = field(compare=False, default_factory=Future)


class SideProcess:
    """Started by its first job. All methods may be called on any thread."""

    def __init__(self, make: Callable[[], object], *, seconds: float, job_bytes: int, waiting_bytes: int) -> None:
        """`make`, which must be picklable, runs once in the process; what it makes is the first argument of all jobs.

        seconds        longest time of a job
        job_bytes      most memory that a job may take, beyond what `make` has made
        waiting_bytes  most of what jobs that wait hold, together
        """
        self._make = make
        self._seconds = seconds
        self._job_bytes = job_bytes
        self._waiting_bytes = waiting_bytes
        self._waiting = 0
        self._numbers = count()
        self._tasks: PriorityQueue[_Task] = PriorityQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of the thread's start, and of the count of what waits

    async def run(self, job: Callable[..., T], *args: object, size: int) -> T:
        """What `job` gives for what `make` has made and `args`; all of it is pickled. `size`: bytes that it holds.

        Raises what the job raises, if that is an ApiError; ApiError 429 where too much waits, 413 for a job that was
        ended; RuntimeError for any other failure.
        """
        with self._lock:
            if self._waiting and self._waiting + size > self._waiting_bytes:
                raise retry_later(429, "The server has as many large requests as it takes.", "server_busy", 1.0)
            self._waiting += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="side-process", daemon=True)
                self._thread.start()
        try:
            task = _Task(size, next(self._numbers), partial(self._ask, job, args))
            self._tasks.put(task)
            # A client that leaves cancels this, and with it a job that has not begun.
            return cast(T, await asyncio.wrap_future(task.result))
        finally:
            with self._lock:
                self._waiting -= size

    def close(self) -> None:
        """Ends the process after the job that runs; returns at once."""
        self._tasks.put(_Task(_FIRST, next(self._numbers), None))

    def _work(self) -> None:
        while (task := self._tasks.get()).ask is not None:
            if not task.result.set_running_or_notify_cancel():
                continue
            try:
                task.result.set_result(task.ask())
            except Exception as error:
                task.result.set_exception(error)
        self._end()

    def _ask(self, job: Callable[..., Any], args: tuple[object, ...]) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._exchange((job, args), self._seconds)
        if answer is None or isinstance(answer.result, Overrun):
            raise self._overrun()
        if answer.is_last:
            self._end()
        return _result(answer)

    def _start(self) -> None:
        self._end()
        # The modules that this process finds, wherever Ray has told it to look.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", "from serve_app.ingress.side_worker import main; main()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        answer = self._exchange((self._make, self._job_bytes), _START_SECONDS)
        if answer is None:
            raise RuntimeError("the process for large requests did not start")
        _result(answer)

    def _exchange(self, content: object, seconds: float) -> JobResult | None:
        """None if the process has died, or took longer and was killed."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            pickle.dump(content, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            answer: JobResult = pickle.load(process.stdout)
            return answer
        except (OSError, EOFError, pickle.UnpicklingError):  # half an answer of one that was killed
            killed.set()
            return None
        finally:
            timer.cancel()
            if killed.is_set():
                self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # which it takes for the end
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _overrun(self) -> ApiError:
        message = (
            f"Reading this request took more than {self._seconds:g} s, or more than {self._job_bytes >> 20} MiB of "
            "memory, and was given up. Send less at a time."
        )
        return ApiError(413, message, code="request_too_large")


def _result(answer: JobResult) -> Any:
    if isinstance(answer.result, ApiError):
        raise answer.result
    if isinstance(answer.result, Failed):
        raise RuntimeError(f"a job failed in the process for large requests:\n{answer.result.trace}")
    return answer.result
