"""What the HTTP API needs to know. Plain values, so that they cross a process border."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine_actor.options import MAX_INT32

Name = Annotated[str, Field(min_length=1, max_length=512)]


class SamplingDefaults(BaseModel):
    """Used where a request says nothing; from the model's generation_config.json, or OpenAI's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=MAX_INT32)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)


class IngressSettings(BaseModel):
    """Settings of one front door. A bad value is refused with the field's name."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    model_ids: tuple[Name, ...] = Field(min_length=1)
    """Names under which the one model is served; the first is used where a request names none."""

    context_limit: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt and answer together. None: only the engine knows."""

    default_max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    """Longest answer where a request sets no limit. None: what the context leaves."""

    sampling: SamplingDefaults = SamplingDefaults()

    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    """Any of these opens every path; sessions belong to their key. Empty: no key is asked for."""

    session_header: str = Field(default="x-session-id", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Names the session of a request. Case does not matter, nor does `-` for `_`."""

    max_turns: int | None = Field(default=None, ge=1)
    """Turns that this process takes at a time; beyond it 429. None: only the engines' queues bound them."""

    max_turns_per_key: int | None = Field(default=None, ge=1)
    """The same for one API key."""

    answers_request_id: bool = True
    """Answers carry x-request-id. Off behind a proxy that adds it to every answer."""

    max_session_id_length: int = Field(default=256, ge=1, le=4096)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    max_messages: int = Field(default=4096, ge=1)
    max_stop_strings: int = Field(default=16, ge=1)
    max_stop_length: int = Field(default=512, ge=1)
    max_stop_token_ids: int = Field(default=256, ge=1)
    max_logit_biases: int = Field(default=1024, ge=1)

    max_tools: int = Field(default=128, ge=1)
    max_grammar_bytes: int = Field(default=256 * 2**10, ge=1)
    """Longest grammar, such as a JSON schema, that an answer may follow."""

    max_choices: int = Field(default=8, ge=1, le=1024)
    """Most answers to one prompt (`n`)."""

    max_prompts: int = Field(default=128, ge=1, le=4096)
    """Most prompts in one request to /v1/completions."""

    max_top_logprobs: int = Field(default=20, ge=0, le=1024)
    """Most tokens that are named for each place of an answer."""

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
