"""Which family reads a model's calls: by name, or by what the model's chat template writes.

A further family is one file and one line. Knows nothing of models.

Read next: `engines/text/tools/base.py`.
"""

from __future__ import annotations

from engines.text.tools.base import Family
from engines.text.tools.deepseek import deepseek
from engines.text.tools.gemma import gemma
from engines.text.tools.glm import glm
from engines.text.tools.harmony import harmony
from engines.text.tools.hermes import hermes
from engines.text.tools.kimi import kimi
from engines.text.tools.llama_json import llama_json
from engines.text.tools.marked_json import marked_json
from engines.text.tools.mistral import mistral
from engines.text.tools.pythonic import pythonic
from engines.text.tools.qwen_xml import qwen_xml

FENCED = ("```json", "```")
FAMILIES: dict[str, Family] = {
    "deepseek": deepseek,
    "gemma": gemma,
    "glm": glm,
    "granite": marked_json(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    "harmony": harmony,
    "hermes": hermes,
    "kimi": kimi,
    "llama3_json": llama_json,
    "mistral": mistral,
    "phi": marked_json(("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
    "pythonic": pythonic,
    "qwen3_xml": qwen_xml,
    "xlam": marked_json(("[TOOL_CALLS]", "<tool_call>", *FENCED), ("</tool_call>", "```"), bare=True),
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
