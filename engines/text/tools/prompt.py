"""Tools for a model whose chat template knows none: said in words, in the form that Hermes made common.

The system message gets the list of tools and the form of a call; calls and results of earlier turns become text of the
same form. Knows nothing of templates. Read next: `engines/text/tools/hermes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engines.text.tools.hermes import CLOSE, OPEN

INSTRUCTION = (
    "You can call tools. Each line is one tool, with the JSON schema of its arguments:\n{tools}\n"
    "To call one, write exactly this, and nothing after it:\n"
    f'{OPEN}\n{{{{"name": "...", "arguments": {{{{...}}}}}}}}\n{CLOSE}\n'
    "If no tool is needed, answer in plain words."
)


def in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages that say everything in `content`."""
    told = [as_text(message) for message in messages]
    if not tools:
        return told
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    words = INSTRUCTION.format(tools=lines)
    if told and told[0]["role"] == "system":
        told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{words}"}
    else:
        told.insert(0, {"role": "system", "content": words})
    return told


def as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without calls or results of its own kind."""
    told = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {**told, "role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    written = [
        f"{OPEN}\n{json.dumps({'name': call['function']['name'], 'arguments': call['function']['arguments']})}\n{CLOSE}"
        for call in message.get("tool_calls") or ()
    ]
    if written:
        told["content"] = "\n".join([*([told["content"]] if told.get("content") else []), *written])
    return told
