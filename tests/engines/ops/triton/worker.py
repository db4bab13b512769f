"""A process that runs kernels' cases, one a line of JSON: with TRITON_INTERPRET=1 it computes, without it compiles.

Asked `{"path": FILE, "case": NAME}` it calls CASES[NAME](lab) of that test file; asked `{"path", "launch", "target"}`
it calls LAUNCHES[NAME]() with every kernel launch recorded instead of run, and compiles what was recorded, exactly as
the launcher specialised it, for a chip that need not be there. Asked `{"path", "batches"}` it calls each of
BATCHES[NAME] and tells which binaries they would run. Answers `{"ok", "detail", ...}`.

The interpreter's `tl.dot` is replaced. It is numpy.matmul, whose BLAS gives a row different bits in different places of
the matrix; on tensor cores an element of a product depends on its own row and column alone, and the tests of sameness
need that. And it takes bfloat16 operands for the integers they are stored as: here that fails instead. Every second
launch runs its programs backwards, so that one which relies on another, or overwrites what another got wrong, shows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from lab import Lab
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, create_function_from_signature

# A kernel, its arguments, its options.
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
MODULES: dict[str, ModuleType] = {}


def dot(_: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
    """a [M, K] b [K, N] + d [M, N]: each element a sum over k in one order, whatever surrounds it."""
    operands = []
    for operand in (a, b):
        assert not operand.dtype.scalar.is_bf16(), "the interpreter multiplies the bits of bfloat16"
        values = operand.data
        if operand.dtype.scalar.is_fp8():  # float16 holds every e4m3 value
            values = interpreter._convert_float(values, operand.dtype.scalar, tl.float16, None).view(np.float16)
        operands.append(values.astype(d.data.dtype))
    return interpreter.TensorHandle(np.einsum("mk,kn->mn", *operands) + d.data, d.dtype.scalar)


def alternating() -> Any:
    """A `set_grid_idx` that reverses the order of programs in every second launch."""
    is_backward = False

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        nonlocal is_backward
        if (x, y, z) == (0, 0, 0):
            is_backward = not is_backward
        last = [size - 1 for size in self.grid_dim]
        self.grid_idx = (last[0] - x, last[1] - y, last[2] - z) if is_backward else (x, y, z)

    return set_grid_idx


def load(path: str) -> ModuleType:
    """A test file as a module, once."""
    if path not in MODULES:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        MODULES[path] = module
    return MODULES[path]


def interpret(question: dict[str, Any]) -> dict[str, Any]:
    """Run one case on guarded buffers."""
    lab = Lab()
    load(question["path"]).CASES[question["case"]](lab)
    lab.verify()
    return {}


def launches_of(launcher: Callable[[], object]) -> list[Launch]:
    """What a launcher launches, recorded instead of run."""
    launches: list[Launch] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self, arguments, options))

    JITFunction.run = record
    launcher()
    return launches


def compile_launches(question: dict[str, Any]) -> dict[str, Any]:
    """Compile what one launcher launches, for one target."""
    target = GPUTarget("cuda", question["target"], 32)
    launches = launches_of(load(question["path"]).LAUNCHES[question["launch"]])
    return {"kernels": [compile_one(launch, target) for launch in launches]}


def binaries_of_batches(question: dict[str, Any]) -> dict[str, Any]:
    """For each batch, the kernels it launches with all that they are specialised on."""
    target = GPUTarget("cuda", 90, 32)
    batches = load(question["path"]).BATCHES[question["batches"]]
    return {
        "binaries": [
            [(launch[0].__name__, str(specialised(launch, target)[1:])) for launch in launches_of(batch)]
            for batch in batches
        ]
    }


def specialised(launch: Launch, target: GPUTarget) -> tuple[Any, Any, Any, Any]:
    """Options, signature, constants and attributes: what JITFunction.run finds before it needs a driver."""
    kernel, arguments, options = launch
    backend = make_backend(target)
    bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *arguments, **options
    )
    packed: tuple[Any, Any, Any, Any] = kernel._pack_args(backend, options, bound, specialization, None)
    return packed


def compile_one(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """What JITFunction.run does with it."""
    kernel = launch[0]
    parsed, signature, constants, attributes = specialised(launch, target)
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


def answer_to(question: dict[str, Any]) -> dict[str, Any]:
    """See the top."""
    if "case" in question:
        return interpret(question)
    return binaries_of_batches(question) if "batches" in question else compile_launches(question)


def main() -> None:
    """Answer until the questions end. Whatever prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.set_grid_idx = alternating()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"ok": True, "detail": "", **answer_to(question)}
        except Exception:
            answer = {"ok": False, "detail": traceback.format_exc()[-6000:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
