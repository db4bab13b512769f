"""Thoughts told from answers, wherever the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.text.reasoning.registry import FAMILIES, family_of
from engines.text.reasoning.tags import reasoning_parser
from engines.text.scanner import Content, Reasoning


def read(family: str, *chunks: str, inside: bool = False) -> tuple[str, str]:
    """(reasoning, content)."""
    parser = reasoning_parser(FAMILIES[family], inside=inside)
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.close()
    joined = {kind: "".join(p.text for p in pieces if isinstance(p, kind)) for kind in (Reasoning, Content)}
    return joined[Reasoning], joined[Content]


@pytest.mark.parametrize(
    ("family", "text", "inside", "expected"),
    [
        ("think", "<think>\nHm, 2.\n</think>\n\nTwo.", False, ("Hm, 2.", "Two.")),
        ("think", "Hm, 2.</think>Two.", True, ("Hm, 2.", "Two.")),
        ("think", "<think>Hm</think>a</think>b", True, ("Hm", "a</think>b")),
        ("think", "Two.", False, ("", "Two.")),
        ("think", "  Two.", False, ("", "  Two.")),
        ("think", "<think>never ends", False, ("never ends", "")),
        ("think", "<think></think>Two.", False, ("", "Two.")),
        ("think", "<thin", False, ("", "<thin")),
        ("mistral", "[THINK]Hm[/THINK]Two.", False, ("Hm", "Two.")),
        ("kimi", "◁think▷Hm◁/think▷Two.", False, ("Hm", "Two.")),
        ("seed", "<seed:think>Hm</seed:think>Two.", False, ("Hm", "Two.")),
        ("gemma", "<|channel>thought\nHm<channel|>Two.", False, ("Hm", "Two.")),
        ("granite", "Here is my thought process: Hm Here is my response: Two.", False, ("Hm", "Two.")),
        ("ernie", "<think>Hm</think>\n\n<response>Two.</response>", False, ("Hm", "Two.")),
        ("hunyuan", "<think>Hm</think>\n<answer>Two.</answer>", False, ("Hm", "Two.")),
        ("thinking", "<thinking>Hm</thinking>Two.", False, ("Hm", "Two.")),
    ],
)
def test_the_formats(family: str, text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert read(family, text, inside=inside) == expected
    assert read(family, *text, inside=inside) == expected


MARKS = sorted({mark for tags in FAMILIES.values() for mark in (*tags.opens, *tags.closes, *tags.after)})


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.sampled_from([*MARKS, " ", "\n", "a", "<", "</think", "Here is"]), max_size=10).map("".join),
    st.booleans(),
    st.data(),
)
def test_any_chunking_gives_what_the_whole_gives(family: str, text: str, inside: bool, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    whole = read(family, text, inside=inside)
    assert read(family, text[:cut], text[cut:], inside=inside) == whole
    assert read(family, *text, inside=inside) == whole


def test_the_template_tells_the_family() -> None:
    assert family_of("{{ '<think>' }}") == "think"
    assert family_of("{{ '<think>' }}{{ '<answer>' }}") == "hunyuan"
    assert family_of("{{ messages }}") is None
