"""Which readers a model's template asks for, and what they keep of its special tokens."""

from __future__ import annotations

import pytest

from engines.text.output import OutputForm
from engines.text.scanner import CallArguments, CallStart, Content, Reasoning
from engines.text.tools.base import Offered


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "hermes", None),  # knows no tools: they are told in words, in Hermes' form
        ("{{ tools }}<tool_call>", "hermes", None),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("{{ tools }}<tool_call><think>", "hermes", "think"),
        ("{{ tools }}<|channel|>analysis<think>", "harmony", None),
    ],
)
def test_the_template_says_it(template: str, tools: str, reasoning: str | None) -> None:
    form = OutputForm(template)
    assert (form.tools, form.reasoning) == (tools, reasoning)


def test_the_policy_may_overrule_it() -> None:
    form = OutputForm("{{ tools }}<tool_call>", tools="glm", reasoning="think")
    assert (form.tools, form.reasoning) == ("glm", "think")
    with pytest.raises(KeyError, match="nobody"):
        OutputForm("", tools="nobody")


def test_only_what_is_read_is_kept() -> None:
    form = OutputForm("{{ tools }}<tool_call><think>")
    assert form.marks(with_tools=False) == ("<think>", "</think>")
    assert form.marks(with_tools=True) == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert OutputForm("{{ messages }}").is_plain(with_tools=False)
    assert not OutputForm("{{ messages }}").is_plain(with_tools=True)
    assert not OutputForm("{{ tools }}<|channel|>").is_plain(with_tools=False)


def test_thoughts_end_before_calls_begin() -> None:
    """A call inside thoughts is a thought; the mark that opens them may be the prompt's last words."""
    reader = OutputForm("{{ tools }}<tool_call><think>").reader(Offered(), "assistant\n<think>\n")
    pieces = reader.feed('a <tool_call>{"name": "x"}')
    assert reader.thinking
    pieces += reader.feed('</think>\n\nb <tool_call>{"name": "now"}</tool_call>')
    assert not reader.thinking
    pieces += reader.close()
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    assert thoughts == 'a <tool_call>{"name": "x"}'
    assert [piece for piece in pieces if not isinstance(piece, Reasoning)] == [
        Content("b"),
        CallStart(0, "now"),
        CallArguments(0, "{}"),
    ]
