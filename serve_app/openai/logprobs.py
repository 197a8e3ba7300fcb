"""How the probabilities of tokens are written: as chat has them, and as completions do."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.openai.choices import PlacedToken
from serve_app.text.token_bytes import TokenBytes

_LEAST = -9999.0  # what the API writes for a token that can't be; JSON has no infinity


def chat_logprobs(tokens: Sequence[PlacedToken], spelling: TokenBytes) -> dict[str, object]:
    def entry(token: int, logprob: float) -> dict[str, object]:
        data = spelling[token]
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}

    content = [
        entry(placed.logprob.token, placed.logprob.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in placed.logprob.top]}
        for placed in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[PlacedToken], spelling: TokenBytes) -> dict[str, object]:
    """The chosen token stands among the likeliest, also where it is none of them."""
    tops: list[dict[str, float]] = []
    for placed in tokens:
        top: dict[str, float] = {}
        for token, logprob in (*placed.logprob.top, (placed.logprob.token, placed.logprob.logprob)):
            # Of two tokens with one spelling the likelier one stays.
            top.setdefault(_name(spelling[token]), max(logprob, _LEAST))
        tops.append(top)
    return {
        "tokens": [_name(spelling[placed.logprob.token]) for placed in tokens],
        "token_logprobs": [max(placed.logprob.logprob, _LEAST) for placed in tokens],
        "top_logprobs": tops,
        "text_offset": [placed.offset for placed in tokens],
    }


def _name(data: bytes) -> str:
    """The format has no place for bytes: a token that is no text of its own is spelled in them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
