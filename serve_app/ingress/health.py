"""/health says that this process answers; /ready that a replica can take a turn."""

from __future__ import annotations

from fastapi import APIRouter

from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.errors import retry_later
from serve_app.ingress.settings import IngressSettings


def health_router(settings: IngressSettings, client: EngineClient) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        if not await client.ready():
            raise retry_later(503, "No replica can take a turn.", "unavailable", settings.retry_after_seconds)
        return {"status": "ready"}

    return router
