"""`moorage serve` as a process: what it prints, what it answers, and what it leaves behind, which is
nothing."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest

from serve_app.cluster.app import ENGINES
from serve_app.cluster.failover.watch import ANSWER_SECONDS, SILENCE_SECONDS
from serve_app.cluster.port_watch import OWN_RAY_VARIABLE
from serve_app.commands.local_ray import APPLICATION

pytestmark = pytest.mark.timeout(400)

PREFILL_SECONDS = 12.0
NOT_OUR_OWN = {"RAY_AUTH_MODE": "token", OWN_RAY_VARIABLE: ""}
"""In place of what `moorage serve` sets for its own Ray, and these tests for theirs."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def carriers(token: str) -> list[int]:
    """Processes that have inherited this token: the server and all of its Ray."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it ended between the two looks
            continue
    return found


def node_process(server: subprocess.Popen[str], name: str = "raylet") -> psutil.Process:
    """Ray's, of a server that starts, as soon as it is there."""
    while server.poll() is None:
        for child in psutil.Process(server.pid).children():
            if child.name() == name:
                return child
        time.sleep(0.02)
    pytest.fail(f"the server ended: {server.communicate()[0]}")


@contextmanager
def serving(token: str, *flags: str, port: int | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "RAY_AUTH_TOKEN": token, **environment}
    command = [sys.executable, "-m", "serve_app.cli", "serve", "--port", str(port or free_port()), *flags]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def nothing_is_left(token: str) -> bool:
    """Processes that were told to end may take a moment to."""
    for _ in range(100):
        if not carriers(token):
            return True
        time.sleep(0.1)
    return False


def test_it_becomes_ready_answers_the_curl_it_prints_and_stops_without_a_trace(smollm2_path: Path) -> None:
    """Its port is its own while it starts, too: another server is told so. A Ray whose node process ends while it
    starts is started again at once."""
    token, port = secrets.token_hex(32), free_port()
    with serving(token, "--model", "smollm2", "--kv-memory", "64MiB", port=port) as process:
        assert process.stdout is not None
        node_process(process).kill()
        lines = [process.stdout.readline()]
        with serving(secrets.token_hex(32), "--model", "smollm2", port=port) as second:
            said, _ = second.communicate(timeout=60)
            assert second.returncode == 2
            assert f"cannot listen on 127.0.0.1:{port}: another server has it, or is starting there" in said
        for line in process.stdout:
            lines.append(line)
            if "ready after" in line:
                break
        printed = "".join(lines)
        assert printed.count("ready after") == 1, printed
        assert "started once more: Ray's node process (raylet) has ended with signal 9" in printed
        assert re.search(r"^x Ray [\d.]+ s$", printed, re.MULTILINE), printed
        assert re.search(r"^\+ Ray, once more [\d.]+ s$", printed, re.MULTILINE), printed
        assert "blocks of 16" in printed
        assert re.search(r"longest prompt \d+ tokens.*; numerics (exact|fast)$", printed, re.MULTILINE), printed
        curl = shlex.split(lines[-1].partition("try: ")[2])
        answer = subprocess.run([*curl, "-s"], capture_output=True, text=True, timeout=120, check=True)
        assert "Paris" in answer.stdout
        assert len(carriers(token)) > 5

        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        rest, _ = process.communicate(timeout=90)
        assert process.returncode == 0, rest
        assert rest.rstrip().endswith("stopped")
    assert nothing_is_left(token), carriers(token)


class Reading(threading.Thread):
    """A streamed chat, read until it ends."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.text, self.chunks, self.last = "", 0, ""
        self.start()

    def run(self) -> None:
        body = {"messages": [{"role": "user", "content": "Write about the sea."}], "stream": True}
        body |= {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=None) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self._take(line.removeprefix("data: "))

    def _take(self, said: str) -> None:
        self.last = said
        if said != "[DONE]":
            assert "error" not in json.loads(said), said
            self.text += json.loads(said)["choices"][0]["delta"].get("content") or ""
            self.chunks += 1

    def wait_for(self, chunks: int) -> None:
        while self.chunks < chunks:
            assert self.is_alive()
            time.sleep(0.01)


def engine_process(token: str) -> psutil.Process:
    [pid] = [pid for pid in carriers(token) if f"{APPLICATION}:{ENGINES}" in " ".join(psutil.Process(pid).cmdline())]
    return psutil.Process(pid)


def test_an_answer_waits_for_another_engine_and_a_head_that_dies_is_noticed_and_named(smollm2_path: Path) -> None:
    """With one replica, as is the default, nothing can go on before another has started."""
    token, port = secrets.token_hex(32), free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(token, "--model", "smollm2", "--kv-memory", "64MiB", port=port) as process:
        assert process.stdout is not None
        while "ready after" not in (line := process.stdout.readline()):
            assert line, "it ended"
        undisturbed = Reading(url)
        undisturbed.join(200)
        disturbed = Reading(url)
        disturbed.wait_for(20)
        engine_process(token).kill()
        begun = time.monotonic()
        disturbed.join(300)
        print(f"complete after {time.monotonic() - begun:.0f} s")
        assert disturbed.last == "[DONE]"
        assert disturbed.text == undisturbed.text

        head, node = node_process(process, "gcs_server"), node_process(process)
        assert httpx.get(f"{url}/ready").status_code == 200
        process.send_signal(signal.SIGSTOP)  # it would end all of this too soon to be asked
        head.kill()
        while (answer := httpx.get(f"{url}/ready")).status_code != 503:
            assert answer.status_code == 200
        assert answer.json()["error"]["code"] == "unavailable" and "retry-after" in answer.headers
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGCONT)
        node.kill()  # as it ends by itself where it notices first; its workers are nobody's descendants then
        begun = time.monotonic()
        said, _ = process.communicate(timeout=60)
        print(f"ended after {time.monotonic() - begun:.0f} s")
        assert process.returncode == 1
        assert re.search(r"^error: Ray's head process \(gcs_server\), process \d+, has ended with signal 9", said, re.M)
    assert nothing_is_left(token), carriers(token)


class Prefill(threading.Thread):
    """A streamed answer to a prompt of as many words, of which nothing is cached. `accepted` is before its prompt is
    computed."""

    def __init__(self, url: str, words: int, salt: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {"prompt": "sea " * words, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
        self._body["cache_salt"] = salt
        self.accepted, self.events, self.first_seconds = threading.Event(), [""], 0.0
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=None) as response:
            begun = time.monotonic()
            self.accepted.set()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.first_seconds = self.first_seconds or time.monotonic() - begun
                    self.events.append(line.removeprefix("data: "))

    @property
    def text(self) -> str:
        """Of an answer that is whole."""
        self.join(200)
        assert self.events[-1] == "[DONE]", self.events[-1]
        return "".join(json.loads(event)["choices"][0]["text"] for event in self.events[1:-1])


def test_an_answer_whose_prompt_is_being_computed_when_the_server_is_stopped_ends_whole(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """With one replica, in small steps, so that it says nothing for longer than a replica may that hangs."""
    config = tmp_path / "moorage.yaml"
    config.write_text("model: smollm2\nkv_memory: 512MiB\nmax_scheduled_tokens: 8\n")
    token, port = secrets.token_hex(32), free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(token, "--config", str(config), port=port) as process:
        assert process.stdout is not None
        while "ready after" not in (line := process.stdout.readline()):
            assert line, "it ended"
        measured = Prefill(url, 300, "measured")
        assert measured.text
        words = min(int(300 * PREFILL_SECONDS / measured.first_seconds), 7000)
        undisturbed = Prefill(url, words, "undisturbed")
        assert undisturbed.text
        disturbed = Prefill(url, words, "disturbed")
        assert disturbed.accepted.wait(60)
        os.kill(process.pid, signal.SIGTERM)
        assert disturbed.text == undisturbed.text
        print(f"{words} words: silent for {disturbed.first_seconds:.1f} s")
        assert disturbed.first_seconds > SILENCE_SECONDS + ANSWER_SECONDS, "nobody could have missed it"
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert said.rstrip().endswith("stopped")
    assert nothing_is_left(token), carriers(token)


@contextmanager
def cluster(token: str, folder: Path) -> Iterator[str]:
    """A Ray that somebody else started on this machine; gives its address."""
    port = free_port()
    command = ["-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    where = ["--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}", "--disable-usage-stats"]
    environment = {**os.environ, "RAY_AUTH_TOKEN": token, **NOT_OUR_OWN}
    started = subprocess.Popen([sys.executable, *command, *where], env=environment, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        started.kill()
        started.wait()
        for pid in carriers(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_cluster_that_others_run_is_joined_and_the_end_of_its_node_process_here_is_noticed_and_named(
    smollm2_path: Path,
) -> None:
    token = secrets.token_hex(32)
    with TemporaryDirectory(prefix="ray-") as folder, cluster(token, Path(folder)) as address:
        wait_until_listening(address)
        flags = ("--address", address, "--model", "smollm2", "--kv-memory", "64MiB")
        with serving(token, *flags, port=free_port(), **NOT_OUR_OWN) as process:
            assert process.stdout is not None
            lines = []
            while "ready after" not in (line := process.stdout.readline()):
                lines.append(line)
                assert line, lines
            [node] = [p for p in map(psutil.Process, carriers(token)) if p.name() == "raylet"]
            at_work = process.poll() is None
            node.kill()
            said, _ = process.communicate(timeout=120)
    assert at_work and process.returncode == 1, said
    assert re.search(r"^error: this machine's node process \(raylet\) at [\d.:]+ has not answered for 2 s", said, re.M)


def wait_until_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(600):
        with suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(0.1)
    pytest.fail("the cluster did not start")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_ends_it_with_a_word_and_leaves_nothing(number: signal.Signals) -> None:
    token = secrets.token_hex(32)
    with serving(token, "--model", "smollm2") as process:
        node = node_process(process)
        node.suspend()  # it will not be ready, however fast the machine is
        os.killpg(process.pid, number)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0, printed
    assert re.fullmatch(r"\+ checks [\d.]+ s\nx Ray [\d.]+ s\ninterrupted while it started\nstopped\n", printed), (
        printed
    )
    assert nothing_is_left(token), carriers(token)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "broken.gguf"], r"error: model: \S+broken\.gguf: GGUF version 0"),
        (["--model", "smollm2", "--device", "cuda"], "error: device: cuda: this machine shows no NVIDIA GPU"),
    ],
)
def test_what_cannot_be_served_is_said_before_ray_starts(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    token = secrets.token_hex(32)
    flags = [str(tmp_path / flag) if flag.endswith(".gguf") else flag for flag in flags]
    with serving(token, *flags, CUDA_VISIBLE_DEVICES="") as process:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 1, printed
    assert re.search(f"^x checks [\\d.]+ s\n{said}", printed), printed
    assert "Ray" not in printed and "Traceback" not in printed
    assert nothing_is_left(token), carriers(token)
