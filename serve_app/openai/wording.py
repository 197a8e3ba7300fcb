"""What a client is told of a value that does not fit: the field, what it must be, and what it was."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import ValidationError

from serve_app.ingress.errors import ApiError, bad_value

# By pydantic's type of error: what must be. The names in braces are its context.
_MUST = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "less_than_equal": "must be at most {le}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "string_pattern_mismatch": "must match {pattern}",
    "too_long": "may have at most {max_length} characters",
}
_NEEDED = {
    "missing": "is needed",
    "too_short": "must not be empty",
}
_LONGEST_VALUE = 40


def first_error(error: ValidationError, *where: str) -> ApiError:
    """A 400 about the first field at fault. `where`: what was read, if it is not the whole body."""
    first = error.errors(include_url=False)[0]
    param, kind = ".".join((*where, *(str(part) for part in first["loc"]))), first["type"]
    if kind in _NEEDED:
        return ApiError(400, f"{param} {_NEEDED[kind]}", param=param)
    if kind in _MUST:
        value = len(first["input"]) if kind == "too_long" else first["input"]
        return misfit(param, _MUST[kind].format_map(_plain(first.get("ctx", {}))), value)
    return bad_value(param, first["msg"])  # the sentence of a validator of ours


def misfit(param: str, must: str, value: object) -> ApiError:
    """`param` `must` be something, and not `value`."""
    return ApiError(400, f"{param} {must}, not {shown(value)}", param=param)


def shown(value: object) -> str:
    """A value as a client wrote it, if it is short; what it is, if not."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        return f"a text of {len(value)} characters"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _plain(context: Mapping[str, object]) -> dict[str, object]:
    """Limits as they are written in JSON: 2, not 2.0."""
    return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in context.items()}
