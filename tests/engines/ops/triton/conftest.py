"""Two processes for kernels without a GPU: the interpreter (TRITON_INTERPRET is read at import) and the compiler.

A test file holds CASES, checks by name that take a `Lab` (see `lab.py`), and LAUNCHES, calls of launchers by name that
are to compile. Each is a test of its own; a case that kills its process fails alone, the next gets a new process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
WORKER = Path(__file__).with_name("worker.py")

# Compute capability -> bytes of shared memory one program may have (CUDA C++ Programming Guide, table of capabilities).
SHARED_LIMIT_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# sm_86 and sm_89 have least; kernels stay under it, so one table of tiles serves all chips.
PORTABLE_LIMIT_BYTES = 99 << 10

# Triton is the optional extra `gpu`: without it there is nothing to test here.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


class Worker:
    """A `worker.py` process, started when first asked and again after it died."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment, self._log = environment, log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **question: Any) -> dict[str, Any]:
        if self._process is None:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [sys.executable, str(WORKER)],
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            pytest.fail(f"the process died with {code}: {self._log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.stdout is not None:
            self._process.kill()  # it holds nothing worth an orderly end, which takes seconds
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def _environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


@pytest.fixture(scope="session")
def _interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("interpreter") / "log"
    worker = Worker(_environment(TRITON_INTERPRET="1"), log)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def _compiler(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Triton's cache, named by source, options and compiler, survives in pytest's own: a minute the first time only."""
    folder, cache = tmp_path_factory.mktemp("compiler"), getattr(pytestconfig, "cache", None)
    compiled = folder / "cache" if cache is None else cache.mkdir("triton")
    worker = Worker(_environment(TRITON_CACHE_DIR=str(compiled)), folder / "log")
    yield worker
    worker.close()


@pytest.fixture
def interpreted(_interpreter: Worker, request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Runs CASES[name] of the asking file in the interpreter."""

    def run(name: str) -> None:
        answer = _interpreter.ask(path=str(request.path), case=name)
        assert answer["ok"], answer["detail"]

    return run


@pytest.fixture
def compiles(_compiler: Worker, request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """Compiles what LAUNCHES[name] of the asking file launches, for sm_`target`, and checks what came out."""

    def run(name: str, target: int) -> None:
        answer = _compiler.ask(path=str(request.path), launch=name, target=target)
        assert answer["ok"], answer["detail"]
        assert answer["kernels"], "nothing was launched"
        for kernel in answer["kernels"]:
            assert kernel["is_elf"], kernel
            assert kernel["has_entry"], kernel
            assert kernel["shared_bytes"] <= min(SHARED_LIMIT_BYTES[target], PORTABLE_LIMIT_BYTES), kernel

    return run


@pytest.fixture
def binaries(_compiler: Worker, request: pytest.FixtureRequest) -> Callable[[str], list[list[list[str]]]]:
    """For each of BATCHES[name] of the asking file: the kernels it launches and what they are specialised on."""

    def run(name: str) -> list[list[list[str]]]:
        answer = _compiler.ask(path=str(request.path), batches=name)
        assert answer["ok"], answer["detail"]
        found: list[list[list[str]]] = answer["binaries"]
        return found

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` and `launch` x `target` come from the file's own tables; TARGETS[launch], if there, limits targets."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", list(metafunc.module.CASES))
    if "launch" in metafunc.fixturenames:
        limited = getattr(metafunc.module, "TARGETS", {})
        pairs = [
            (launch, target)
            for launch in metafunc.module.LAUNCHES
            for target in limited.get(launch, SHARED_LIMIT_BYTES)
        ]
        metafunc.parametrize(("launch", "target"), pairs, ids=[f"{launch}-sm_{target}" for launch, target in pairs])
