"""What a policy says once it is read, and the schema that editors get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import policies
from policies.load import PolicyError, parse_policy
from policies.schema import policy_json_schema

FOLDER = Path(policies.__file__).parent
MODEL = "{source: x, price: {input_usd_per_mtok: 1}}"
TEXT = f"version: facet/v1\nmodels: {{a: {MODEL}, b: {MODEL}}}\naliases: {{gpt: b}}\n"


def test_the_published_schema_is_the_structs() -> None:
    """Mend with: facet policy schema > policies/policy.schema.json"""
    assert json.loads((FOLDER / "policy.schema.json").read_text()) == policy_json_schema()


def test_every_field_of_the_schema_is_described_and_nothing_else_is_allowed() -> None:
    definitions: dict[str, Any] = policy_json_schema()["$defs"]
    bare = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, value in definition["properties"].items()
        if "description" not in value and not any("description" in arm for arm in value.get("anyOf", ()))
    ]
    assert bare == []
    assert {
        name for name, definition in definitions.items() if definition["additionalProperties"] is not False
    } == set()


def test_the_starter_policy_names_the_schema_beside_it() -> None:
    first = (FOLDER / "default.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=./policy.schema.json"


def test_a_name_is_itself_or_its_alias_or_the_star() -> None:
    plain = parse_policy(TEXT)
    assert [plain.resolve(name) for name in ("a", "b", "gpt", "other", "*")] == ["a", "b", "b", None, None]
    starred = parse_policy(f"{TEXT.rstrip()[:-1]}, '*': a}}\n")
    assert [starred.resolve(name) for name in ("gpt", "other", "*")] == ["b", "a", "a"]


@pytest.mark.parametrize(
    "same", ["# note\n" + TEXT, TEXT + "budget: {max_amplification: 8.0}\n", TEXT.replace("1", "1.0")]
)
def test_what_means_the_same_has_the_same_revision(same: str) -> None:
    one, two = parse_policy(TEXT), parse_policy(same.replace("facet/v1.0", "facet/v1"))
    assert one == two
    assert one.revision == two.revision
    assert len(one.revision) == 12


def test_order_of_keys_does_not_count_and_content_does() -> None:
    swapped = f"aliases: {{gpt: b}}\nmodels: {{b: {MODEL}, a: {MODEL}}}\nversion: facet/v1\n"
    other = TEXT.replace("gpt: b", "gpt: a")
    assert parse_policy(TEXT).revision == parse_policy(swapped).revision != parse_policy(other).revision


@pytest.mark.parametrize("price", ["0.000001", "0.02", "999999.999999", "0", "1000000"])
def test_prices_that_micro_usd_hold(price: str) -> None:
    policy = parse_policy(TEXT.replace("input_usd_per_mtok: 1", f"input_usd_per_mtok: {price}"))
    assert policy.models["a"].price.input_usd_per_mtok == float(price)


@pytest.mark.parametrize("price", ["0.0000001", "0.0000015", "1000000.1", "-0.1"])
def test_prices_that_micro_usd_do_not_hold(price: str) -> None:
    with pytest.raises(PolicyError, match=r"\$\.models\.a\.price\.input_usd_per_mtok: "):
        parse_policy(TEXT.replace("input_usd_per_mtok: 1", f"input_usd_per_mtok: {price}"))


def test_somebody_must_generate() -> None:
    with pytest.raises(PolicyError, match=r"p:2:1: \$\.models: no model has `task: generate`; at least one must"):
        parse_policy(TEXT.replace("source: x", "source: x, task: embed"), "p")
