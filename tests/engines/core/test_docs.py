"""docs/engine.md names files and tests; all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "engine.md").read_text()


def test_every_promise_names_a_test_that_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 15
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^((?:async )?def {name}\(|{name} = )", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_every_file_of_the_reading_order_exists() -> None:
    paths = set(re.findall(r"`((?:engines|tests)/[\w/]+(?:\.py)?)(?:::\w+)?`", PAGE))
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert "engines/core/engine.py" in paths
