"""What /openapi.json says about bodies. They are checked by hand, so that every error has OpenAI's envelope; so the
framework does not know them and is told here."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from serve_app.openai.desk import Desk
from serve_app.openai.narrowing import CAVEAT, narrow


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorEnvelope, "description": "The request can't be served as it is, or not now"},
    "5XX": {"model": ErrorEnvelope, "description": "The server failed, or can't serve now"},
}


def json_body(model: type[BaseModel], kind: str, desk: Desk, *, streams: bool = False) -> dict[str, Any]:
    """For `openapi_extra`: the body of a route is an object of this model, as far as `narrow` lets it be. `streams`: so
    may be the answer."""
    schema = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    narrow(schema, kind, desk)
    body = {"required": True, "description": CAVEAT, "content": {"application/json": {"schema": schema}}}
    operation: dict[str, Any] = {"requestBody": body}
    if streams:
        content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}}}
        operation["responses"] = {"200": {"description": "The answer, whole or as events", "content": content}}
    return operation


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A reference would be looked up from the root of the document, where these models are not."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}
