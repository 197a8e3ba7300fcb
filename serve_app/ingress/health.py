"""/health says that this process answers, and that it is Moorage; /ready that a replica can take a turn."""

from __future__ import annotations

from fastapi import APIRouter

from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.errors import retry_later
from serve_app.ingress.settings import IngressSettings

SERVER = "moorage"
"""By which `moorage doctor` knows a port that Moorage itself has taken."""


def health_router(settings: IngressSettings, client: EngineClient) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "server": SERVER}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        if not await client.ready():
            raise retry_later(503, "No replica can take a turn.", "unavailable", settings.retry_after_seconds)
        return {"status": "ready"}

    return router
