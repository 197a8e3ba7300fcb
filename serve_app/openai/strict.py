"""What all models of bodies are made of: strict types, and 400s that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from serve_app.openai.wording import first_error


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


M = TypeVar("M", bound=Strict)


def parse(model: type[M], content: Mapping[str, object]) -> M:
    """Raises ApiError 400 that names the first field at fault."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise first_error(error) from error


def refuse(message: str) -> NoReturn:
    # The message is a template: braces in it would be taken for fields.
    raise PydanticCustomError("value_error", "{message}", {"message": message})


def checked_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        refuse(f"{what} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(f"{what} holds half of a surrogate pair, which is no character")
    return value


def whole_text(value: object) -> str:
    """Pydantic alone lets lone surrogates pass in a plain string."""
    return checked_text(value, "it")


Text = Annotated[str, BeforeValidator(whole_text)]
