from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_harness import MODEL, Server, StartServer, serving, wait_until
from scripted_engine import ScriptedEngine

from serve_app.api import create_app
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.responses.memory_store import MemoryResponseStore
from serve_app.openai.responses.store import StoreLimits
from serve_app.text.prompts import PromptBuilder
from serve_app.text.tokenizer import load_tokenizer

DEFAULT_LIMITS = StoreLimits()


@pytest.fixture(scope="session")
def prompts(smollm2_path: Path) -> PromptBuilder:
    return PromptBuilder(load_tokenizer(smollm2_path))


@pytest.fixture(scope="session")
def _shared(prompts: PromptBuilder) -> Iterator[Server]:
    engine, store = ScriptedEngine(), MemoryResponseStore(DEFAULT_LIMITS)
    settings = IngressSettings(model_ids=(MODEL, "alias"), context_limit=512)
    with serving(create_app(settings, engine, prompts, store)) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield Server(url, engine, prompts, client)


@pytest.fixture
def server(_shared: Server) -> Server:
    """The one server that most tests share, its engine as new. Says "Hello there!"."""
    wait_until(lambda: _shared.engine.running == 0)
    _shared.engine.reset()
    _shared.say("Hello there!")
    return _shared


@pytest.fixture
def start_server(prompts: PromptBuilder) -> Iterator[StartServer]:
    """Starts a server with settings, and if need be prompts, of its own."""
    with ExitStack() as stack:

        def start(prompts: PromptBuilder = prompts, limits: StoreLimits = DEFAULT_LIMITS, **settings: Any) -> Server:
            engine = ScriptedEngine()
            store = MemoryResponseStore(limits)
            app = create_app(IngressSettings(model_ids=(MODEL,), **settings), engine, prompts, store)
            url = stack.enter_context(serving(app))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=30))
            server = Server(url, engine, prompts, client)
            server.say("Hello there!")
            return server

        yield start
