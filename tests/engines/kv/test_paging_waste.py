"""Slots that hold nothing: at most one block less a slot for each request, exactly what the lengths say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "paging_waste.py"
LENGTHS = [(1, 1), (16, 1), (16, 2), (30, 4), (1000, 25)]


@pytest.fixture(scope="module")
def replay() -> object:
    return runpy.run_path(str(SCRIPT))["replay"]


def test_waste_is_what_is_left_of_last_blocks(replay: object) -> None:
    assert callable(replay)
    counts = replay(LENGTHS, 16, 512)
    # Stored at the end: input + output - 1, for the last token is drawn and never computed.
    assert (counts["at_end"].tokens, counts["at_end"].slots) == (1 + 16 + 17 + 33 + 1024, 16 * (1 + 1 + 2 + 3 + 64))
    assert (counts["after_prompt"].tokens, counts["after_prompt"].slots) == (1063, 16 * (1 + 1 + 1 + 2 + 63))
    assert counts["at_end"].waste == 1 - 1091 / 1136


def test_steps_count_every_decoded_token(replay: object) -> None:
    assert callable(replay)
    counts = replay([(30, 4)], 16, 512)
    assert (counts["steps"].tokens, counts["steps"].slots) == (30 + 31 + 32 + 33, 16 * (2 + 2 + 2 + 3))


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_chunks_allocate_nothing_ahead(replay: object, chunk: int) -> None:
    assert callable(replay)
    assert replay(LENGTHS, 16, chunk) == replay(LENGTHS, 16, 4096)
