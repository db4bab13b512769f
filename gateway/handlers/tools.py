"""Tools of a chat, between the wire and the canonical request: definitions, choice, calls of earlier turns, calls made.

Knows nothing of how a model writes calls (`engines/text/tools`). Read next: `gateway/handlers/chat.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.errors import ApiError, out_of_range
from gateway.settings import Limits
from gateway.wire.openai import CallFunctionWire, ChatMessage, ChatRequest, ToolCallWire, ToolDefinition
from routers.types import Tool, ToolCallDelta

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def tools_of(wire: ChatRequest, limits: Limits) -> tuple[Tool, ...]:
    """The tools that the model may use; none with `tool_choice: "none"`. Raises ApiError."""
    given = wire.tools or []
    if len(given) > limits.tools:
        raise out_of_range("tools", f"a list of {len(given)}", f"at most {limits.tools} tools")
    tools = tuple(tool_of(tool, number) for number, tool in enumerate(given))
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"tools names {twice!r} twice; names must differ.", param="tools", code="invalid_value")
    return tools if offers_tools(wire.tool_choice, tools) else ()


def tool_of(tool: ToolDefinition, number: int) -> Tool:
    """One definition, checked."""
    where = f"tools[{number}]"
    if tool.type != "function" or tool.function is None:
        raise out_of_range(f"{where}.type", repr(tool.type), "'function', with a function")
    function = tool.function
    if not NAME.fullmatch(function.name):
        raise out_of_range(f"{where}.function.name", repr(function.name[:40]), "1 to 128 of letters, digits, _ . : / -")
    parameters = function.parameters or {}
    if parameters.get("type", "object") != "object":
        raise out_of_range(f"{where}.function.parameters.type", repr(parameters["type"]), "'object'")
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters={"type": "object", "properties": {}, **parameters},
        strict=bool(function.strict),
    )


def offers_tools(choice: Any, tools: Sequence[Tool]) -> bool:
    """Whether `tool_choice` lets the model use them. Forcing a call needs a grammar: refused in this version."""
    if choice is not None and choice != "none" and not tools:
        raise ApiError(400, "tool_choice needs tools.", param="tool_choice", code="invalid_value")
    if choice in (None, "auto"):
        return bool(tools)
    if choice == "none":
        return False
    raise ApiError(
        400,
        f"tool_choice is {json.dumps(choice)[:80]}; this version serves 'auto' and 'none'.",
        param="tool_choice",
        code="unsupported_parameter",
    )


def earlier_calls(message: ChatMessage, where: str) -> dict[str, Any]:
    """What a template reads of an earlier turn's calls and results: arguments as values, as templates expect them."""
    extra: dict[str, Any] = {}
    if message.tool_calls:
        if message.role != "assistant":
            raise ApiError(400, f"{where}.tool_calls: only an assistant calls tools.", param=f"{where}.tool_calls")
        extra["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        extra["tool_call_id"] = message.tool_call_id
    return extra


def arguments_of(text: str | dict[str, Any] | None) -> Any:
    """The object that the string holds; a string that holds none stays one, for a model may have written it."""
    if not isinstance(text, str):
        return text or {}
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


class GatheredCalls:
    """The calls of one choice, for a whole answer. `new_id` makes the id of a call that the model gave none."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, delta: ToolCallDelta) -> None:
        """The next piece."""
        if delta.name is not None:
            self._calls.append((delta.call_id or call_id(self._new_id), delta.name, []))
        self._calls[delta.call][2].append(delta.arguments)

    def wire(self) -> list[ToolCallWire]:
        """All of them."""
        return [
            ToolCallWire(id=id_, function=CallFunctionWire(name=name, arguments="".join(parts)))
            for id_, name, parts in self._calls
        ]


def call_id(new_id: Callable[[], str]) -> str:
    """A fresh id in OpenAI's form."""
    return f"call_{new_id()}"
