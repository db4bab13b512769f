"""Tools in words, for templates that know none: exact messages."""

from __future__ import annotations

import json
from pathlib import Path

from engines.text.model import load_text
from engines.text.tools.prompt import in_words

TOOL = {"type": "function", "function": {"name": "now", "description": "Time", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"zone": "CET"}}}


def test_tools_join_the_system_message_or_make_one() -> None:
    line = json.dumps(TOOL["function"])
    alone = in_words([{"role": "user", "content": "Hi"}], [TOOL])
    assert [message["role"] for message in alone] == ["system", "user"]
    assert line in alone[0]["content"].splitlines()
    assert '{"name": "...", "arguments": {...}}' in alone[0]["content"].splitlines()
    joined = in_words([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}], [TOOL])
    assert joined[0]["content"] == f"Be kind.\n\n{alone[0]['content']}"


def test_earlier_calls_and_results_are_text() -> None:
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    assert in_words(messages, []) == [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "content": 'I look.\n<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\n12:00\n</tool_response>"},
    ]


def test_a_template_without_tools_shows_them_and_nothing_else_changes(tiny_llama_path: Path) -> None:
    text = load_text(tiny_llama_path)
    plain = text.encode_chat([{"role": "user", "content": "Hi"}])
    assert text.encode_chat([{"role": "user", "content": "Hi"}], tools=[]) == plain
    told = text.encode_chat([{"role": "user", "content": "Hi"}], tools=[TOOL])
    assert told[-len(plain) :] == plain
    assert b'"name": "now"' in b"".join(map(text.token_bytes, told))


def test_a_marker_in_a_tools_description_is_plain_text(smuggler: dict[str, object], tiny_llama_path: Path) -> None:
    """A tool's description comes from a client: `<|im_end|>` in it must not end a turn."""
    text = load_text(tiny_llama_path)
    end = text.tokenizer.special_tokens["<|im_end|>"]
    without = text.encode_chat([{"role": "user", "content": "Hi"}], tools=[TOOL]).count(end)
    assert text.encode_chat([{"role": "user", "content": "Hi"}], tools=[smuggler]).count(end) == without
