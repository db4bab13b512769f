"""Walking the types finds a fault exactly when msgspec does, and finds all of them."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.convert import type_faults
from policies.fault import Fault, hint, show_path
from policies.schema import Policy

VALID: dict[str, Any] = {
    "version": "facet/v1",
    "models": {
        "small": {"source": "x", "price": {"input_usd_per_mtok": 0.02, "output_usd_per_mtok": 1}, "replicas": 2},
        "embed": {"source": "y", "price": {"input_usd_per_mtok": 0}, "task": "embed", "dtype": "float32"},
    },
    "aliases": {"gpt": "small", "*": "small"},
    "default": {"members": [{"model": "*", "temperature": 0.5, "max_tokens": None}], "deadline_ms": 100},
    "budget": {"max_amplification": 4},
}
ODD = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1,
        2.5,
        1e9,
        float("nan"),
        "",
        "x",
        "embed",
        "auto",
        [],
        {},
        [1],
        {"a": 1},
        [{"model": "x"}] * 2,
    ]
)


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Of every value below the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*at, key), *paths(item, (*at, key)))]


def changed(path: tuple[str | int, ...], value: Any, rename: str | None) -> dict[str, Any]:
    """VALID with one value, or one name, replaced."""
    document = copy.deepcopy(VALID)
    parent: Any = document
    for step in path[:-1]:
        parent = parent[step]
    if rename is not None and isinstance(parent, dict):
        parent[rename] = parent.pop(path[-1])
    else:
        parent[path[-1]] = value
    return document


@settings(max_examples=500)
@given(st.sampled_from(paths(VALID)), ODD, st.sampled_from([None, None, "reduce", "a b", "*", "b\n"]))
def test_it_agrees_with_msgspec(path: tuple[str | int, ...], value: Any, rename: str | None) -> None:
    document = changed(path, value, rename)
    try:
        msgspec.convert(document, Policy, strict=True)
        accepted = True
    except msgspec.ValidationError:
        accepted = False
    assert accepted is not any(type_faults(document, Policy))


def test_a_valid_document_has_none() -> None:
    assert list(type_faults(VALID, Policy)) == []


def test_all_faults_are_found_innermost_alone() -> None:
    document = {"models": {"a": {"source": 1, "zzz": 3}, "b": None}, "tests": []}
    found = {(show_path(fault.path), fault.at_key) for fault in type_faults(document, Policy)}
    assert found == {
        ("$", True),  # version is missing
        ("$.tests", True),
        ("$.models.a", True),  # price is missing
        ("$.models.a.zzz", True),
        ("$.models.a.source", False),
        ("$.models.b", False),
    }


def test_null_stands_for_what_may_be_left_out_and_nothing_else() -> None:
    assert list(type_faults({**VALID, "default": {"members": [{"model": "*"}], "deadline_ms": None}}, Policy)) == []
    assert list(type_faults({**VALID, "budget": None}, Policy)) == [
        Fault(path=("budget",), message="expected a mapping, got nothing; what one request may cost at most")
    ]


def test_paths_quote_what_is_no_plain_key() -> None:
    assert show_path(("models", "gpt-4.1", "price")) == '$.models["gpt-4.1"].price'
    assert show_path(("aliases", "*")) == '$.aliases["*"]'
    assert show_path(("default", "members", 0)) == "$.default.members[0]"
    assert show_path(()) == "$"


def test_hints() -> None:
    assert hint("prise", ["price", "source"]) == " (did you mean `price`?)"
    assert hint("zzz", ["b", "a"]) == " (there is: `a`, `b`)"
    assert hint("zzz", []) == ""
    assert hint("zzz", [f"n{number:02}" for number in range(20)]).endswith("`n11`, ...)")
