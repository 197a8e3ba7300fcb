from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from serve_app.openai.responses.store import StoreLimits
from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import load_tokenizer
from tests.http.http_harness import MODEL, Server, StartServer, app_over, connected, serving, wait_until
from tests.http.scripted_engine import ScriptedEngine


@pytest.fixture(scope="session")
def prompts(smollm2_path: Path) -> PromptBuilder:
    return PromptBuilder(load_tokenizer(smollm2_path))


@pytest.fixture(scope="session")
def _shared(prompts: PromptBuilder, smollm2_path: Path) -> Iterator[Server]:
    engine = ScriptedEngine()
    with (
        app_over(engine, prompts, smollm2_path, model_ids=(MODEL, "alias"), context_limit=512) as app,
        serving(app) as url,
        connected(url) as client,
    ):
        yield Server(url, engine, prompts, client)


@pytest.fixture
def server(_shared: Server) -> Server:
    """The one server that most tests share, its engine as new. Says "Hello there!"."""
    wait_until(lambda: _shared.engine.running == 0)
    _shared.engine.reset()
    _shared.say("Hello there!")
    return _shared


@pytest.fixture
def start_server(prompts: PromptBuilder, smollm2_path: Path) -> Iterator[StartServer]:
    """Starts a server with settings, and if need be prompts, of its own."""
    with ExitStack() as stack:

        def start(prompts: PromptBuilder = prompts, limits: StoreLimits | None = None, **settings: Any) -> Server:
            engine = ScriptedEngine()
            app = stack.enter_context(app_over(engine, prompts, smollm2_path, limits, **settings))
            url = stack.enter_context(serving(app))
            client = stack.enter_context(connected(url))
            server = Server(url, engine, prompts, client)
            server.say("Hello there!")
            return server

        yield start
