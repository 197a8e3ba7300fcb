"""The picker: tells HAProxy which replica takes a POST. HAProxy then streams between client and replica by itself.

    client -> HAProxy -- POST /internal/route --> Picker        session header, beginning of the body
                      <-- replica_id -----------                 the sticky router's first choice
                      == request and answer ===> DirectEngine

A pick is advice: a replica that finds the conversation resident elsewhere passes the turn on (see `client`). So the
picker needs no API key, and knows conversations only by `conversation_name`.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response

from serve_app.direct.opening import conversation_name
from serve_app.direct.picking import pick
from serve_app.openai.identity import named_header

logger = logging.getLogger("moorage")


class Picker:
    """One or more for each node with a proxy. Serve pins them there."""

    async def __init__(self, engines: DeploymentHandle, session_header: str) -> None:  # type: ignore[misc]  # Serve awaits it
        self._engines = engines
        self._session_header = session_header

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this when the constructor is done."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.post("/internal/route")
        async def route(request: Request) -> Response:
            name = conversation_name(named_header(request.headers, self._session_header), await request.body())
            try:
                replica = await pick(self._engines, name)
            except (RuntimeError, DeploymentUnavailableError) as error:
                logger.warning("no replica to pick: %s", error)
                return JSONResponse({"error": "no replica is running"}, status_code=503)
            return JSONResponse({"replica_id": replica.to_full_id_str()})

        return app
