"""YAML as we read it: the core schema, every place, and nothing that multiplies."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.document import MAX_DEPTH, Document, DocumentError, Place
from policies.fault import Fault

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn", "Co", "Zl", "Zp")), max_size=20)
LEAVES = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


def refusal(text: str) -> tuple[str, Place]:
    with pytest.raises(DocumentError) as refused:
        Document(text)
    return str(refused.value), refused.value.place


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("010", 10),
        ("0o17", 15),
        ("0xff", 255),
        ("-3", -3),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("-.inf", -math.inf),
        ("1.", 1.0),
        ('"1"', "1"),
        ("'true'", "true"),
        ("|\n  7\n", "7\n"),
        ("9" * 65, "9" * 65),
        ("<<", "<<"),
    ],
)
def test_plain_scalars_follow_the_core_schema(written: str, value: Any) -> None:
    read = Document(f"key: {written}").value["key"]
    assert (read, type(read)) == (value, type(value))


def test_not_a_number() -> None:
    assert math.isnan(Document(".nan").value)


@given(VALUES)
def test_json_is_read_as_json(value: Any) -> None:
    """YAML 1.2 holds JSON, infinities aside."""
    written = json.dumps(value, ensure_ascii=False).replace("Infinity", ".inf")
    assert Document(written).value == json.loads(json.dumps(value)) or "Infinity" in json.dumps(value)


def test_keys_and_values_have_places() -> None:
    document = Document("models:\n  small: {price: 3}\nlist:\n- a\n- [b,  c]\n")
    assert document.keys == {
        ("models",): Place(1, 1),
        ("models", "small"): Place(2, 3),
        ("models", "small", "price"): Place(2, 11),
        ("list",): Place(3, 1),
    }
    assert document.values == {
        (): Place(1, 1),
        ("models",): Place(2, 3),
        ("models", "small"): Place(2, 10),
        ("models", "small", "price"): Place(2, 18),
        ("list",): Place(4, 1),
        ("list", 0): Place(4, 3),
        ("list", 1): Place(5, 3),
        ("list", 1, 0): Place(5, 4),
        ("list", 1, 1): Place(5, 8),
    }


@pytest.mark.parametrize(
    ("path", "at_key", "place"),
    [
        (("a", "b"), False, Place(2, 6)),
        (("a", "b"), True, Place(2, 3)),
        (("a", "b", "nothing", 3), False, Place(2, 3)),
        (("nothing",), True, Place(1, 1)),
        ((), False, Place(1, 1)),
    ],
)
def test_a_fault_is_placed_at_the_nearest_thing(path: tuple[str | int, ...], at_key: bool, place: Place) -> None:
    assert Document("a:\n  b: 1\n").place_of(Fault(path=path, message="", at_key=at_key)) == place


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("a: &x 1\nb: *x", "anchors (&name) and aliases (*name) are not allowed; write the value out", Place(1, 4)),
        ("a: *x", "anchors (&name) and aliases (*name) are not allowed; write the value out", Place(1, 4)),
        ("a: !!python/name:os.system x", "tags (!name) are not allowed", Place(1, 4)),
        ("a: 1\nb: 2\na: 3\n", "`a` stands here a second time; first in line 1", Place(3, 1)),
        ("m:\n  a: 1\n  'a': 3\n", "`a` stands here a second time; first in line 2", Place(3, 3)),
        ("1: 2", "a key must be text; write it in quotes", Place(1, 1)),
        ("? [a]\n: 1", "a key must be text; write it in quotes", Place(1, 3)),
        ("- 1\n---\n- 2\n", "a second document begins here; a policy is one", Place(2, 1)),
        ("a: 1\nb:\x07", "the character U+0007 is not allowed in YAML", Place(2, 3)),
        (
            "a:\n\t- b",
            "while scanning for the next token: found character '\\t' that cannot start any token",
            Place(2, 1),
        ),
        ("[1, 2", "while parsing a flow sequence: expected ',' or ']', but got '<stream end>'", Place(1, 6)),
        ("[" * 99 + "]" * 99, f"nested deeper than {MAX_DEPTH} levels", Place(1, MAX_DEPTH + 2)),
    ],
)
def test_what_is_refused(text: str, message: str, place: Place) -> None:
    assert refusal(text) == (message, place)
