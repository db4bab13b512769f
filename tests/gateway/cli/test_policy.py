"""`facet policy` without a gateway."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gateway.cli.main import app
from policies.load import load_policy

ROOT = Path(__file__).resolve().parents[3]


def test_the_starter_policy_is_good() -> None:
    path = ROOT / "policies" / "default.yaml"
    result = CliRunner().invoke(app, ["policy", "check", str(path), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "ok": True,
        "revision": load_policy(path).revision,
        "models": ["embed", "small"],
    }


def test_a_fault_comes_with_its_place_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: facet/v1\nmodels:\n  small: {source: x, prise: {input_usd_per_mtok: 1}}\n")
    result = CliRunner().invoke(app, ["policy", "check", str(path)])
    assert result.exit_code == 1
    assert f"{path}:3:" in result.stderr
    assert "did you mean `price`?" in result.stderr
    as_json = CliRunner().invoke(app, ["policy", "check", str(path), "--json"])
    assert as_json.exit_code == 1
    document = json.loads(as_json.stdout)
    assert document["ok"] is False
    assert [f"{path}:3:" in problem for problem in document["problems"]] == [True]


def test_the_schema_is_the_one_beside_the_starter_policy() -> None:
    result = CliRunner().invoke(app, ["policy", "schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((ROOT / "policies" / "policy.schema.json").read_text())
