"""GET /v1/models."""

from __future__ import annotations

import time

from fastapi import APIRouter

from serve_app.openai.services import Services


def models_router(services: Services) -> APIRouter:
    router = APIRouter()
    settings = services.settings
    created = int(time.time())

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        data = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "moorage",
                "max_model_len": settings.context_limit,
            }
            for name in settings.model_ids
        ]
        return {"object": "list", "data": data}

    return router
