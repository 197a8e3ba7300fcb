"""Tools as /v1/responses has them, and what a model says to call them."""

from __future__ import annotations

from typing import Any

from serve_app.text.calls import written_call

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "In a city", "parameters": CITY}
NOW = {"type": "function", "name": "now"}
TOOLS: list[Any] = [WEATHER, NOW]
CHAT_TOOLS = [
    {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}} for tool in TOOLS
]
QUESTION = "What is the weather in Paris?"
PARIS, TIME = written_call("weather", {"city": "Paris"}), written_call("now", {})

Item = dict[str, Any]


def output_of(call: Item, text: Any) -> Item:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": text}
