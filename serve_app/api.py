"""The ASGI app, assembled. It knows no Ray: engines are reached through an EngineClient."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from serve_app.ingress.auth import ApiKeys, AuthMiddleware
from serve_app.ingress.engine_client import EngineClient
from serve_app.ingress.errors import install_error_handlers
from serve_app.ingress.head import HeadMiddleware
from serve_app.ingress.health import health_router
from serve_app.ingress.origins import OriginMiddleware
from serve_app.ingress.request_log import RequestLogMiddleware
from serve_app.ingress.side_process import SideProcess
from serve_app.ingress.turn_slots import TurnSlots
from serve_app.openai.chat import chat_router
from serve_app.openai.completions import completions_router
from serve_app.openai.desk import Desk
from serve_app.openai.document import ERRORS
from serve_app.openai.models import models_router
from serve_app.openai.responses.routes import responses_router
from serve_app.openai.responses.store import ResponseStore
from serve_app.openai.services import Services
from serve_app.openai.sessions import sessions_router
from serve_app.openai.tokens import tokens_router


def create_app(
    desk: Desk,
    side: SideProcess,
    client: EngineClient,
    store: ResponseStore,
    count_left_out: Callable[[int], None] | None = None,
) -> FastAPI:
    """The OpenAI-compatible API of one model. The app owns none of what it is given. `count_left_out` takes how many
    fields of a request's tools its answer is not kept to."""
    settings = desk.settings
    # The pages of interactive documentation load scripts from elsewhere, so they are off.
    app = FastAPI(title="Moorage", docs_url=None, redoc_url=None, redirect_slashes=False, responses=ERRORS)
    services = Services(desk, side, client, store, TurnSlots(settings), count_left_out)
    app.include_router(health_router(settings, client))
    app.include_router(models_router(services))
    app.include_router(chat_router(services))
    app.include_router(completions_router(services))
    app.include_router(responses_router(services))
    app.include_router(sessions_router(services))
    app.include_router(tokens_router(services))
    install_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AuthMiddleware, keys=ApiKeys(settings.api_keys))
    app.add_middleware(
        OriginMiddleware,
        has_keys=bool(settings.api_keys),
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
    )
    app.add_middleware(RequestLogMiddleware, answers_request_id=settings.answers_request_id)
    return app
