"""Policies: every fault with file, line, column and a hint; the shipped files are in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import policies
from policies.load import PolicyError, load_policy, parse_policy
from policies.schema import policy_json_schema

FOLDER = Path(policies.__file__).parent
HEAD = "version: facet/v1\nmodels:\n"
FREE = "price: {input_usd_per_mtok: 0}"


def test_the_default_policy() -> None:
    policy = load_policy(FOLDER / "default.yaml")
    assert sorted(policy.models) == ["embed", "small"]
    assert policy.resolve("anything") == "small"
    assert policy.resolve("text-embedding-3-small") == "embed"


def test_comments_and_order_do_not_change_the_revision() -> None:
    one = parse_policy(f"{HEAD}  a: {{source: x, {FREE}}}\n")
    two = parse_policy(f"# note\nmodels:\n  a: {{{FREE}, source: x}}\nversion: facet/v1\n")
    assert one.revision == two.revision


def test_the_published_schema_is_the_structs() -> None:
    assert json.loads((FOLDER / "policy.schema.json").read_text()) == json.loads(json.dumps(policy_json_schema()))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{HEAD}  a:\n    sourc: x\n", "p:4:5: Object contains unknown field `sourc` - at `$.models.a` (did you mean"),
        (f"{HEAD}  a: {{source: x, replicas: 0}}\n", "p:3:18: Expected `int` >= 1 - at `$.models.a.replicas`"),
        (f"{HEAD}  a: {{source: x}}\n", "p:3:3: model 'a' has no price"),
        (
            f"{HEAD}  a: {{source: x, {FREE}}}\naliases: {{b: aa}}\n",
            "p:4:11: alias 'b' stands for 'aa', which is no model",
        ),
        (f"{HEAD}  a: {{source: x}}\n  a: {{source: y}}\n", "p:4:3: duplicate key 'a'"),
        ("models: &x\n  a: *x\n", "aliases (*name) are not allowed"),
        ("", "p:1:1: the file is empty"),
    ],
)
def test_faults_name_their_place(text: str, problem: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse_policy(text, "p")
    assert problem in str(refused.value)
