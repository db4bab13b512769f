"""Keys by the command line: shown once, stored as keyed hashes, revoked for good."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.main import app


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FACET_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def keys(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def test_a_key_is_made_listed_and_revoked(data_dir: Path) -> None:
    made = json.loads(keys("create", "ci", "--tenant", "acme", "--json").stdout)
    assert {name: made[name] for name in ("name", "tenant", "role", "revoked_s")} == {
        "name": "ci",
        "tenant": "acme",
        "role": "user",
        "revoked_s": None,
    }
    assert made["key"].startswith(f"sk-facet-{made['id']}-")
    assert "digest" not in made

    (listed,) = json.loads(keys("list", "--json").stdout)
    assert listed == {name: value for name, value in made.items() if name != "key"}
    line = keys("list").stdout.split()
    assert [line[0], line[1], line[2], line[3], line[-1]] == [made["id"], "active", "user", "acme", "ci"]

    assert json.loads(keys("revoke", made["id"], "--json").stdout) == {"id": made["id"], "revoked": True}
    assert keys("list").stdout.split()[1] == "revoked"
    again = keys("revoke", made["id"])
    assert again.exit_code == 1
    assert again.stderr == f"error: there is no active key {made['id']!r}; `facet keys list` shows what there is.\n"


def test_a_key_is_printed_alone_for_shells_and_stored_nowhere(data_dir: Path) -> None:
    result = keys("create", "admin", "--admin")
    key = result.stdout.strip()
    assert result.stdout == f"{key}\n"
    assert len(key) > 40
    secret = key.rsplit("-", 1)[-1].encode()
    files = [path for path in data_dir.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"facet.db", "secret"}
    for path in files:
        assert secret not in path.read_bytes(), path
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700


def test_a_data_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = keys("create", "x", "--data-dir", str(tmp_path / "file"))
    assert result.exit_code == 1
    assert f"Is {tmp_path / 'file'} writable? Choose another folder with --data-dir." in result.stderr
