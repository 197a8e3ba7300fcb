"""What the HTTP API needs to know. Plain values, so that they cross a process border."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from engine_actor.options import MAX_INT32

Name = Annotated[str, Field(min_length=1, max_length=512)]


_HOST = re.compile(r"\*|[A-Za-z0-9._:-]{1,253}")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]{1,253}")


def _listed(value: object) -> object:
    """A text is one entry, or several with commas between."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError(f"{value!r} is no name of a host: write it without scheme and port, such as chat.example")
    return value.lower().removesuffix(".")


def _origin(value: str) -> str:
    value = value.removesuffix("/")
    if not _ORIGIN.fullmatch(value):
        raise ValueError(
            f"{value!r} is no origin: write scheme and host, and the port if there is one, such as "
            "https://chat.example or http://localhost:3000"
        )
    return value.lower()


Hosts = Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(_listed)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(_listed)]


class SamplingDefaults(BaseModel):
    """Used where a request says nothing; from the model's generation_config.json, or OpenAI's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=MAX_INT32)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    no_repeat_ngram_size: int = Field(default=0, ge=0, le=MAX_INT32)


class RequestLimits(BaseModel):
    """What a request may be and hold, as an operator chooses it."""

    session_header: str = Field(
        "x-session-id",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Request header that names the session; case, and - or _, do not matter.",
    )
    allowed_hosts: Hosts = Field(
        (),
        description="Without API keys: names, besides those of loopback, that requests may have as their Host. *: any.",
    )
    allowed_origins: Origins = Field(
        (),
        description="Web origins whose pages may use the server, such as https://chat.example. *: any; with keys only "
        "a page that knows one comes further.",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_INT32,
        description="Longest answer where a request sets no limit. Default: what the context leaves.",
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="Longest request body.")
    max_reading_seconds: float = Field(
        20.0,
        gt=0,
        le=3600,
        description="Longest time in which a large body is parsed, rendered and tokenized; beyond it clients get 413.",
    )
    max_session_id_length: int = Field(256, ge=1, le=4096, description="Longest name of a session, in characters.")
    max_messages: int = Field(4096, ge=1, description="Most messages in a conversation, or items of `input`.")
    max_stop_strings: int = Field(16, ge=1, description="Most stop strings of a request.")
    max_stop_length: int = Field(512, ge=1, description="Longest stop string, in characters.")
    max_stop_token_ids: int = Field(256, ge=1, description="Most stop tokens of a request.")
    max_logit_biases: int = Field(1024, ge=1, description="Most entries of logit_bias.")
    max_tools: int = Field(128, ge=1, description="Most tools of a request.")
    max_grammar_bytes: int = Field(
        256 * 2**10, ge=1, description="Longest grammar that an answer may follow, such as a JSON schema."
    )
    open_objects: bool = Field(
        False,
        description="Whether objects of a schema that lists properties, and says nothing of additionalProperties, may "
        "have others. A small model then invents names.",
    )
    max_choices: int = Field(8, ge=1, le=1024, description="Most answers to one prompt (n).")
    max_prompts: int = Field(128, ge=1, le=4096, description="Most prompts in one request to /v1/completions.")
    max_top_logprobs: int = Field(20, ge=0, le=1024, description="Most tokens that logprobs name for each place.")
    max_turns: int = Field(
        512,
        ge=1,
        description="Turns that one ingress process takes at a time; beyond it clients get 429 before their request "
        "is read.",
    )
    max_turns_per_key: int | None = Field(None, ge=1, description="The same for one API key.")


class IngressSettings(RequestLimits):
    """Settings of one front door. A bad value is refused with the field's name."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    model_ids: tuple[Name, ...] = Field(min_length=1)
    """Names under which the one model is served; the first is used where a request names none."""

    context_limit: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt and answer together. None: only the engine knows."""

    sampling: SamplingDefaults = SamplingDefaults()

    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    """Any of these opens every path; sessions belong to their key. Empty: no key is asked for."""

    answers_request_id: bool = True
    """Answers carry x-request-id. Off behind a proxy that adds it to every answer."""

    retry_after_seconds: float = Field(default=1.0, gt=0, le=3600)
    """Sent with 429 and 503 where the engine names no time of its own."""

    @field_validator("api_keys")
    @classmethod
    def _usable_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ValueError("a key must be printable ASCII without spaces around it")
        return keys

    @property
    def default_model(self) -> str:
        return self.model_ids[0]
