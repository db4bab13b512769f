"""Which family reads a model's calls: by name, or by what the model's chat template writes.

A further family is one file and one line. Knows nothing of models.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from engines.text.tools import deepseek, gemma, glm, harmony, hermes, kimi, llama_json, mistral, pythonic, qwen_xml
from engines.text.tools.base import Family
from engines.text.tools.marked_json import marked_json


class ToolFamily(NamedTuple):
    """`read` finds the calls; `marks` are what it looks for: special tokens among them stay in the stream."""

    read: Family
    marks: tuple[str, ...]


def marked(marks: tuple[str, ...], ends: tuple[str, ...] = (), *, bare: bool = False) -> ToolFamily:
    """A family of `marked_json`."""
    return ToolFamily(marked_json(marks, ends, bare=bare), (*marks, *ends))


FAMILIES: dict[str, ToolFamily] = {
    "deepseek": ToolFamily(deepseek.deepseek, deepseek.MARKS),
    "gemma": ToolFamily(gemma.gemma, gemma.MARKS),
    "glm": ToolFamily(glm.glm, glm.MARKS),
    "granite": marked(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    "harmony": ToolFamily(harmony.harmony, harmony.MARKS),
    "hermes": ToolFamily(hermes.hermes, hermes.MARKS),
    "kimi": ToolFamily(kimi.kimi, kimi.MARKS),
    "llama3_json": ToolFamily(llama_json.llama_json, (llama_json.TAG,)),
    "mistral": ToolFamily(mistral.mistral, mistral.MARKS),
    "phi": marked(("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
    "pythonic": ToolFamily(pythonic.pythonic, pythonic.TAGS),
    "qwen3_xml": ToolFamily(qwen_xml.qwen_xml, qwen_xml.MARKS),
    "xlam": marked(("[TOOL_CALLS]", "<tool_call>", "```json", "```"), ("</tool_call>", "```"), bare=True),
}
DEFAULT = "xlam"
# What a chat template writes before a call, the most telling first.
TELLTALES = (
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|channel|>", "harmony"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_xml"),
    ("[TOOL_CALLS]", "mistral"),
    ("functools", "phi"),
    ("<|/tool_call|>", "phi"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|python_start|>", "pythonic"),
)


def family_of(template: str) -> str:
    """The family whose mark the template holds, else the one that reads bare, fenced and marked JSON."""
    return next((name for mark, name in TELLTALES if mark in template), DEFAULT)
