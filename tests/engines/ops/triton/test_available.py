"""Where kernels may be dispatched to, and the bench that runs them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engines.ops import triton as kernels

ROOT = Path(__file__).resolve().parents[4]
BENCH = ROOT / "tests" / "bench" / "gpu_kernels.py"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("has_device", "spec", "expected"), [(True, object(), True), (True, None, False), (False, object(), False)]
)
def test_available_needs_a_device_and_triton(
    monkeypatch: pytest.MonkeyPatch, has_device: bool, spec: object, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    monkeypatch.setattr(kernels, "find_spec", lambda name: spec if name == "triton" else None)
    assert kernels.available() is expected


def test_importing_the_package_and_asking_imports_no_triton() -> None:
    done = python(
        "-c",
        "import sys; from engines.ops import triton; assert not triton.available(); assert 'triton' not in sys.modules",
    )
    assert done.returncode == 0, done.stderr


def test_the_bench_says_that_there_is_no_device() -> None:
    done = python(str(BENCH))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device" in done.stderr


def test_the_bench_rehearses() -> None:
    """All of it runs in the interpreter, on tiny shapes. (Sameness of bits is the BLAS's there, so it is not asked.)"""
    done = python(str(BENCH), "--rehearse", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["rehearsal"] is True
    assert len(report["kernels"]) == 37
    assert all(kernel["median_us"] > 0 for kernel in report["kernels"])
    assert len(report["checks"]) == 11
    assert [check for check in report["checks"] if "error" in check and not check["ok"]] == []
