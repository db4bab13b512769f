"""Which marks a model puts around its thoughts: by name, or by what its chat template holds.

A further family is one line. Harmony is not here: its tool parser reads channels, thoughts among them.

Read next: `engines/text/reasoning/tags.py`.
"""

from __future__ import annotations

from engines.text.reasoning.tags import Tags

FAMILIES: dict[str, Tags] = {
    "think": Tags(("<think>",), ("</think>",)),  # DeepSeek R1, Qwen3, QwQ, GLM, Kimi K2 Thinking, MiniMax, Nemotron
    "mistral": Tags(("[THINK]",), ("[/THINK]",)),  # Magistral
    "kimi": Tags(("◁think▷",), ("◁/think▷",)),  # Kimi-VL Thinking
    "seed": Tags(("<seed:think>",), ("</seed:think>",)),  # Seed-OSS
    "gemma": Tags(("<|channel>thought\n", "<|channel>"), ("<channel|>",)),  # Gemma 4
    "granite": Tags(("Here is my thought process:",), ("Here is my response:",)),  # Granite 3.2
    "ernie": Tags(("<think>",), ("</think>\n\n<response>", "</think>"), ("</response>",)),  # ERNIE 4.5 Thinking
    "hunyuan": Tags(("<think>",), ("</think>\n<answer>", "</think>"), ("</answer>",)),  # Hunyuan A13B
    "thinking": Tags(("<thinking>",), ("</thinking>",)),  # models that spell it out
}
TELLTALES = (
    ("<seed:think>", "seed"),
    ("◁think▷", "kimi"),
    ("[THINK]", "mistral"),
    ("<|channel>", "gemma"),
    ("Here is my thought process", "granite"),
    ("<response>", "ernie"),
    ("<answer>", "hunyuan"),
    ("<think>", "think"),
    ("<thinking>", "thinking"),
)


def family_of(template: str) -> str | None:
    """The family whose mark the template holds; None for a model that does not think aloud."""
    return next((name for mark, name in TELLTALES if mark in template), None)
