"""Parameters that the API knows and this server does not support.

Each may have the values that mean "not used". Anything else is refused by name: to ignore it would give an
answer that is not what was asked for. Chat and responses follow one rule, whichever way each spells a thing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from serve_app.ingress.errors import not_supported

_OFF = (False,)
_ZERO = (0, 0.0)
_ONE = (1, 1.0)
_EMPTY: tuple[object, ...] = ([], {}, "")
_NO_TOOL = ("none", "auto")

# Name, dotted inside of an object -> values that change nothing; null always is one.
_COMMON: dict[str, tuple[object, ...]] = {
    "length_penalty": _ONE,
    "typical_p": _ONE,
    "top_a": _ZERO,
    "use_beam_search": _OFF,
    "bad_words": _EMPTY,
    "allowed_token_ids": _EMPTY,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (True,),
    "prompt_logprobs": (0,),
    "return_token_ids": _OFF,
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": _EMPTY,
    "json_schema": (),
    "prompt_embeds": (),
    "lora_path": (),
}
_STREAMED = {"stream_options.include_obfuscation": _OFF}
# No answer of this server has hidden reasoning, and nothing but its prompt says how long it is.
_NO_EFFORT, _MIDDLE = ("none",), ("medium",)
_CALLING = (
    _COMMON
    | _STREAMED
    | {
        "chat_template": (),
        "chat_template_kwargs": _EMPTY,
        "moderation": (),
    }
)
_CHAT = _CALLING | {
    "reasoning_effort": _NO_EFFORT,
    "verbosity": _MIDDLE,
    "functions": _EMPTY,
    "function_call": _NO_TOOL,
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "store": _OFF,
    "documents": _EMPTY,
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "echo": _OFF,
}
_COMPLETION = _COMMON | _STREAMED | {"suffix": _EMPTY}
_RESPONSES = _CALLING | {
    "reasoning.effort": _NO_EFFORT,
    "reasoning.context": ("auto",),
    "reasoning.mode": ("standard",),
    "text.verbosity": _MIDDLE,
    "n": (1,),
    "best_of": (1,),
    "logprobs": _OFF,
    "top_logprobs": (0,),
    "background": _OFF,
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "image": (),
    # Names of the other two routes; to ignore them would surprise.
    "response_format": (),
    "structured_outputs": (),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
}
_THINKING: dict[str, tuple[object, ...]] = {"reasoning_effort": (), "reasoning.effort": ()}
_TOKENIZE = {
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "return_token_strs": _OFF,
    "tools": _EMPTY,
    "chat_template": (),
    "chat_template_kwargs": _EMPTY,
}


def refuse_unserved_chat(content: Mapping[str, object], *, thinks: bool) -> None:
    """`thinks`: answers begin with thoughts, which no request can turn off."""
    _refuse(content, _CHAT | _THINKING if thinks else _CHAT)


def refuse_unserved_completion(content: Mapping[str, object]) -> None:
    _refuse(content, _COMPLETION)


def refuse_unserved_responses(content: Mapping[str, object], *, thinks: bool) -> None:
    """`thinks`: as in chat."""
    _refuse(content, _RESPONSES | _THINKING if thinks else _RESPONSES)


def refuse_unserved_tokenize(content: Mapping[str, object]) -> None:
    _refuse(content, _TOKENIZE)


def _refuse(content: Mapping[str, object], table: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ApiError that names the parameter and what it may be."""
    for name, harmless in table.items():
        value = _value(content, name)
        # Types are compared too: true is no 1, and "1" is no number.
        if value is not None and not any(value == ok and type(value) is type(ok) for ok in harmless):
            # Of several values that mean "not used" the one that is of the kind that was sent.
            alike = next((ok for ok in harmless if type(ok) is type(value)), None)
            raise not_supported(name, "remove it" if alike is None else f"remove it, or set it to {json.dumps(alike)}")


def _value(content: Mapping[str, object], name: str) -> object:
    """None: it is absent. What should be an object and is none has a model that says so."""
    outer, dot, inner = name.partition(".")
    value = content.get(outer)
    if not dot:
        return value
    return value.get(inner) if isinstance(value, dict) else None


UNSERVED = {"chat": _CHAT, "completion": _COMPLETION, "responses": _RESPONSES, "tokenize": _TOKENIZE}
"""By the kind of body, for the document of the API."""
