"""The command as a whole: what it offers, how it speaks, how quickly it says so."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gateway.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
# Commands whose output is data, and which therefore can print JSON.
DATA = {
    "pull",
    "doctor",
    "keys create",
    "keys list",
    "keys revoke",
    "policy check",
    "bench engine",
    "bench gateway",
    "eval kld",
    "eval ppl",
    "eval table",
}
OTHERS = {"up", "serve", "chat", "policy schema"}


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every leaf by its words."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        words = (*path, name)
        if hasattr(command, "commands"):
            found |= commands(command, words)
        else:
            found[" ".join(words)] = command
    return found


LEAVES = commands(typer.main.get_command(app))


def test_the_commands_are_these() -> None:
    assert set(LEAVES) == DATA | OTHERS


@pytest.mark.parametrize("words", sorted(DATA | OTHERS))
def test_every_command_explains_itself(words: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), "--help"])
    assert result.exit_code == 0
    assert f"{words} [OPTIONS]" in result.output
    options = [option for parameter in LEAVES[words].params for option in parameter.opts]
    assert ("--json" in options) == (words in DATA)
    silent = [parameter.name for parameter in LEAVES[words].params if not getattr(parameter, "help", None)]
    assert silent == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["keys"],
        ["pull"],
        ["up", "--no-such-option"],
        ["up", "--port", "70000"],
        ["serve", "--engine", "llama"],
        ["up", "--dtype", "int3"],
        ["bench", "engine", "--dtype", "int3"],
        ["bench", "gateway", "--concurrency", "1,x"],
        ["bench", "gateway", "--concurrency", "0"],
        ["keys", "create", " "],
        ["chat", "--temperature", "3"],
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACET_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("FACET_PORT", "0")
    monkeypatch.setenv("FACET_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "policy.yaml").write_bytes((ROOT / "policies" / "default.yaml").read_bytes())
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert not (tmp_path / "cache").exists()


def test_a_setting_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACET_PORT", "eighty")
    result = CliRunner().invoke(app, ["keys", "list"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: FACET_PORT: ")


def test_help_is_quick_because_it_loads_next_to_nothing() -> None:
    """Under 0.4 s by a wide margin: what takes long is the import of these, and none of them is needed for help."""
    program = (
        "import sys\n"
        "from gateway.cli.main import run\n"
        "sys.argv = ['facet', '--help']\n"
        "try:\n"
        "    run()\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    heavy = {"torch", "numpy", "litestar", "uvicorn", "rich", "yaml", "msgspec", "sqlite3", "tokenizers", "asyncio"}
    assert heavy & loaded == set()
    assert "gateway.cli.serve" in loaded


def test_off_a_terminal_nothing_is_coloured() -> None:
    for arguments in (["--help"], ["bench", "engine", "--help"], ["no-such-command"]):
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert "\x1b" not in done.stdout + done.stderr


def test_the_entry_point_is_the_one_that_the_package_names() -> None:
    (target,) = re.findall(r'^facet = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    module, _, name = target.partition(":")
    assert callable(getattr(import_module(module), name))


def test_version_says_which() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    (pinned,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert result.output.strip() in {pinned, "source tree, not installed"}
