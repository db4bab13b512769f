"""Runs `facet` as people do: a process of its own, with folders of its own and no settings of this machine's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "gateway.cli")
START_TIMEOUT_S = 60.0


@dataclass
class Running:
    """A gateway that has said `ready`. `lines`: everything it printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return next(line.split()[1] for line in self.lines if line.startswith("ready"))

    @property
    def keys(self) -> dict[str, str]:
        """The keys it showed, by role."""
        found = (re.fullmatch(r" +(admin|user) +(sk-facet-\S+)", line) for line in self.lines)
        return {match[1]: match[2] for match in found if match}

    def end(self, *, timeout_s: float = 30.0) -> tuple[int, str, str]:
        """Ctrl-C; exit status, the rest of stdout, stderr."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@dataclass(frozen=True)
class Facet:
    """`environment` holds the folders of one user."""

    environment: dict[str, str]
    folder: Path

    def __call__(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env={**self.environment, **environment},
            timeout=120,
        )

    @contextmanager
    def running(self, *arguments: str, **environment: str) -> Iterator[Running]:
        """Start, wait for `ready`, end whatever happens."""
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**self.environment, **environment},
        )
        running = Running(process)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                running.lines.append(line.rstrip("\n"))
                if line.startswith("Ctrl-C ends it"):
                    break
            else:
                assert process.stderr is not None
                pytest.fail(f"facet did not become ready: {running.lines} {process.stderr.read()}")
            yield running
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def facet(tmp_path: Path) -> Facet:
    """A user with empty folders. PATH and certificates stay; every setting of Facet and pip goes."""
    return facet_in(tmp_path)


def facet_in(folder: Path) -> Facet:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FACET_", "PIP_", "XDG_"))}
    own = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return Facet({**kept, **own}, folder)


def policy_text(models: Sequence[tuple[str, str, str]]) -> str:
    """A policy of (name, source, task)."""
    lines = ["version: facet/v1", "models:"]
    lines += [
        f"  {name}: {{source: {source!r}, task: {task}, dtype: float32, price: {{input_usd_per_mtok: 1}}}}"
        for name, source, task in models
    ]
    return "\n".join([*lines, 'aliases: {"*": small}', ""])


@pytest.fixture
def tiny_policy(tmp_path: Path, tiny_llama_path: Path) -> Path:
    """One tiny decoder, called small."""
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text([("small", str(tiny_llama_path), "generate")]))
    return path
