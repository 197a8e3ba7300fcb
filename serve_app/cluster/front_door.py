"""The class of the Serve deployment before the engines.

    client -> Serve proxy -> Ingress (HTTP, text) -> handle with StickyRouter -> EngineDeployment (one engine)
                                                  -> handle -> the store of responses (see response_store)

The ASGI app knows no Ray; what is Ray's is here. Nothing may block the event loop that Serve runs user code on: files
are read in a thread.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import FastAPI
from pydantic import SecretStr
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter

from serve_app.api import create_app
from serve_app.cluster.client import HandleEngineClient
from serve_app.cluster.port_watch import head_watch
from serve_app.cluster.response_store import HandleResponseStore
from serve_app.config import AppArgs
from serve_app.generation_config import sampling_defaults
from serve_app.local_ports import require_key_beyond_loopback
from serve_app.model_store import resolve_model
from serve_app.openai.desk import open_desk, side_desk
from serve_app.telemetry.logs import join_serve_log

logger = logging.getLogger("moorage.engine")

STORE_TIMEOUT_SECONDS = 10.0


class Ingress:
    """The OpenAI-compatible API. Holds the tokenizer and no model, and so does a process beside it for large bodies."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: AppArgs, keys: tuple[SecretStr, ...], engines: DeploymentHandle, responses: DeploymentHandle
    ) -> None:
        join_serve_log()
        # A config file binds 0.0.0.0 unless it says otherwise, so the rule of the command line holds here
        # too.
        require_key_beyond_loopback(_get_global_client().http_config.host, has_keys=bool(keys))
        path = await asyncio.to_thread(resolve_model, args.model)
        settings = args.ingress_settings(keys, sampling=await asyncio.to_thread(sampling_defaults, path))
        self._desk = await asyncio.to_thread(open_desk, settings, path)
        if self._desk.prompts.why_no_chat is not None:
            logger.warning("%s", self._desk.prompts.why_no_chat)
        self._side = side_desk(settings, path)
        self._client = HandleEngineClient(
            engines,
            placement_timeout=args.resolved_placement_timeout(),
            replacement_timeout=args.replacement_timeout_seconds,
            starts_on_demand=args.starts_on_demand,
            head=head_watch(),
        )
        self._store = HandleResponseStore(responses, timeout=STORE_TIMEOUT_SECONDS)
        self._left_out = Counter(
            "moorage_schema_parts_left_out",
            description="Fields of tools' schemas that no grammar can keep to, in requests that do not ask for strict.",
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this when the constructor is done."""
        return create_app(self._desk, self._side, self._client, self._store, self._left_out.inc)

    def __del__(self) -> None:
        """Serve calls this when the process stops, after its requests have ended."""
        for held in (getattr(self, "_side", None), getattr(self, "_client", None)):  # absent if the constructor failed
            if held is not None:
                held.close()
