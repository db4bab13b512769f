"""The binding: when the kernels are refused, what the build is told, and how threads come and go."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.ops import native
from engines.ops.group_linear import NativeGroupLinear, pack_panels, reference_group_linear
from engines.quant.group import GroupQuant, quantize_groups

ROOT = Path(__file__).resolve().parents[3]


def extension() -> dict[str, object]:
    (table,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    return table


def test_without_a_library_the_reason_names_the_remedy(tmp_path: Path) -> None:
    assert not native.available(tmp_path)
    assert "python -m engines.ops.native build" in native.why_not(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_native.so").write_bytes(b"not a library")
    assert "cannot be loaded" in native.why_not(tmp_path)


def test_a_library_of_another_abi_is_refused(tmp_path: Path, native_library: ctypes.CDLL) -> None:
    source = tmp_path / "other.c"
    source.write_text(
        "#include <stdint.h>\n"
        "int32_t facet_cpu_supported(void) { return 1; }\n"
        "int32_t facet_abi(int64_t sizes[4]) { sizes[0] = sizes[1] = sizes[2] = sizes[3] = 8; return 1; }\n"
    )
    command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "_native.so"), str(source)]
    subprocess.run(command, check=True)
    assert "structures of [8, 8, 8, 8] bytes" in native.why_not(tmp_path)


def test_a_processor_without_the_instructions_is_refused(tmp_path: Path, native_library: ctypes.CDLL) -> None:
    source = tmp_path / "other.c"
    source.write_text(
        "#include <stdint.h>\n"
        "int32_t facet_cpu_supported(void) { return 0; }\n"
        "int32_t facet_abi(int64_t sizes[4]) { sizes[0] = 0; return 1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "_native.so"), str(source)], check=True)
    assert native.why_not(tmp_path) == "this processor lacks AVX2, FMA or F16C"


def test_a_library_that_is_there_is_used(native_library: ctypes.CDLL) -> None:
    sizes = (ctypes.c_int64 * 4)()
    assert native_library.facet_abi(sizes) == native.ABI
    assert list(sizes) == [ctypes.sizeof(kind) for kind in (native.Matrix, native.Layer, native.Model, native.Batch)]


def test_a_failing_compiler_is_reported(tmp_path: Path) -> None:
    with pytest.raises(native.NativeUnavailableError, match="no C compiler named facet-has-no-such-compiler"):
        native.build(tmp_path, compiler="facet-has-no-such-compiler")
    with pytest.raises(native.NativeUnavailableError, match="false failed"):
        native.build(tmp_path, compiler="false")
    assert list(tmp_path.iterdir()) == []


def test_installation_and_working_tree_compile_alike() -> None:
    table = extension()
    assert table["name"] == "engines.ops._native"
    assert table["optional"] is True
    assert table["extra-compile-args"] == list(native.COMPILE_FLAGS)
    listed = sorted(Path(str(name)).name for name in (*table["sources"], *table["depends"]))
    assert listed == sorted(path.name for path in native.SOURCES.iterdir())


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def sample() -> tuple[torch.Tensor, GroupQuant]:
    rng = np.random.default_rng(1)
    weight = quantize_groups(rng.normal(size=(256, 256)).astype(np.float32))
    return torch.from_numpy(rng.normal(size=(24, 256)).astype(np.float32)), weight


def test_threads_start_when_needed_sleep_when_idle_and_end_with_the_pool(native_library: ctypes.CDLL) -> None:
    x, weight = sample()
    before = threads_of_this_process()
    pool = native.Pool(native_library, 3)
    linear = NativeGroupLinear(native_library, pool, pack_panels(weight))
    assert threads_of_this_process() == before
    linear(x)
    assert threads_of_this_process() == before + 2
    time.sleep(0.05)  # longer than helpers watch for more work
    idle = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - idle < 0.1
    del linear, pool
    assert threads_of_this_process() == before


def test_a_fork_computes_with_threads_of_its_own(native_library: ctypes.CDLL) -> None:
    """The child inherits a pool whose helpers do not exist in it."""
    program = (
        "import os, sys, numpy as np, torch\n"
        "from pathlib import Path\n"
        "from engines.ops import native\n"
        "from engines.ops.group_linear import NativeGroupLinear, pack_panels\n"
        "from engines.quant.group import quantize_groups\n"
        "library = native.open_library(Path(sys.argv[1]))\n"
        "rng = np.random.default_rng(1)\n"
        "weight = pack_panels(quantize_groups(rng.normal(size=(64, 64)).astype(np.float32)))\n"
        "linear = NativeGroupLinear(library, native.Pool(library, 2), weight)\n"
        "x = torch.ones(3, 64)\n"
        "y = linear(x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(linear(x), y) and len(os.listdir('/proc/self/task')) == 2 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    command = [sys.executable, "-c", program, str(Path(native_library._name).parent)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == 0


def test_two_pools_work_at_the_same_time(native_library: ctypes.CDLL) -> None:
    x, weight = sample()
    expected = reference_group_linear(x, weight)
    packed, wrong = pack_panels(weight), []

    def work() -> None:
        linear = NativeGroupLinear(native_library, native.Pool(native_library, 2), packed)
        wrong.extend(i for i in range(50) if not torch.equal(linear(x), expected))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
