"""A process that runs kernels' cases, one a line of JSON: with TRITON_INTERPRET=1 it computes, without it compiles.

Asked `{"path": FILE, "case": NAME}` it calls CASES[NAME](lab) of that test file; asked `{"path", "launch", "target"}`
it calls LAUNCHES[NAME]() with every kernel launch recorded instead of run, and compiles what was recorded, exactly as
the launcher specialised it, for a chip that need not be there. Answers `{"ok", "detail", ...}`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from lab import Lab
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

MODULES: dict[str, ModuleType] = {}


def load(path: str) -> ModuleType:
    """A test file as a module, once."""
    if path not in MODULES:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        MODULES[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(MODULES[path])
    return MODULES[path]


def interpret(question: dict[str, Any]) -> dict[str, Any]:
    """Run one case on guarded buffers."""
    lab = Lab()
    load(question["path"]).CASES[question["case"]](lab)
    lab.verify()
    return {}


def compile_launches(question: dict[str, Any]) -> dict[str, Any]:
    """Compile what one launcher launches, for one target."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self, arguments, options))

    JITFunction.run = record
    load(question["path"]).LAUNCHES[question["launch"]]()
    target = GPUTarget("cuda", question["target"], 32)
    return {"kernels": [compile_one(*launch, target) for launch in launches]}


def compile_one(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    """What JITFunction.run does before it needs a driver."""
    backend = make_backend(target)
    bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *arguments, **options
    )
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=parsed.__dict__)
    cubin = compiled.asm["cubin"]
    return {
        "name": kernel.__name__,
        "shared_bytes": compiled.metadata.shared,
        "is_elf": cubin[:4] == b"\x7fELF",
        "has_entry": compiled.metadata.name.encode() in cubin,
        "contracts": "fma.rn.f32" in compiled.asm["ptx"],
    }


def main() -> None:
    """Answer until the questions end. Whatever prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"ok": True, "detail": "", **(interpret if "case" in question else compile_launches)(question)}
        except Exception:
            answer = {"ok": False, "detail": traceback.format_exc()[-6000:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
