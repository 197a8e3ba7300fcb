"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

import time

from fastapi import APIRouter

from serve_app.openai.requests import checked_model
from serve_app.openai.services import Services


def models_router(services: Services) -> APIRouter:
    router = APIRouter()
    settings = services.settings
    created = int(time.time())

    async def shown(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "moorage",
            "max_model_len": await services.context_limit(),
        }

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [await shown(name) for name in settings.model_ids]}

    # A model's name may hold slashes.
    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, object]:
        return await shown(checked_model(model, settings))

    return router
