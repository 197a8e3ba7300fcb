"""The app over the real model, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from engine_actor.actor.actor import EngineActor
from engine_actor.actor_options import ActorOptions
from serve_app.text.prompts import PromptBuilder
from serve_app.text.stream import AnswerText
from serve_app.text.tokenizer import Tokenizer
from tests.http.http_harness import app_over
from tests.support.local_engine import LocalEngine


def _text(tokenizer: Tokenizer, ids: Any) -> str:
    text = AnswerText(tokenizer)
    return text.push(ids) + text.finish()


@asynccontextmanager
async def real_door(smollm2_path: Path, prompts: PromptBuilder) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = prompts.tokenizer
    options = ActorOptions(str(smollm2_path), kv_memory=float(2**27), threads=1)
    actor = EngineActor(options, "replica-1", partial(_text, tokenizer), vocabulary=tokenizer.vocabulary)
    await actor.start()
    try:
        with app_over(LocalEngine(actor), prompts, smollm2_path) as app:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=120
            ) as http:
                yield http
    finally:
        await actor.stop()
