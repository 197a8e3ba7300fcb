"""Parameters that the API knows and this server does not support.

Each may have the values that mean "not used". Anything else is refused by name: to ignore it would give an
answer that is not what was asked for.
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

# Name -> values that change nothing; null always is one.
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
_CHAT = _COMMON | {
    "functions": _EMPTY,
    "function_call": _NO_TOOL,
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": _OFF,
    "chat_template": (),
    "chat_template_kwargs": _EMPTY,
    "documents": _EMPTY,
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "echo": _OFF,
}
_COMPLETION = _COMMON | {"suffix": _EMPTY}
_RESPONSES = _COMMON | {
    "n": (1,),
    "best_of": (1,),
    "logprobs": _OFF,
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
    "background": _OFF,
    "conversation": (),
    "include": ([],),
    "truncation": ("disabled",),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "chat_template": (),
    "chat_template_kwargs": _EMPTY,
    # Names of the other two routes; to ignore them would surprise.
    "response_format": (),
    "structured_outputs": (),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
}
_TOKENIZE = {
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "return_token_strs": _OFF,
    "tools": _EMPTY,
    "chat_template": (),
    "chat_template_kwargs": _EMPTY,
}


def refuse_unserved_chat(content: Mapping[str, object]) -> None:
    _refuse(content, _CHAT)


def refuse_unserved_completion(content: Mapping[str, object]) -> None:
    _refuse(content, _COMPLETION)


def refuse_unserved_responses(content: Mapping[str, object]) -> None:
    _refuse(content, _RESPONSES)


def refuse_unserved_tokenize(content: Mapping[str, object]) -> None:
    _refuse(content, _TOKENIZE)


def _refuse(content: Mapping[str, object], table: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ApiError that names the parameter and what it may be."""
    for name in content.keys() & table.keys():
        value, harmless = content[name], table[name]
        # Types are compared too: true is no 1, and "1" is no number.
        if value is not None and not any(value == ok and type(value) is type(ok) for ok in harmless):
            # A default like 0.0 stands beside its 0 and need not be named twice.
            shown = [ok for i, ok in enumerate(harmless) if ok not in harmless[:i]]
            accepted = f", or set it to {' or '.join(map(json.dumps, shown))}" if shown else ""
            raise not_supported(name, "remove it" + accepted)
