"""The command line without Ray: help, refusals, what is read from where."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from kernels import selfcheck
from kernels.native import library
from serve_app import __version__
from serve_app.cli import app
from serve_app.commands import doctor, drain_node
from serve_app.commands.arguments import StartFailed, read_args
from serve_app.commands.chat import Chat
from serve_app.commands.console import console
from serve_app.commands.doctor import Options, _port
from serve_app.commands.findings import Finding, Mark
from serve_app.commands.serve import check_gpus
from serve_app.config import AppArgs
from serve_app.local_ports import BindRefused, is_loopback, require_free_port, require_key_beyond_loopback

runner = CliRunner()


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["chat"], ["batch"], ["models"], ["models", "fetch"], ["doctor"], ["drain-node"]]
)
def test_every_command_explains_itself(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys\nfrom serve_app.cli import main\nsys.argv = ['moorage', 'serve', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit(1 if {'ray', 'torch'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindRefused, match=f"127.0.0.1:{port}.*--port"):
            require_free_port("127.0.0.1", port)
        result = runner.invoke(app, ["serve", "--port", str(port)])
        assert result.exit_code == 2
    require_free_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_an_open_server_without_a_key_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOORAGE_API_KEYS", raising=False)
    with pytest.raises(BindRefused, match="no API key"):
        require_key_beyond_loopback(host, has_keys=False)
    require_key_beyond_loopback(host, has_keys=True)
    assert runner.invoke(app, ["serve", "--host", host]).exit_code == 2


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_known_by_address_and_by_name(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: gemma3\nreplicas: 3\nkv_memory: 1GiB\n")
    args = read_args(config, {"replicas": 1})
    assert (args.model, args.replicas, args.kv_memory) == ("gemma3", 1, 2**30)
    assert read_args(None, {}).model == "smollm2"


@pytest.mark.parametrize(
    ("content", "said"),
    [("- a\n", "found list"), ("model: [", "--config"), ("replica: 2\n", "replica:"), ("dtype: int3\n", "dtype:")],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(StartFailed, match=said):
        read_args(tmp_path / "config.yaml", {})
    with pytest.raises(StartFailed, match="missing"):
        read_args(tmp_path / "missing.yaml", {})


def test_a_bad_flag_is_refused_with_its_name() -> None:
    with pytest.raises(StartFailed, match="replicas:"):
        read_args(None, {"replicas": -1})
    assert runner.invoke(app, ["serve", "--replicas", "0"]).exit_code == 2


def test_an_unknown_model_cannot_be_fetched() -> None:
    result = runner.invoke(app, ["models", "fetch", "no-such"])
    assert result.exit_code == 2
    listed = runner.invoke(app, ["models"])
    assert "smollm2" in listed.output
    assert "gemma3" in listed.output


class Server:
    """Answers like the API, and remembers what it was asked."""

    def __init__(self, status: int = 200, said: tuple[str, ...] = ("Hel[l", "o]")) -> None:
        self.status = status
        self.said = said
        self.bodies: list[dict[str, object]] = []
        self.sessions: list[str] = []
        self.deleted: list[str] = []
        self.keys: set[str | None] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.add(request.headers.get("authorization"))
        if request.method == "DELETE":
            self.deleted.append(request.url.path.rsplit("/", 1)[-1])
            return httpx.Response(200, json={})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        self.bodies.append(json.loads(request.content))
        self.sessions.append(request.headers["x-session-id"])
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "the queue is full"}})
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}}
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            *({"choices": [{"delta": {"content": piece}}]} for piece in self.said),
            {"choices": [], "usage": usage},
        ]
        sent = (json.dumps(event, ensure_ascii=False) for event in events)
        text = "".join(f"data: {data}\n\n" for data in sent) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"x-moorage-replica": "r1"})


def talk(
    server: Server,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    session: str | None = None,
    prompts: list[str] | None = None,
) -> tuple[int, str]:
    script = iter(lines)

    def read(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        try:
            return next(script)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(console, "input", read)
    chat = Chat("http://server", None, session, None, 0.0, 64, "secret", httpx.MockTransport(server))
    with console.capture() as captured:
        code = chat.run()
    return code, captured.get()


def test_chat_streams_answers_and_keeps_history_and_session(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    code, shown = talk(server, ["hi", "", "again"], monkeypatch)
    assert code == 0
    assert "Hel[lo]" in shown
    assert "7 of them cached" in shown
    assert "replica r1" in shown
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user", "assistant", "user"]  # type: ignore[attr-defined]
    assert server.bodies[1]["messages"][1]["content"] == "Hel[lo]"  # type: ignore[index]
    assert len(set(server.sessions)) == 1
    assert server.keys == {"Bearer secret"}


def test_chat_reads_ends_of_lines_of_unicode_as_the_text_that_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(said=("one\u2028", "two\u2029 three", "\x85 four"))
    code, _ = talk(server, ["hi", "again"], monkeypatch)
    assert code == 0
    assert server.bodies[1]["messages"][1]["content"] == "one\u2028two\u2029 three\x85 four"  # type: ignore[index]


def test_chat_new_begins_another_session_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    talk(server, ["hi", "/new", "hi", "/quit", "never sent"], monkeypatch)
    assert len(set(server.sessions)) == 2
    assert server.deleted == [server.sessions[0], server.sessions[1]]
    assert len(server.bodies) == 2
    assert len(server.bodies[1]["messages"]) == 1  # type: ignore[arg-type]


def test_chat_shows_a_refusal_and_goes_on_without_the_refused_line(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(status=429)
    code, _ = talk(server, ["one", "two"], monkeypatch)
    assert code == 0
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]  # type: ignore[arg-type]


def test_chat_without_a_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    chat = Chat("http://127.0.0.1:9", None, None, None, None, 64, None, httpx.MockTransport(refuse))
    assert chat.run() == 1


def test_chat_drops_the_session_it_made_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for ending in (["hi", "/quit"], ["hi"]):
        server = Server()
        talk(server, ending, monkeypatch)
        assert server.deleted == server.sessions
    server = Server()
    talk(server, ["hi", "/quit"], monkeypatch, session="kept")
    assert server.sessions == ["kept"]
    assert not server.deleted


@pytest.mark.parametrize("terminal", [True, False])
def test_chat_prompts_a_terminal_and_not_a_pipe(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    prompts: list[str] = []
    talk(Server(), ["hi"], monkeypatch, prompts=prompts)
    assert len(prompts) == 2
    assert all(("you>" in prompt) is terminal for prompt in prompts)


def test_the_version_is_that_of_the_package() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output.split()) == (0, ["moorage", __version__])


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--model", "no-such-model"],
        ["serve", "--log-format", "xml"],
        ["chat", "--url", "127.0.0.1:8000"],
        ["models", "fetch", "no-such"],
        ["serve", "--no-such-flag"],
    ],
)
def test_what_cannot_be_meant_exits_with_2(command: list[str]) -> None:
    assert runner.invoke(app, command).exit_code == 2


class Answering:
    """A port that answers every request with one JSON document."""

    def __init__(self, document: object) -> None:
        body = json.dumps(document).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._server.server_address[1])

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize(
    ("document", "mark", "said"),
    [
        ({"status": "ok", "server": "moorage"}, Mark.NOTE, "Moorage serves on"),
        ({"status": "ok"}, Mark.BAD, "cannot listen"),
        ([], Mark.BAD, "cannot listen"),
    ],
)
def test_the_doctor_knows_moorage_on_a_port_that_is_taken(document: object, mark: Mark, said: str) -> None:
    with Answering(document) as port:
        [finding] = _port("127.0.0.1", port)
    assert finding.mark is mark
    assert said in finding.detail


def test_the_doctor_runs_a_product_of_each_type_and_is_content() -> None:
    found = {finding.what: finding for finding in doctor._kernels()}
    for product in ("float32 weights", "bfloat16 weights", "8-bit weights", "4-bit weights", "attention"):
        assert found[product].mark is Mark.GOOD and found[product].detail, product


def test_the_doctor_names_a_product_that_fails_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(selfcheck, "PackedLinear", refuse)
    monkeypatch.setattr(selfcheck, "paged_attention", lambda q, *_: torch.zeros_like(q))
    found = {finding.what: finding for finding in doctor._kernels()}
    assert found["bfloat16 weights"].mark is Mark.BAD
    assert found["bfloat16 weights"].detail == "RuntimeError: bf16 path needs the cpu support avx512bw"
    assert found["attention"].mark is Mark.BAD and "is off by" in found["attention"].detail
    monkeypatch.setattr(doctor, "checks", lambda *_: [doctor._kernels])
    with console.capture() as captured:
        assert doctor.run(Options("127.0.0.1", 1, None, {})) == 1
    assert "Serving would fail here: float32 weights, bfloat16 weights" in captured.get()


def test_the_doctor_finds_slow_paths_without_a_compiler_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no C++ compiler found; install one"
    monkeypatch.setattr(library, "_load", lambda: (None, reason))
    findings = list(doctor._kernels())
    assert not [finding for finding in findings if finding.mark is Mark.BAD]
    assert f"none, so CPUs are several times slower: {reason}" in [finding.detail for finding in findings]


def test_a_cap_of_instructions_that_does_not_exist_fails_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOORAGE_CPU", "avx9")
    [finding] = doctor._kernels()
    assert finding.mark is Mark.BAD and finding.detail.startswith("MOORAGE_CPU must be none, avx2 or avx512")
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 2 and "MOORAGE_CPU must be none, avx2 or avx512" in result.output


def test_the_doctor_shows_a_long_path_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/a" + "/long" * 40
    monkeypatch.setattr(doctor, "checks", lambda *_: [lambda: iter([Finding(Mark.GOOD, "kernels", path)])])
    with console.capture() as captured:
        assert doctor.run(Options("127.0.0.1", 1, None, {})) == 0
    assert path in "".join(captured.get().split())


def test_a_node_that_is_not_seen_is_not_said_to_be_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with console.capture():
        assert drain_node.drain("no-such-node", "127.0.0.1:1", timeout=600) == 1


def test_a_node_that_cannot_be_drained_is_said_and_not_waited_for() -> None:
    with console.capture():
        assert drain_node.drain("no-such-node", "127.0.0.1:1", timeout=600) == 1


def test_a_replica_without_a_gpu_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    cuda = AppArgs(model="smollm2", device="cuda", replicas=2)
    check_gpus(cuda, 2, grows=False)
    with pytest.raises(StartFailed, match="device cuda: 2 GPUs for 2 of smollm2 are wanted, and Ray finds 1"):
        check_gpus(cuda, 1, grows=False)
    check_gpus(cuda, 0, grows=True)
    assert "waits until the cluster has more" in capsys.readouterr().out
    for anywhere in (AppArgs(model="smollm2"), AppArgs(model="smollm2", device="cuda", min_replicas=0, max_replicas=2)):
        check_gpus(anywhere, 0, grows=False)
