"""The documents and the program agree: every command in them exists, every option and setting is in them.

Whether commands do what the text says is checked by running them (`tests/gateway/cli/test_serve.py` pastes the lines
that `facet up` prints).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml

from gateway.cli.main import app
from gateway.settings import Limits, Settings, TelemetrySettings
from policies.schema import Budget, Model, PlanSpec

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(facet [a-z][^`]*)`")


def command_lines() -> list[tuple[str, str]]:
    """(page, `facet ...`) of shell blocks and running text."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in SHELL.findall(text) for line in block.splitlines()] + INLINE.findall(text)
        for line in lines:
            found += [(page.name, part) for part in re.findall(r"(?:^|&& |\$\()(facet [^&)]*)", line)]
    return found


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """The command behind the words, and what is left for it."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(("page", "line"), sorted(set(command_lines())))
def test_every_command_in_the_documents_exists(page: str, line: str) -> None:
    command, rest = resolved(shlex.split(line, comments=True)[1:])
    known = {option for parameter in command.params for option in parameter.opts} | {
        "--help",
        "--install-completion",
        "--show-completion",
    }
    unknown = [word for word in rest if word.startswith("-") and word not in known]
    assert unknown == [], f"{page}: {line}"


def test_the_documents_hold_commands_to_check() -> None:
    assert len(set(command_lines())) > 25


def leaves(group: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        words = f"{path} {name}".strip()
        found |= leaves(command, words) if hasattr(command, "commands") else {words: command}
    return found


def test_the_reference_has_every_command_and_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    sections = {section.split("\n", 1)[0].strip(): section for section in text.split("\n## facet ")}
    missing = []
    for words, command in leaves(typer.main.get_command(app)).items():
        section = sections.get(words.split()[0], "")
        if f"facet {words}" not in text:
            missing.append(words)
        inherited = sections["up"] if words == "serve" else ""
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        missing += [f"{words} {option}" for option in options - {"--help"} if option not in section + inherited]
    assert missing == []


def test_operations_lists_every_setting_with_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `(FACET_\w+)` \|.*\| (\S*) \|$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    )
    named = set(re.findall(r"^\| `(FACET_\w+)`", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE))
    defaults: dict[str, object] = {}
    for prefix, part in (("FACET_", Settings), ("FACET_LIMIT_", Limits), ("FACET_TELEMETRY_", TelemetrySettings)):
        for field in msgspec.structs.fields(part):
            if field.name not in {"limits", "telemetry"}:
                defaults[prefix + field.name.upper()] = field.default
    assert named == set(defaults)
    switches = {name: value for name, value in defaults.items() if isinstance(value, bool)}
    assert {name: rows[name] for name in switches} == {name: str(value).lower() for name, value in switches.items()}
    numbers = {
        name: value
        for name, value in defaults.items()
        if isinstance(value, int | float) and value and name not in switches
    }
    assert {name: float(rows[name]) for name in numbers} == {name: float(value) for name, value in numbers.items()}


def test_python_and_yaml_in_the_documents_parse() -> None:
    programs = [block for page in PAGES for block in PYTHON.findall(page.read_text())]
    documents = [block for page in PAGES for block in YAML.findall(page.read_text())]
    assert programs
    assert documents
    for program in programs:
        compile(program, "<docs>", "exec")
    for document in documents:
        assert yaml.safe_load(document)


def test_the_http_page_has_every_code_and_the_policy_page_every_field() -> None:
    http, policies = ((ROOT / "docs" / name).read_text() for name in ("http.md", "policies.md"))
    sources = [*(ROOT / "gateway").rglob("*.py"), *(ROOT / "routers").rglob("*.py")]
    used = {code for path in sources for code in re.findall(r'code="([a-z_]+)"', path.read_text())}
    assert [code for code in sorted(used | {"context_length_exceeded"}) if f"`{code}`" not in http] == []
    for section, prefix in ((Model, "models.NAME."), (Budget, "budget."), (PlanSpec, "default.")):
        assert [f.name for f in msgspec.structs.fields(section) if f"`{prefix}{f.name}`" not in policies] == []
